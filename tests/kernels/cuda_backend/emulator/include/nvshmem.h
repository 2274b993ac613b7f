// NVSHMEM for emulated GPUs: processes and threads of one machine, joined by a file in shared memory.
//
// As the real one: PE 0's process makes the id; joining waits for all PEs, and takes each number once,
// also when its process has ended; the heap is collective and lies at one place of every PE; puts are
// copies into the peer's part, and a signal is stored behind its data.
#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <mutex>
#include <random>
#include <vector>

#include "cuda_emulator.h"

struct nvshmemx_uniqueid_t { char bytes[128]; };
#define NVSHMEMX_UNIQUEID_INITIALIZER {}
struct nvshmemx_init_attr_t { int rank, size; nvshmemx_uniqueid_t id; };
#define NVSHMEMX_INIT_ATTR_INITIALIZER {}
constexpr int NVSHMEMX_INIT_WITH_UNIQUEID = 1, NVSHMEM_SIGNAL_SET = 9;

namespace emu {
constexpr int kInternal = 7;  // NVSHMEMX_ERROR_INTERNAL
constexpr size_t kControl = 4096;
constexpr int kMostPes = 256;

struct Control {  // at the beginning of the file; the heaps follow
  std::atomic<int32_t> size, joined, arrived, round;
  std::atomic<uint64_t> heap;  // bytes of each
  std::atomic<uint8_t> taken[kMostPes];
};
static_assert(sizeof(Control) <= kControl);

struct Member {  // of the world that this thread has joined last
  Control* control = nullptr;
  int file = -1, rank = 0;
};
inline thread_local Member member;

struct View {  // all heaps of a world, as one member of this process sees them
  unsigned char* at;
  size_t bytes;
  int size;
};
inline std::vector<View> views;
inline std::mutex views_mutex;

inline bool equal_or_first(std::atomic<int32_t>& kept, int32_t said) {
  int32_t before = 0;
  return kept.compare_exchange_strong(before, said) || before == said;
}

// The same place in another PE's heap; all of it must be inside.
inline unsigned char* place_at(const void* here, size_t bytes, int pe) {
  std::lock_guard<std::mutex> hold(views_mutex);
  for (const View& view : views) {
    const size_t from = static_cast<const unsigned char*>(here) - view.at;
    if (static_cast<const unsigned char*>(here) < view.at || from >= view.bytes * view.size) continue;
    if (pe < 0 || pe >= view.size || from % view.bytes + bytes > view.bytes) break;
    return view.at + view.bytes * pe + from % view.bytes;
  }
  fail("a put to what is not symmetric memory");
}
}  // namespace emu

inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline int nvshmemx_get_uniqueid(nvshmemx_uniqueid_t* id) {
  std::random_device random;
  std::snprintf(id->bytes, sizeof id->bytes, "/dev/shm/lora_jax_nvshmem-%d-%08x%08x", getpid(), random(), random());
  const int file = open(id->bytes, O_RDWR | O_CREAT | O_EXCL, 0600);
  if (file < 0 || ftruncate(file, emu::kControl)) return emu::kInternal;
  return close(file);
}
inline int nvshmemx_set_attr_uniqueid_args(int rank, int size, const nvshmemx_uniqueid_t* id,
                                           nvshmemx_init_attr_t* attributes) {
  *attributes = {rank, size, *id};
  return 0;
}
inline int nvshmemx_init_attr(int, nvshmemx_init_attr_t* attributes) {
  const auto [rank, size, id] = *attributes;
  const int file = open(id.bytes, O_RDWR | O_CLOEXEC);
  if (file < 0 || rank < 0 || rank >= size || size > emu::kMostPes) return emu::kInternal;
  auto* control = static_cast<emu::Control*>(mmap(nullptr, emu::kControl, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
  if (control == MAP_FAILED || !emu::equal_or_first(control->size, size) || control->taken[rank].exchange(1))
    return emu::kInternal;
  ++control->joined;
  while (control->joined < size) usleep(1000);
  if (rank == 0) unlink(id.bytes);
  emu::member = {control, file, rank};
  return 0;
}
inline void nvshmem_barrier_all() {
  emu::Control& control = *emu::member.control;
  const int round = control.round;
  if (++control.arrived == control.size) {
    control.arrived = 0;
    ++control.round;
  }
  while (control.round == round) usleep(1000);
}
inline void* nvshmem_calloc(size_t count, size_t size) {
  const auto [control, file, rank] = emu::member;
  const uint64_t bytes = count * size;
  uint64_t before = 0;
  const bool fits = control->heap.compare_exchange_strong(before, bytes) || before == bytes;
  const size_t all = emu::kControl + bytes * control->size;
  if (!fits || ftruncate(file, all)) return nullptr;
  auto* whole = static_cast<unsigned char*>(mmap(nullptr, all, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
  if (whole == MAP_FAILED) return nullptr;
  std::lock_guard<std::mutex> hold(emu::views_mutex);
  emu::views.push_back({whole + emu::kControl, bytes, control->size});
  return whole + emu::kControl + bytes * rank;
}
inline void nvshmem_quiet() {}
inline void nvshmemx_putmem_nbi_block(void* to, const void* from, size_t bytes, int pe) {
  if (threadIdx.x == 0) std::memcpy(emu::place_at(to, bytes, pe), from, bytes);
}
inline void nvshmemx_putmem_signal_nbi_block(void* to, const void* from, size_t bytes, uint64_t* signal, uint64_t value,
                                             int operation, int pe) {
  if (operation != NVSHMEM_SIGNAL_SET) emu::fail("another signal");
  if (threadIdx.x) return;
  std::memcpy(emu::place_at(to, bytes, pe), from, bytes);
  auto* there = reinterpret_cast<uint64_t*>(emu::place_at(signal, 8, pe));
  __atomic_store_n(there, value, __ATOMIC_RELEASE);
}
