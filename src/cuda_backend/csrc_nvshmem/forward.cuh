// Takes messages to another host's GPU by NVSHMEM (over InfiniBand by IBGDA, within a host NVLink).
//
// The transport's kernels (csrc/peer_*.cuh) write a message, as to a GPU of the same host, but into
// staging memory of their own GPU; a launch of `forward` behind them puts it into the peer's
// landing slot at the same place of the symmetric heap, header last, by one put with a signal: the
// signal is the counter that the peer's kernel polls, bounded by time. NVSHMEM's own waits, which
// are not, are never used.
#pragma once
#include <nvshmem.h>
#include <nvshmemx.h>

#include <cstring>
#include <mutex>
#include <vector>

#include "peer/state.cuh"
#include "device/ptx.cuh"
#include "xla/ffi/api/ffi.h"

namespace lora_jax {

namespace ffi = xla::ffi;

constexpr int kForwardThreads = 512;
constexpr int kForwardCtas = 16;  // to each peer
constexpr int kPage = 4096;
constexpr int64_t kUnit = 16;  // slices begin on such boundaries

struct Route {  // to one peer, in device memory; no staging: no peer
  unsigned char* staging;  // the counter's page, then the slot
  unsigned char* landing;  // the same in the symmetric heap, as seen from here
  uint64_t sent;           // sequence of the last message that went
  int32_t pe, ticket;
};
static_assert(sizeof(Route) == 32);

struct Piece {
  int64_t at, bytes;  // in a slot
};

__device__ __forceinline__ int payload_of(const PeerShapes& s, const PeerHeader& header, Piece* pieces) {
  if (header.rows <= 0 || header.rows > s.max_rows || header.site < 0 || header.site >= s.num_sites) return 0;
  const PeerSite& site = s.sites[header.site];
  const int64_t rows = header.rows;
  if (header.kind == kRequest) {
    pieces[0] = {s.adapters_offset, 4 * rows};
    pieces[1] = {s.experts_offset, 4 * rows};
    pieces[2] = {s.rows_offset, rows * site.d_in * s.itemsize};
    return 3;
  }
  for (int k = 0; k < site.num_outs; ++k) pieces[k] = {site.offsets[k], rows * site.widths[k] * s.delta_itemsize};
  return static_cast<int>(site.num_outs);
}

// One of kForwardCtas slices. The whole CTA.
__device__ __forceinline__ void put_slice(const Route& route, const Piece& piece, int slice) {
  const int64_t units = (piece.bytes + kUnit - 1) / kUnit, each = (units + kForwardCtas - 1) / kForwardCtas;
  const int64_t begin = min(slice * each * kUnit, piece.bytes);
  const int64_t bytes = min(begin + each * kUnit, piece.bytes) - begin, at = kPage + piece.at + begin;
  if (bytes > 0) nvshmemx_putmem_nbi_block(route.landing + at, route.staging + at, bytes, route.pe);
}

__global__ void __launch_bounds__(kForwardThreads) forward_kernel(Route* routes, const PeerShapes shapes) {
  __shared__ int last[1];
  Route& route = routes[blockIdx.x / kForwardCtas];
  if (!route.staging) return;
  // What an earlier launch wrote; `sent` is stepped by the last CTA only, when all have read it.
  const uint64_t sequence = load_acquire_sys(reinterpret_cast<const uint64_t*>(route.staging));
  if (sequence == route.sent) return;
  const PeerHeader header = *reinterpret_cast<const PeerHeader*>(route.staging + kPage);
  Piece pieces[kMostOuts];
  const int count = payload_of(shapes, header, pieces);
  for (int i = 0; i < count; ++i) put_slice(route, pieces[i], static_cast<int>(blockIdx.x) % kForwardCtas);
  __syncthreads();
  if (threadIdx.x == 0) {
    nvshmem_quiet();  // this CTA's part has landed
    __threadfence();
    last[0] = atomicAdd(&route.ticket, 1) == kForwardCtas - 1;
  }
  __syncthreads();
  if (!last[0]) return;
  if (threadIdx.x == 0) route.ticket = 0, route.sent = sequence;
  nvshmemx_putmem_signal_nbi_block(route.landing + kPage, route.staging + kPage, sizeof(PeerHeader),
                                   reinterpret_cast<uint64_t*>(route.landing), sequence, NVSHMEM_SIGNAL_SET, route.pe);
}
static_assert(kMostOuts >= 3, "a request has three pieces");

struct Forward {
  Route* routes;
  int count;
  PeerShapes shapes;
};

// Compiled programs know one by number, so none is ever forgotten.
inline std::mutex forwards_mutex;
inline std::vector<Forward> forwards;

inline bool find_forward(int64_t number, Forward* found) {
  std::lock_guard<std::mutex> hold(forwards_mutex);
  if (number < 1 || number > static_cast<int64_t>(forwards.size())) return false;
  *found = forwards[number - 1];
  return true;
}

inline cudaError_t launch_forward(const Forward& forward, cudaStream_t stream) {
  const int ctas = kForwardCtas * forward.count;
  forward_kernel<<<ctas, kForwardThreads, 0, stream>>>(forward.routes, forward.shapes);
  return cudaGetLastError();
}

inline ffi::Error ForwardAfter(cudaStream_t stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out, int64_t number) {
  Forward forward;
  if (!find_forward(number, &forward)) return ffi::Error::InvalidArgument("nvshmem: no such end in this process");
  cudaError_t e = cudaSuccess;
  if (out->untyped_data() != x.untyped_data())
    e = cudaMemcpyAsync(out->untyped_data(), x.untyped_data(), x.size_bytes(), cudaMemcpyDeviceToDevice, stream);
  if (e == cudaSuccess) e = launch_forward(forward, stream);
  return e == cudaSuccess ? ffi::Error::Success() : ffi::Error::Internal(cudaGetErrorString(e));
}

}  // namespace lora_jax

