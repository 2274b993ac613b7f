// All-gather and all-to-all between the GPUs of one process, by writes into each other's memory: no host,
// no library, and nothing that a CUDA graph cannot hold. Copies of values only, so no bit depends on the
// sizes. In an all-gather a device sends all of x to each peer, in an all-to-all its part of the columns.
//
// Every device has a memory that its peers write into, with slots in turn for each of them. A CTA meets
// only the peers' CTA of its number.
//
// Small messages travel as words with the exchange's number beside them (16 bytes hold 8 of data), so a
// reader knows each word when it comes, without a fence or a flag. Two slots are enough: a device writes
// a slot again two exchanges later, which it begins only after the peer's answer to the exchange between,
// and the peer has read the slot before it sends that answer.
//
// Large ones travel plain, piece by piece, with one flag a CTA and piece; a piece leaves before the one
// ahead of it is awaited. So what a device writes is four pieces behind at most: before piece m it has the
// peer's piece m - 2, which left after the peer had read piece m - 4. Four slots are enough.
#pragma once
#include <cuda_runtime.h>

#include <type_traits>

#include "device/ptx.cuh"

namespace lora_jax {

constexpr int kMostGatherDevices = 8, kGatherCtas = 32, kPlainCtas = 128, kGatherThreads = 512;
constexpr int64_t kWordBytes = 1 << 20;   // of one device's part: up to here as words with numbers
constexpr int64_t kPlainBytes = 2 << 20, kPlainSlots = 4;  // of a slot for plain pieces

struct GatherHead {  // zero at the start; the first bytes of a device's memory
  uint32_t sequence[kGatherCtas];  // exchanges that a CTA has made
  uint32_t status;                 // 0, or 1 + the peer that did not answer in time: what came is not valid
  uint32_t padding[31];
  uint64_t arrived[kMostGatherDevices][kPlainCtas];  // plain pieces that a peer's CTA has sent, counted
  uint64_t pieces[kPlainCtas];                        // plain pieces that a CTA has sent
};
constexpr int64_t kGatherHeadBytes = 64 << 10;
static_assert(sizeof(GatherHead) <= kGatherHeadBytes);
constexpr int64_t kGatherPeerBytes = 2 * 2 * kWordBytes + kPlainSlots * kPlainBytes;
constexpr int64_t gather_bytes(int devices) { return kGatherHeadBytes + devices * kGatherPeerBytes; }

struct GatherArgs {
  const uint4* x;  // [rows, local] in units of 16 bytes; of an all-to-all [rows, devices * local]
  uint4* y;        // [rows, devices * local]
  int64_t rows, local;
  int devices, me;
  uint64_t patience;  // ns that a wait may take
  // Of device `me`, then of those after it, in turn: indices are constants of unrolled loops, so that
  // the addresses stay in registers.
  unsigned char* memory[kMostGatherDevices];

