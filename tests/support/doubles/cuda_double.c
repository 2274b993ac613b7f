// A host library with the CUDA driver's symbols for virtual memory, so that cuda_backend's calls run
// without a GPU: a reservation is address space without access, an allocation a file in memory,
// which is what export and import pass on. All of its devices have the same memory, and reach each
// other's. `double_*` are for the tests.
//
// gcc -O2 -shared -fPIC cuda_double.c -o libcuda.so -lpthread
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define PAGE ((size_t)2 << 20)
#define DEVICES 3
enum { INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201 };
enum { RESERVE, RELEASE, CREATE, DESTROY, MAP, UNMAP, GRANT, COPY, EXPORT };

typedef struct { int type, id; } Location;
typedef struct {
  int type, handle_types;
  Location location;
  void *win32;
  unsigned char flags[8];
} Prop;
typedef struct { Location location; int flags; } Access;

typedef struct { size_t size; int fd, references, imported; } Physical;
typedef struct Range {
  struct Range *next;
  uint64_t start;
  size_t size;
  Physical *physical;  // NULL: a reservation
  int access;
} Range;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Range *ranges;
static __thread int contexts;
static size_t capacity = (size_t)1 << 30, used;
static long num_physical;
static struct { int operation, after, code; } fault = {-1, 0, 0};

static int enter(int operation) {
  pthread_mutex_lock(&lock);
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

static Range *inside(uint64_t start, size_t size, int mapped) {
  for (Range *r = ranges; r; r = r->next)
    if (!r->physical == !mapped && start >= r->start && start + size <= r->start + r->size)
      return r;
  return NULL;
}

static int touches_mapping(uint64_t start, size_t size) {
  for (Range *r = ranges; r; r = r->next)
    if (r->physical && start < r->start + r->size && r->start < start + size) return 1;
  return 0;
}

static void add(uint64_t start, size_t size, Physical *physical) {
  Range *r = malloc(sizeof *r);
  *r = (Range){ranges, start, size, physical, 0};
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
  if (!p->imported) used -= p->size;
  num_physical--;
  free(p);
}

static uint64_t new_physical(int fd, size_t size, int imported) {
  Physical *p = malloc(sizeof *p);
  *p = (Physical){size, fd, 1, imported};
  if (!imported) used += size;
  num_physical++;
  return (uint64_t)(uintptr_t)p;
}

int cuInit(unsigned flags) { return flags ? INVALID_VALUE : 0; }

int cuGetErrorName(int code, const char **name) {
  *name = code == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_OF_THE_DOUBLE";
  return 0;
}

int cuDeviceGet(int *device, int ordinal) {
  *device = ordinal;
  return ordinal < 0 || ordinal >= DEVICES ? 101 : 0;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 102 || attribute == 103;
  return device >= DEVICES ? 101 : 0;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
  *context = &ranges;
  return device >= DEVICES ? 101 : 0;
}

int cuDeviceGetCount(int *count) {
  *count = DEVICES;
  return 0;
}

int cuDeviceGetUuid_v2(void *uuid, int device) {
  memset(uuid, device + 1, 16);
  return 0;
}

int cuDeviceCanAccessPeer(int *can, int device, int peer) {
  *can = device != peer;
  return 0;
}

int cuCtxPushCurrent_v2(void *context) {
  if (context != &ranges) return INVALID_CONTEXT;
  contexts++;
  return 0;
}

int cuCtxPopCurrent_v2(void **context) {
  if (!contexts) return INVALID_CONTEXT;
  contexts--;
  *context = &ranges;
  return 0;
}

int cuStreamCreate(void **stream, unsigned flags) {
  *stream = &used;
  return flags > 1 ? INVALID_VALUE : contexts ? 0 : INVALID_CONTEXT;
}

// The stream of a priority runs when it is waited for: until then its clears leave 0xff behind.
static struct { uint64_t to; size_t size; unsigned char value; } late[64];
static int num_late;

int cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
  *stream = &late;
  return flags > 1 || priority >= 0 ? INVALID_VALUE : contexts ? 0 : INVALID_CONTEXT;
}

int cuStreamSynchronize(void *stream) {
  if (stream == &late && contexts) {
    while (num_late) {
      num_late--;
      memset((void *)(uintptr_t)late[num_late].to, late[num_late].value, late[num_late].size);
    }
    return 0;
  }
  return (stream && stream != &used) || !contexts ? INVALID_CONTEXT : 0;
}

int cuStreamQuery(void *stream) { return cuStreamSynchronize(stream); }

int cuCtxSynchronize(void) { return contexts ? 0 : INVALID_CONTEXT; }

