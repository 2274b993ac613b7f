// Preloaded into a server: while the switch file's first byte is 1, writes to files below the
// folders of FULL_DISK_FOLDERS (separated by colons) fail with ENOSPC, as on a full disk.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

static volatile const char* on;
static const char* folders;

__attribute__((constructor)) static void begin(void) {
  const char* path = getenv("FULL_DISK_SWITCH");
  folders = getenv("FULL_DISK_FOLDERS");
  int fd = path && folders ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (fd < 0) return;
  void* page = mmap(NULL, 1, PROT_READ, MAP_SHARED, fd, 0);
  close(fd);
  if (page != MAP_FAILED) on = page;
}

static int is_full(int fd) {
  if (!on || *on != 1) return 0;
  char link[64], path[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t size = readlink(link, path, sizeof path - 1);
  if (size <= 0) return 0;
  path[size] = 0;
  for (const char* at = folders; *at;) {
    size_t length = strcspn(at, ":");
    if (length && !strncmp(path, at, length) && path[length] == '/') return 1;
    at += length + (at[length] == ':');
  }
  return 0;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t write(int fd, const void* data, size_t size) {
  static ssize_t (*real)(int, const void*, size_t);
  if (!real) real = REAL(write);
  if (is_full(fd)) return errno = ENOSPC, -1;
  return real(fd, data, size);
}
ssize_t pwrite64(int fd, const void* data, size_t size, off64_t at) {
  static ssize_t (*real)(int, const void*, size_t, off64_t);
  if (!real) real = REAL(pwrite64);
  if (is_full(fd)) return errno = ENOSPC, -1;
  return real(fd, data, size, at);
}
ssize_t writev(int fd, const struct iovec* parts, int count) {
  static ssize_t (*real)(int, const struct iovec*, int);
  if (!real) real = REAL(writev);
  if (is_full(fd)) return errno = ENOSPC, -1;
  return real(fd, parts, count);
}
