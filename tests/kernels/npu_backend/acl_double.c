// A host library with the AscendCL symbols that npu_backend calls, so that its code runs without
// an NPU. It keeps the rules of the public interface for A2 and A3 and answers their codes:
// a reservation is PROT_NONE address space aligned to 2 MiB, physical memory a file in memory, a
// mapping is one of those files over part of a reservation. `double_*` are for the tests.
//
// gcc -O2 -shared -fPIC acl_double.c -o libascendcl.so -lpthread
#define _GNU_SOURCE
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE ((size_t)2 << 20)
enum {
  BAD_ARGUMENT = 100000,
  NOT_INITIALIZED = 100001,
  REPEATED_INITIALIZE = 100002,
  BAD_PARAMETER = 107000,
  BAD_DEVICE = 107001,
  NO_CONTEXT = 107002,
  UNSUPPORTED = 207000,
  NO_MEMORY = 207001,
  DRIVER_REFUSES = 507899,
};
enum { RESERVE, RELEASE, MALLOC, FREE, MAP, UNMAP, COPY };

typedef struct { uint32_t id; int type; } Location;
typedef struct {
  int handle_type, allocation_type, mem_attr;
  Location location;
  uint64_t reserve;
} Prop;

typedef struct { size_t size; int fd, references, mappings; } Physical;
typedef struct Range {
  struct Range *next;
  char *start;
  size_t size;
  Physical *physical;  // NULL: a reservation
} Range;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Range *ranges;
static int initialized, synchronized;
static __thread int device = -1;
static size_t capacity = (size_t)1 << 30, used;
static long num_physical;
static struct { int operation, after, code; } fault = {-1, 0, 0};

static int enter(int operation) {
  pthread_mutex_lock(&lock);
  if (!initialized) return NOT_INITIALIZED;
  if (device < 0) return NO_CONTEXT;
  if (fault.operation == operation && fault.after-- == 0) {
    fault.operation = -1;
    return fault.code;
  }
  return 0;
}

static int leave(int code) {
  pthread_mutex_unlock(&lock);
  return code;
}

static Range *inside(char *start, size_t size, int mapped) {
  for (Range *r = ranges; r; r = r->next)
    if (!r->physical == !mapped && start >= r->start && start + size <= r->start + r->size)
      return r;
  return NULL;
}

static int touches_mapping(char *start, size_t size) {
  for (Range *r = ranges; r; r = r->next)
    if (r->physical && start < r->start + r->size && r->start < start + size) return 1;
  return 0;
}

static void add(char *start, size_t size, Physical *physical) {
  Range *r = malloc(sizeof *r);
  *r = (Range){ranges, start, size, physical};
  ranges = r;
}

static void drop(Range *range) {
  Range **link = &ranges;
  while (*link != range) link = &(*link)->next;
  *link = range->next;
  free(range);
}

static void unreference(Physical *p) {
  if (--p->references) return;
  close(p->fd);
  used -= p->size;
  num_physical--;
  free(p);
}

int aclInit(const char *config) {
  (void)config;
  if (initialized) return REPEATED_INITIALIZE;
  initialized = 1;
  return 0;
}

int aclrtSetDevice(int32_t number) {
  if (!initialized) return NOT_INITIALIZED;
  if (number < 0 || number > 7) return BAD_DEVICE;
  device = number;
  return 0;
}

int aclrtSynchronizeDevice(void) {
  synchronized = 1;
  return 0;
}

const char *aclGetRecentErrMsg(void) { return "the double refuses"; }

int aclrtGetMemInfo(int attribute, size_t *unused, size_t *total) {
  if (attribute != 1) return BAD_ARGUMENT;
  *unused = capacity - used;
  *total = capacity;
  return 0;
}

int aclrtMemGetAllocationGranularity(Prop *prop, int option, size_t *granularity) {
  if (!prop || !granularity) return BAD_ARGUMENT;
  if (option < 0 || option > 1) return UNSUPPORTED;
  *granularity = PAGE;
  return 0;
}

int aclrtReserveMemAddress(void **out, size_t size, size_t align, void *want, uint64_t flags) {
  int code = enter(RESERVE);
  if (code) return leave(code);
  if (!out || !size || flags > 1) return leave(BAD_ARGUMENT);
  if (align || want) return leave(BAD_PARAMETER);
  if (size > (size_t)128 << 30) return leave(NO_MEMORY);
  size = (size + PAGE - 1) / PAGE * PAGE;
  int anonymous = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  char *raw = mmap(NULL, size + PAGE, PROT_NONE, anonymous, -1, 0);
  if (raw == MAP_FAILED) return leave(NO_MEMORY);
  char *start = (char *)(((uintptr_t)raw + PAGE - 1) / PAGE * PAGE);
  if (start > raw) munmap(raw, start - raw);
  if (raw + PAGE > start) munmap(start + size, raw + PAGE - start);
  add(start, size, NULL);
  *out = start;
  return leave(0);
}