int cuMemGetInfo_v2(size_t *unused, size_t *total) {
  if (!contexts) return INVALID_CONTEXT;
  *unused = capacity - used;
  *total = capacity;
  return 0;
}

static int bad(const Prop *p) {
  return p->type != 1 || p->handle_types != 1 || p->location.type != 1 || p->location.id >= DEVICES ||
         p->win32 || memcmp(p->flags, "\0\0\0\0\0\0\0", 8);
}

int cuMemGetAllocationGranularity(size_t *size, const Prop *prop, int option) {
  if (bad(prop) || option < 0 || option > 1) return INVALID_VALUE;
  *size = PAGE;
  return 0;
}

int cuMemAddressReserve(uint64_t *out, size_t size, size_t align, uint64_t want, uint64_t flags) {
  int code = enter(RESERVE);
  if (code) return leave(code);
  if (!size || size % PAGE || (align && align != PAGE) || want || flags)
    return leave(INVALID_VALUE);
  int anonymous = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  char *raw = mmap(NULL, size + PAGE, PROT_NONE, anonymous, -1, 0);
  if (raw == MAP_FAILED) return leave(OUT_OF_MEMORY);
  char *start = (char *)(((uintptr_t)raw + PAGE - 1) / PAGE * PAGE);
  if (start > raw) munmap(raw, start - raw);
  if (raw + PAGE > start) munmap(start + size, raw + PAGE - start);
  add((uint64_t)(uintptr_t)start, size, NULL);
  *out = (uint64_t)(uintptr_t)start;
  return leave(0);
}

int cuMemAddressFree(uint64_t start, size_t size) {
  int code = enter(RELEASE);
  if (code) return leave(code);
  Range *r = inside(start, size, 0);
  if (!r || r->start != start || r->size != size || touches_mapping(start, size))
    return leave(INVALID_VALUE);
  munmap((void *)(uintptr_t)start, size);
  drop(r);
  return leave(0);
}

int cuMemCreate(uint64_t *out, size_t size, const Prop *prop, uint64_t flags) {
  int code = enter(CREATE);
  if (code) return leave(code);
  if (!size || size % PAGE || bad(prop) || flags) return leave(INVALID_VALUE);
  if (used + size > capacity) return leave(OUT_OF_MEMORY);
  int fd = memfd_create("gpu_memory", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, size)) return leave(OUT_OF_MEMORY);
  *out = new_physical(fd, size, 0);
  return leave(0);
}

int cuMemRelease(uint64_t handle) {
  int code = enter(DESTROY);
  if (code) return leave(code);
  unreference((Physical *)(uintptr_t)handle);
  return leave(0);
}

int cuMemMap(uint64_t start, size_t size, size_t offset, uint64_t handle, uint64_t flags) {
  int code = enter(MAP);
  if (code) return leave(code);
  Physical *p = (Physical *)(uintptr_t)handle;
  if (start % PAGE || size != p->size || offset || flags || !inside(start, size, 0) ||
      touches_mapping(start, size))
    return leave(INVALID_VALUE);
  void *place = (void *)(uintptr_t)start;
  if (mmap(place, size, PROT_NONE, MAP_SHARED | MAP_FIXED, p->fd, 0) == MAP_FAILED)
    return leave(OUT_OF_MEMORY);
  add(start, size, p);
  p->references++;
  return leave(0);
}

int cuMemUnmap(uint64_t start, size_t size) {
  int code = enter(UNMAP);
  if (code) return leave(code);
  Range *r = inside(start, size, 1);
  if (!r || r->start != start || r->size != size) return leave(INVALID_VALUE);
  int anonymous = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  mmap((void *)(uintptr_t)start, size, PROT_NONE, anonymous, -1, 0);
  unreference(r->physical);
  drop(r);
  return leave(0);
}

int cuMemSetAccess(uint64_t start, size_t size, const Access *access, size_t count) {
  int code = enter(GRANT);
  if (code) return leave(code);
  int flags = access->flags;
  if (!count || (flags != 0 && flags != 1 && flags != 3)) return leave(INVALID_VALUE);
  for (size_t i = 0; i < count; i++)
    if (access[i].location.type != 1 || access[i].location.id >= DEVICES || access[i].flags != flags)
      return leave(INVALID_VALUE);
  uint64_t end = start + size;
  for (uint64_t at = start; at < end;) {
    Range *r = inside(at, 1, 1);
    if (!r || r->start != at || at + r->size > end) return leave(INVALID_VALUE);
    at += r->size;
  }
  for (uint64_t at = start; at < end;) {
    Range *r = inside(at, 1, 1);
    r->access = flags;  // PROT_NONE, PROT_READ and PROT_READ | PROT_WRITE have the same numbers
    mprotect((void *)(uintptr_t)at, r->size, flags);
    at += r->size;
  }
  return leave(0);
}