// Called through ctypes with the device's context current; 0 is success where a code comes back.
extern "C" {

using namespace lora_jax;

int32_t lora_jax_cuda_nvshmem_id(void* out) {
  nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
  const int code = nvshmemx_get_uniqueid(&id);
  std::memcpy(out, &id, sizeof id);
  return code;
}

// Joins the world of `size` PEs, which all come here; collective, as is the heap.
int32_t lora_jax_cuda_nvshmem_init(int32_t rank, int32_t size, const void* said, int32_t device) {
  if (const cudaError_t e = cudaSetDevice(device); e != cudaSuccess) return e;
  nvshmemx_uniqueid_t id;
  std::memcpy(&id, said, sizeof id);
  nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
  const int code = nvshmemx_set_attr_uniqueid_args(rank, size, &id, &attributes);
  return code ? code : nvshmemx_init_attr(NVSHMEMX_INIT_WITH_UNIQUEID, &attributes);
}

// Zeroed memory at the same place of every PE, when all have it; 0 if there is not so much.
uint64_t lora_jax_cuda_nvshmem_heap(uint64_t bytes) {
  void* memory = nvshmem_calloc(1, bytes);
  if (!memory) return 0;
  nvshmem_barrier_all();
  return reinterpret_cast<uint64_t>(memory);
}

// A number for an end whose routes lie at `routes`; `numbers` are those of library.numbers().
int64_t lora_jax_cuda_nvshmem_new(const int64_t* numbers, uint64_t routes, int32_t count) {
  Forward forward{reinterpret_cast<Route*>(routes), count, {}};
  if (!read_shapes(numbers, &forward.shapes)) return 0;
  std::lock_guard<std::mutex> hold(forwards_mutex);
  forwards.push_back(forward);
  return static_cast<int64_t>(forwards.size());
}

int32_t lora_jax_cuda_nvshmem_load() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(forward_kernel));
}

int32_t lora_jax_cuda_nvshmem_forward(int64_t number, cudaStream_t stream) {
  Forward forward;
  return find_forward(number, &forward) ? launch_forward(forward, stream) : cudaErrorInvalidValue;
}
}