int aclrtReleaseMemAddress(void *start) {
  int code = enter(RELEASE);
  if (code) return leave(code);
  Range *r = inside(start, 1, 0);
  if (!start || !r || r->start != (char *)start) return leave(BAD_PARAMETER);
  if (touches_mapping(r->start, r->size)) return leave(DRIVER_REFUSES);
  munmap(r->start, r->size);
  drop(r);
  return leave(0);
}

int aclrtMallocPhysical(void **out, size_t size, const Prop *prop, uint64_t flags) {
  int code = enter(MALLOC);
  if (code) return leave(code);
  if (!out || !prop || !size || flags || prop->handle_type || prop->allocation_type ||
      prop->location.type != 1 || (int)prop->location.id != device || prop->mem_attr != 4)
    return leave(BAD_ARGUMENT);
  if (prop->reserve) return leave(BAD_PARAMETER);
  if (size % PAGE) return leave(DRIVER_REFUSES);
  if (used + size > capacity) return leave(NO_MEMORY);
  int fd = memfd_create("npu_memory", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, size)) return leave(NO_MEMORY);
  Physical *p = malloc(sizeof *p);
  *p = (Physical){size, fd, 1, 0};
  used += size;
  num_physical++;
  *out = p;
  return leave(0);
}

int aclrtFreePhysical(void *handle) {
  int code = enter(FREE);
  if (code) return leave(code);
  Physical *p = handle;
  if (!p) return leave(BAD_ARGUMENT);
  if (p->mappings && p->references <= p->mappings) return leave(BAD_PARAMETER);
  unreference(p);
  return leave(0);
}

int aclrtMapMem(void *start, size_t size, size_t offset, void *handle, uint64_t flags) {
  int code = enter(MAP);
  if (code) return leave(code);
  Physical *p = handle;
  if (!start || !size || !p || flags) return leave(BAD_ARGUMENT);
  if (offset) return leave(BAD_PARAMETER);
  if ((uintptr_t)start % PAGE || size != p->size || !inside(start, size, 0) ||
      touches_mapping(start, size))
    return leave(DRIVER_REFUSES);
  int access = PROT_READ | PROT_WRITE;
  if (mmap(start, size, access, MAP_SHARED | MAP_FIXED, p->fd, 0) == MAP_FAILED)
    return leave(NO_MEMORY);
  add(start, size, p);
  p->references++;
  p->mappings++;
  return leave(0);
}

int aclrtUnmapMem(void *start) {
  int code = enter(UNMAP);
  if (code) return leave(code);
  Range *r = start ? inside(start, 1, 1) : NULL;
  // The real one would take pages from under running kernels; the double insists on the wait.
  if (!r || r->start != (char *)start || !synchronized) return leave(DRIVER_REFUSES);
  synchronized = 0;
  int anonymous = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  mmap(start, r->size, PROT_NONE, anonymous, -1, 0);
  r->physical->mappings--;
  unreference(r->physical);
  drop(r);
  return leave(0);
}

// Inside a reservation every byte must be mapped; other addresses are the host's.
static int readable(char *start, size_t size) {
  if (!inside(start, 1, 0)) return 1;
  while (size) {
    Range *r = inside(start, 1, 1);
    if (!r) return 0;
    size_t here = r->start + r->size - start;
    if (here >= size) return 1;
    start += here;
    size -= here;
  }
  return 1;
}

int aclrtMemcpy(void *to, size_t room, const void *from, size_t size, int kind) {
  int code = enter(COPY);
  if (code) return leave(code);
  if (!to || !from || size > room || kind < 0 || kind > 3) return leave(BAD_ARGUMENT);
  if (!!inside(to, 1, 0) != (kind == 1) || !!inside((char *)from, 1, 0) != (kind == 2))
    return leave(BAD_PARAMETER);
  if (!readable(to, size) || !readable((char *)from, size)) return leave(DRIVER_REFUSES);
  memcpy(to, from, size);
  return leave(0);
}

// The next call of `operation` after `after` more of them answers `code`, once.
void double_fail(int operation, int after, int code) {
  fault.operation = operation;
  fault.after = after;
  fault.code = code;
}

void double_capacity(size_t bytes) { capacity = bytes; }

// 0: reservations, 1: mappings, 2: physical memory.
long double_live(int what) {
  long count = 0;
  for (Range *r = ranges; r; r = r->next) count += !r->physical == !what;
  return what == 2 ? num_physical : count;
}