int cuMemExportToShareableHandle(int *out, uint64_t handle, int type, uint64_t flags) {
  int code = enter(EXPORT);
  if (code) return leave(code);
  if (type != 1 || flags) return leave(INVALID_VALUE);
  *out = fcntl(((Physical *)(uintptr_t)handle)->fd, F_DUPFD_CLOEXEC, 0);
  return leave(*out < 0 ? OUT_OF_MEMORY : 0);
}

int cuMemImportFromShareableHandle(uint64_t *out, void *descriptor, int type) {
  struct stat status;
  int fd = fcntl((int)(intptr_t)descriptor, F_DUPFD_CLOEXEC, 0);
  if (type != 1 || fd < 0 || fstat(fd, &status)) return INVALID_VALUE;
  pthread_mutex_lock(&lock);
  *out = new_physical(fd, status.st_size, 1);
  return leave(0);
}

static int allowed(uint64_t at, size_t size, int access) {
  while (size) {
    Range *r = inside(at, 1, 1);
    if (!r || (r->access & access) != access) return 0;
    size_t here = r->start + r->size - at;
    if (here >= size) return 1;
    at += here;
    size -= here;
  }
  return 1;
}

int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t size) {
  int code = enter(COPY);
  if (code || !contexts) return leave(code ? code : INVALID_CONTEXT);
  if (!allowed(to, size, 3)) return leave(INVALID_VALUE);
  memcpy((void *)(uintptr_t)to, from, size);
  return leave(0);
}

int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size) {
  int code = enter(COPY);
  if (code || !contexts) return leave(code ? code : INVALID_CONTEXT);
  if (!allowed(from, size, 1)) return leave(INVALID_VALUE);
  memcpy(to, (void *)(uintptr_t)from, size);
  return leave(0);
}

// The source may be memory of XLA's, of which this double knows nothing.
int cuMemcpyDtoD_v2(uint64_t to, uint64_t from, size_t size) {
  return cuMemcpyHtoD_v2(to, (const void *)(uintptr_t)from, size);
}

int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t size, void *stream) {
  int code = enter(COPY);
  if (code || stream != &used) return leave(code ? code : INVALID_CONTEXT);
  memcpy((void *)(uintptr_t)to, from, size);
  return leave(0);
}

int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t size, void *stream) {
  if (stream != &used) return INVALID_CONTEXT;
  memcpy(to, (void *)(uintptr_t)from, size);
  return 0;
}

int cuMemsetD8Async(uint64_t to, unsigned char value, size_t size, void *stream) {
  if (stream == &late && contexts) {
    if (num_late == 64) return OUT_OF_MEMORY;
    memset((void *)(uintptr_t)to, 0xff, size);
    late[num_late].to = to, late[num_late].size = size, late[num_late++].value = value;
    return 0;
  }
  if ((stream && stream != &used) || !contexts) return INVALID_CONTEXT;
  memset((void *)(uintptr_t)to, value, size);
  return 0;
}

int cuMemAlloc_v2(uint64_t *out, size_t size) {
  *out = (uint64_t)(uintptr_t)aligned_alloc(256, (size + 255) / 256 * 256);
  return *out ? 0 : OUT_OF_MEMORY;
}

// Attribute 13 tells memory of cuMemAlloc from mapped pages, as the driver does.
int cuPointerGetAttribute(void *out, int attribute, uint64_t address) {
  if (attribute != 13 || !contexts) return INVALID_VALUE;
  pthread_mutex_lock(&lock);
  *(int *)out = !inside(address, 1, 1);
  return leave(0);
}

int cuMemHostAlloc(void **out, size_t size, unsigned flags) {
  if (flags != 3) return INVALID_VALUE;
  *out = aligned_alloc(256, (size + 255) / 256 * 256);
  return *out ? 0 : OUT_OF_MEMORY;
}

static uintptr_t pinned[2];  // one range at a time

int cuMemHostRegister_v2(void *start, size_t size, unsigned flags) {
  if (flags != 3 || pinned[1] || !contexts) return INVALID_VALUE;
  pinned[0] = (uintptr_t)start, pinned[1] = size;
  return 0;
}

int cuMemHostUnregister(void *start) {
  if (pinned[0] != (uintptr_t)start || !pinned[1] || !contexts) return INVALID_VALUE;
  pinned[1] = 0;
  return 0;
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