  __device__ GatherHead* head(int turn) const { return reinterpret_cast<GatherHead*>(memory[turn]); }
  __device__ uint4* words(int turn, int from, uint32_t number) const {
    return slot(turn, from, (number & 1) * 2 * kWordBytes);
  }
  __device__ uint4* plain(int turn, int from, uint64_t piece) const {
    return slot(turn, from, 4 * kWordBytes + static_cast<int64_t>(piece % kPlainSlots) * kPlainBytes);
  }
  __device__ uint4* slot(int turn, int from, int64_t offset) const {
    return reinterpret_cast<uint4*>(memory[turn] + kGatherHeadBytes + from * kGatherPeerBytes + offset);
  }
  template <bool PARTS>
  __device__ uint4 get(int to, int64_t unit) const {
    if (!PARTS) return x[unit];
    const int64_t row = unit / local;
    return x[(row * devices + to) * local + unit - row * local];
  }
  __device__ void put(int from, int64_t unit, uint4 v) const {
    const int64_t row = unit / local;
    y[(row * devices + from) * local + unit - row * local] = v;
  }
};

// A wait ends when its peer has answered, when an earlier wait has failed, or after `patience`.
struct GatherClock {
  uint64_t start, patience;
  uint32_t* status;
  bool lost;
  __device__ GatherClock(const GatherArgs& args)
      : start(now_nanos()), patience(args.patience), status(&args.head(0)->status), lost(load_word(status) != 0) {}
  __device__ bool expired(int peer) {
    if (!lost && now_nanos() - start > patience) store_word(status, 1 + peer), lost = true;
    return lost;
  }
};

// The units that this CTA moves: the same ones on every device.
struct GatherShare {
  int64_t begin, end;
  __device__ GatherShare(int64_t first, int64_t last) {
    const int64_t each = (last - first + gridDim.x - 1) / gridDim.x;
    begin = min(first + each * blockIdx.x, last), end = min(begin + each, last);
  }
};

__device__ __forceinline__ void send_word(uint4* to, uint32_t a, uint32_t b, uint32_t number) {
  store_words_sys(to, make_uint4(a, number, b, number));
}
__device__ __forceinline__ bool is_word(const uint4& v, uint32_t number) { return v.y == number && v.w == number; }

// Waits for one unit of a peer: two words. Zero when it does not come.
__device__ __forceinline__ uint4 take_unit(const uint4* from, uint32_t number, int peer, GatherClock& clock) {
  for (;;) {
    const uint4 a = poll_words_sys(from), b = poll_words_sys(from + 1);
    if (is_word(a, number) && is_word(b, number)) return make_uint4(a.x, a.z, b.x, b.z);
    if (clock.expired(peer)) return make_uint4(0, 0, 0, 0);
  }
}

template <int N, bool PARTS>
__global__ void __launch_bounds__(kGatherThreads, 1) gather_words_kernel(const __grid_constant__ GatherArgs args) {
  GatherHead* head = args.head(0);
  const uint32_t number = head->sequence[blockIdx.x] + 1;
  const GatherShare share(0, args.rows * args.local);
  for (int64_t i = share.begin + threadIdx.x; i < share.end; i += blockDim.x) {
    uint4 v = args.get<PARTS>(args.me, i);
    args.put(args.me, i, v);
#pragma unroll
    for (int p = 1; p < N; ++p) {
      if (PARTS) v = args.get<PARTS>((args.me + p) % N, i);
      uint4* to = args.words(p, args.me, number) + 2 * i;
      send_word(to, v.x, v.y, number);
      send_word(to + 1, v.z, v.w, number);
    }
  }
  GatherClock clock(args);
  for (int p = 1; p < N; ++p) {
    const int from = (args.me + p) % N;
    const uint4* in = args.words(0, from, number);
#pragma unroll 2
    for (int64_t i = share.begin + threadIdx.x; i < share.end; i += blockDim.x)
      args.put(from, i, take_unit(in + 2 * i, number, from, clock));
  }
  __syncthreads();  // all threads have read the number
  if (threadIdx.x == 0) head->sequence[blockIdx.x] = number;
}

// Writes a piece, units [first, last) of x, to all peers and to the result, and says that it is there.
template <int N, bool PARTS>
__device__ void send_piece(const GatherArgs& args, uint64_t piece, int64_t first, int64_t last) {
  const GatherShare share(first, last);
  for (int64_t i = share.begin + threadIdx.x; i < share.end; i += blockDim.x) {
    uint4 v = args.get<PARTS>(args.me, i);
    args.put(args.me, i, v);
#pragma unroll
    for (int p = 1; p < N; ++p) {
      if (PARTS) v = args.get<PARTS>((args.me + p) % N, i);
      args.plain(p, args.me, piece)[i - first] = v;
    }
  }
  __syncthreads();
  if (threadIdx.x) return;
#pragma unroll
  for (int p = 1; p < N; ++p) store_release_sys(&args.head(p)->arrived[args.me][blockIdx.x], piece);
}
// Waits for the same piece of all peers and puts it into the result.
template <int N>
__device__ void take_piece(const GatherArgs& args, GatherClock& clock, uint64_t piece, int64_t first, int64_t last) {
  if (threadIdx.x == 0) {
    for (int p = 1; p < N; ++p) {
      const int peer = (args.me + p) % N;
      while (poll_acquire_sys(&args.head(0)->arrived[peer][blockIdx.x]) < piece)
        if (clock.expired(peer)) break;
    }
  }
  __syncthreads();
  const GatherShare share(first, last);
  for (int p = 1; p < N; ++p) {
    const int from = (args.me + p) % N;
    const uint4* in = args.plain(0, from, piece);
    for (int64_t i = share.begin + threadIdx.x; i < share.end; i += blockDim.x)
      args.put(from, i, __ldcg(in + i - first));
  }
}

// Plain pieces of at most kPlainBytes: each leaves before the one ahead of it is taken.
template <int N, bool PARTS>
__global__ void __launch_bounds__(kGatherThreads, 1) gather_plain_kernel(const __grid_constant__ GatherArgs args) {
  GatherHead* head = args.head(0);
  const int64_t units = args.rows * args.local, most = kPlainBytes / 16, count = (units + most - 1) / most;
  const uint64_t before = head->pieces[blockIdx.x];
  GatherClock clock(args);
  for (int64_t k = 0; k <= count; ++k) {
    if (k < count) send_piece<N, PARTS>(args, before + k + 1, k * most, min((k + 1) * most, units));
    if (k > 0) take_piece<N>(args, clock, before + k, (k - 1) * most, min(k * most, units));
  }
  __syncthreads();
  if (threadIdx.x == 0) head->pieces[blockIdx.x] = before + count;
}

template <int N, bool PARTS>
inline cudaError_t launch_gather_of(const GatherArgs& args, cudaStream_t stream) {
  if (args.rows * args.local * 16 <= kWordBytes) {
    gather_words_kernel<N, PARTS><<<kGatherCtas, kGatherThreads, 0, stream>>>(args);
  } else {
    gather_plain_kernel<N, PARTS><<<kPlainCtas, kGatherThreads, 0, stream>>>(args);
  }
  return cudaGetLastError();
}
// Modules load at a kernel's first launch and may wait for the device: not beside a waiting peer.
template <int N>
inline cudaError_t load_gather_of() {
  const void* kernels[] = {reinterpret_cast<const void*>(gather_words_kernel<N, false>),
                           reinterpret_cast<const void*>(gather_plain_kernel<N, false>),
                           reinterpret_cast<const void*>(gather_words_kernel<N, true>),
                           reinterpret_cast<const void*>(gather_plain_kernel<N, true>)};
  for (const void* kernel : kernels) {
    cudaFuncAttributes attributes;
    if (const cudaError_t e = cudaFuncGetAttributes(&attributes, kernel); e != cudaSuccess) return e;
  }
  return cudaSuccess;
}
// Calls what `with` makes of the number of devices, a constant.
template <class With>
inline cudaError_t for_devices(int devices, const With& with) {
  switch (devices) {
    case 2: return with(std::integral_constant<int, 2>());
    case 3: return with(std::integral_constant<int, 3>());
    case 4: return with(std::integral_constant<int, 4>());
    case 5: return with(std::integral_constant<int, 5>());
    case 6: return with(std::integral_constant<int, 6>());
    case 7: return with(std::integral_constant<int, 7>());
    case 8: return with(std::integral_constant<int, 8>());
    default: return cudaErrorInvalidValue;
  }
}
inline cudaError_t launch_gather(const GatherArgs& args, bool parts, cudaStream_t stream) {
  return for_devices(args.devices, [&](auto n) {
    constexpr int N = decltype(n)::value;
    return parts ? launch_gather_of<N, true>(args, stream) : launch_gather_of<N, false>(args, stream);
  });
}
inline cudaError_t load_gather(int devices) {
  return for_devices(devices, [&](auto n) { return load_gather_of<decltype(n)::value>(); });
}
// Fills `args.memory` from the memories by device.
inline void turn_memory(GatherArgs& args, unsigned char* const* by_device) {
  for (int p = 0; p < args.devices; ++p) args.memory[p] = by_device[(args.me + p) % args.devices];
}

}  // namespace lora_jax
