// NVSHMEM in one process, for emulated GPUs: a heap for each PE, puts that are copies.
#pragma once
#include <vector>

#include "cuda_emulator.h"

struct nvshmemx_uniqueid_t { char bytes[128]; };
#define NVSHMEMX_UNIQUEID_INITIALIZER {}
struct nvshmemx_init_attr_t { int rank, size; };
#define NVSHMEMX_INIT_ATTR_INITIALIZER {}
constexpr int NVSHMEMX_INIT_WITH_UNIQUEID = 1, NVSHMEM_SIGNAL_SET = 9;

namespace emu {
struct Heap {
  unsigned char* at;
  size_t bytes;
};
inline std::vector<Heap> heaps;  // of each PE of the last world
inline int joining = 0;          // the PE that takes its heap next

// The same place in another PE's heap; all of it must be inside.
inline unsigned char* place_at(const void* here, size_t bytes, int pe) {
  for (const Heap& heap : heaps) {
    const size_t offset = static_cast<const unsigned char*>(here) - heap.at;
    if (static_cast<const unsigned char*>(here) < heap.at || offset >= heap.bytes) continue;
    if (offset + bytes > heaps.at(pe).bytes) break;
    return heaps.at(pe).at + offset;
  }
  fail("a put to what is not symmetric memory");
}
}  // namespace emu

inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline int nvshmemx_get_uniqueid(nvshmemx_uniqueid_t*) { return 0; }
inline int nvshmemx_set_attr_uniqueid_args(int rank, int size, const nvshmemx_uniqueid_t*, nvshmemx_init_attr_t* a) {
  *a = {rank, size};
  return 0;
}
inline int nvshmemx_init_attr(int, nvshmemx_init_attr_t* a) {
  if (a->rank == 0) emu::heaps.clear();
  emu::heaps.resize(a->size, {nullptr, 0});
  emu::joining = a->rank;
  return 0;
}
inline void* nvshmem_calloc(size_t count, size_t size) {
  emu::heaps[emu::joining] = {static_cast<unsigned char*>(std::aligned_alloc(4096, count * size)), count * size};
  return std::memset(emu::heaps[emu::joining].at, 0, count * size);
}
inline void nvshmem_barrier_all() {}
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
