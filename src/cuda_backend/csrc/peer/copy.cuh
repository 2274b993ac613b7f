// Copies by warps, and the destination of each row of a batch: shared by all kernels of the transport.
#pragma once
#include "peer/state.cuh"
#include "device/ptx.cuh"

namespace lora_jax {

constexpr int kPeerThreads = 512, kPeerWarps = kPeerThreads / 32;
constexpr int kPeerCtas = 64;  // from 16 on the rate over NVLink is flat; more hide local reads
// Beside a computation a CTA begins where that one's leave registers: few do for a large one.
constexpr int kAsideThreads = 128, kAsideCtas = 48;
// One waits there, with a warp for each server.
constexpr int kAwaitThreads = 128;
constexpr int kPieceBytes = 2048;  // four 16-byte accesses a lane: what a warp keeps in flight

// Both sides and the length are multiples of T; all lanes of the warp come here.
template <class T>
__device__ __forceinline__ void copy_units(unsigned char* to, const unsigned char* from, int64_t bytes) {
  T* out = reinterpret_cast<T*>(to);
  const T* in = reinterpret_cast<const T*>(from);
  const int64_t n = bytes / sizeof(T);
  int64_t i = threadIdx.x & 31;
  for (; i + 96 < n; i += 128) {
    const T a = __ldcg(in + i), b = __ldcg(in + i + 32), c = __ldcg(in + i + 64), d = __ldcg(in + i + 96);
    out[i] = a, out[i + 32] = b, out[i + 64] = c, out[i + 96] = d;
  }
  for (; i < n; i += 32) out[i] = __ldcg(in + i);
}
// Rows are whole numbers of bfloat16; those of 16 bytes and more on their boundary go at full width.
__device__ __forceinline__ void warp_copy(unsigned char* to, const unsigned char* from, int64_t bytes) {
  const uint64_t all = reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from) | static_cast<uint64_t>(bytes);
  if (all % 16 == 0) {
    copy_units<uint4>(to, from, bytes);
  } else if (all % 4 == 0) {
    copy_units<uint32_t>(to, from, bytes);
  } else {
    copy_units<uint16_t>(to, from, bytes);
  }
}

// The pieces of `rows` rows of `bytes` each, dealt to the warps of the grid.
struct Pieces {
  int64_t bytes, piece;  // of a row; of a piece, a multiple of 32: 8 columns of float32
  int per_row;
  __device__ Pieces(int64_t row_bytes, int rows, int warps) : bytes(row_bytes) {
    const int most = static_cast<int>((row_bytes + kPieceBytes - 1) / kPieceBytes);
    per_row = max(1, min(most, warps / max(rows, 1)));
    piece = ((row_bytes + per_row - 1) / per_row + 31) / 32 * 32;
  }
  __device__ int64_t begin(int index) const { return min(static_cast<int64_t>(index) * piece, bytes); }
  __device__ int64_t length(int index) const { return min(begin(index) + piece, bytes) - begin(index); }
};
__device__ __forceinline__ int grid_warp() { return blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; }
__device__ __forceinline__ int grid_warps() { return gridDim.x * (blockDim.x / 32); }

struct PeerRows {  // serving.lora_server.transport.base.PushRows
  const int *num_rows, *layer, *version;
  const int *to_server, *to_adapter, *to_expert;
  int rows, servers;
  __device__ int live() const { return max(0, min(*num_rows, rows)); }
};

// How many of the first `row` rows go to the server of `row`: its place in the message. One warp.
__device__ __forceinline__ int place_of(const int* row_to_server, int row, int server) {
  int before = 0;
  for (int i = threadIdx.x & 31; i < row; i += 32) before += __ldg(row_to_server + i) == server;
  for (int step = 16; step; step /= 2) before += __shfl_xor_sync(0xffffffffu, before, step);
  return before;
}

// The rows that go to a server at all, of the kSentRows from `begin` on: their number, and in `sent` the
// rows in order. The whole CTA, of THREADS.
constexpr int kSentRows = 512;
template <int THREADS>
__device__ __forceinline__ int find_sent(const PeerRows& rows, int begin, int* sent) {
  __shared__ unsigned going[kSentRows / 32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  const int live = rows.live(), chunks = min(kSentRows, rows.rows - begin + 31) / 32;
  __syncthreads();  // the rows before have been read
#pragma unroll 4
  for (int chunk = warp; chunk < chunks; chunk += THREADS / 32) {
    const int row = begin + chunk * 32 + lane;
    const int server = row < rows.rows ? __ldg(rows.to_server + row) : -1;
    const unsigned some = __ballot_sync(0xffffffffu, row < live && server >= 0);
    if (lane == 0) going[chunk] = some;
  }
  __syncthreads();
  int all = 0;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const unsigned some = going[chunk];
    if (chunk % (THREADS / 32) == warp && some >> lane & 1)
      sent[all + __popc(some & ((1u << lane) - 1))] = begin + chunk * 32 + lane;
    all += __popc(some);
  }
  __syncthreads();
  return all;
}

// Says to one CTA, the last one of the grid, that all others have written what they had to. That takes
// a way to the peer and back, in which the CTA's second warp does what only the last one will want.
template <class Meanwhile>
__device__ __forceinline__ bool last_cta(int* ticket, const Meanwhile& meanwhile) {
  __shared__ int last[1];
  __syncthreads();
  if (threadIdx.x == 0) {
    last[0] = take_ticket_sys(ticket) == static_cast<int>(gridDim.x) - 1;
    if (last[0]) *ticket = 0;
  }
  if (threadIdx.x / 32 == 1) meanwhile();
  __syncthreads();
  return last[0] != 0;
}

// What one CTA has decided for others.
struct Told {
  bool go;
  int order;  // thread 0's: of the others, how many knew before; comes while the CTA works
};
__device__ __forceinline__ Told await_decision(PeerState* state) {
  __shared__ int goes[1];
  if (threadIdx.x == 0) {
    uint64_t decision = kUndecided;
    while (decision == kUndecided) decision = poll_acquire(&state->decision);
    goes[0] = decision == kGo;
  }
  __syncthreads();
  return {goes[0] != 0, threadIdx.x ? 0 : atomicAdd(&state->knowing, 1)};
}
// The last of those who were told, at its end, makes room for the next decision.
__device__ __forceinline__ void forget(PeerState* state, const Told& told, int all) {
  if (threadIdx.x == 0 && told.order == all - 1) state->knowing = 0, state->decision = kUndecided;
}

}  // namespace lora_jax
