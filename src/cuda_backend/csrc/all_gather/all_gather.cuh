// All-gather and all-to-all between the GPUs of one process: each GPU writes into its peers' memory, without
// the host or a library, and in a form that a CUDA graph can hold. Values are only copied, so no bit depends on
// the sizes. In an all-gather a device sends all of x to each peer, in an all-to-all the peer's part of the
// columns or rows.
//
// Every device has memory that its peers write into. A CTA communicates only with the peers' CTA of the same
// number. All CTAs of a device count all exchanges, also those that use fewer CTAs.
//
// Small messages are words with the exchange's number beside them (16 bytes hold 8 of data), so a reader
// recognises each word of this exchange without a fence or a flag. Two slots are enough: a device writes
// a slot again two exchanges later, which it begins only after the peer's answer to the exchange between,
// and the peer has read the slot before it sends that answer.
//
// Large ones are written where the peers want them: each CTA tells its peers where its device's y is, which is
// free from when the kernel runs, and has a flag of each of them for what has come. A peer's next y is told
// in the other of two places; the one after that only when this exchange has ended everywhere. Who gives an
// exchange up takes back what it told: a peer that comes later writes nothing there, and gives up too.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "device/ptx.cuh"

namespace lora_jax {

constexpr int kMostGatherDevices = 8, kGatherCtas = 128;
constexpr int kWordThreads = 128, kDirectThreads = 512, kDirectLoads = 4;  // units that a thread asks for at once
constexpr int64_t kWordBytes = 352 << 10;  // of one device's part: what slots hold
// Up to here messages travel as words: what a device sends to all its peers together.
constexpr int64_t kMostWordBytes = 352 << 10;

struct GatherHead {  // zero at the start; the first bytes of a device's memory
  uint32_t sequence[kGatherCtas];  // exchanges by words that a CTA knows of
  uint32_t status;                 // 0, or 1 + the peer that did not answer in time: what came is not valid
  uint32_t padding[31];
  uint64_t direct[kGatherCtas];                       // the same of direct ones
  uint64_t arrived[kMostGatherDevices][kGatherCtas];  // the last direct one whose share a peer's CTA has written
  uint4 told[2][kMostGatherDevices][kGatherCtas];     // where a peer's y is, as words; of even and odd exchanges
};
constexpr int64_t kGatherHeadBytes = 64 << 10;
static_assert(sizeof(GatherHead) <= kGatherHeadBytes);
constexpr int64_t kGatherPeerBytes = 2 * 2 * kWordBytes;
constexpr int64_t gather_bytes(int devices) { return kGatherHeadBytes + devices * kGatherPeerBytes; }

// What a device sends to each peer: all of x, or the peer's part of its columns or of its rows, or that part of the
// columns of the rows that it owns.
enum class GatherParts { kWhole, kColumns, kRows, kOwned };

struct GatherArgs {
  // In units of 16 bytes: [rows, local], of parts by columns [rows, devices * local], by rows [devices * rows, local].
  const uint4* x;
  uint4* y;        // [rows, devices * local]
  uint32_t rows, local;
  int devices, me;
  uint64_t patience;  // ns that a wait may take
  // Of owned rows alone: y is [rows, local], whose row r device owner[r] has as row source[r] of its x.
  const int* source;
  const int* owner;
  // Of device `me`, then of those after it, in turn: indices are constants of unrolled loops, so that
  // the addresses stay in registers.
  unsigned char* memory[kMostGatherDevices];

  __device__ GatherHead* head(int turn) const { return reinterpret_cast<GatherHead*>(memory[turn]); }
  // The head of a device that is no constant.
  template <int N>
  __device__ GatherHead* head_of(int turn) const {
    unsigned char* found = memory[0];
#pragma unroll
    for (int p = 1; p < N; ++p) found = turn == p ? memory[p] : found;
    return reinterpret_cast<GatherHead*>(found);
  }
  __device__ uint4* words(int turn, int from, uint32_t number) const {
    return reinterpret_cast<uint4*>(memory[turn] + kGatherHeadBytes + from * kGatherPeerBytes +
                                    (number & 1) * 2 * kWordBytes);
  }
  // Where a unit of a device's part lies in [rows, devices * local].
  __device__ uint32_t place(uint32_t unit, int device) const {
    const uint32_t row = unit / local;
    return (row * devices + device) * local + unit - row * local;
  }
  template <GatherParts PARTS>
  __device__ uint4 get(int to, uint32_t unit) const {
    if constexpr (PARTS == GatherParts::kColumns) return x[place(unit, to)];
    if constexpr (PARTS == GatherParts::kRows) return x[to * rows * local + unit];
    return x[unit];
  }
};

// A wait ends when its peer has answered, when an earlier wait has failed, or after `patience`.
struct GatherClock {
  uint64_t start, patience;
  uint32_t* status;
  bool lost;
  __device__ GatherClock(const GatherArgs& args)
      : start(now_nanos()), patience(args.patience), status(&args.head(0)->status), lost(load_word(status) != 0) {}
  __device__ void lose(int peer) {
    if (!lost) store_word(status, 1 + peer);
    lost = true;
  }
  __device__ bool expired(int peer) {
    if (now_nanos() - start > patience) lose(peer);
    return lost;
  }
};

// The units that this CTA moves: the same ones on every device.
struct GatherShare {
  uint32_t begin, end;
  __device__ GatherShare(uint32_t units) {
    const uint32_t each = (units + gridDim.x - 1) / gridDim.x;
    begin = min(each * blockIdx.x, units), end = min(begin + each, units);
  }
};
// Notes an exchange for the CTAs that it has not as well: the next one may have more.
template <class Number>
__device__ __forceinline__ void count_exchange(Number* of_ctas, Number number) {
  for (int c = blockIdx.x; c < kGatherCtas; c += gridDim.x) of_ctas[c] = number;
}

__device__ __forceinline__ void send_word(uint4* to, uint32_t a, uint32_t b, uint32_t number) {
  store_words_sys(to, make_uint4(a, number, b, number));
}
__device__ __forceinline__ bool is_word(const uint4& v, uint32_t number) { return v.y == number && v.w == number; }

// Waits for the same unit of all peers, two words each, and puts it into y; zero where one does not come.
template <int N>
__device__ __forceinline__ void take_unit(const GatherArgs& args, uint32_t unit, uint32_t number, GatherClock& clock) {
  uint4 a[N], b[N];
  for (int late = 1; late;) {
#pragma unroll
    for (int p = 1; p < N; ++p) {
      const uint4* from = args.words(0, (args.me + p) % N, number) + 2 * unit;
      a[p] = poll_words_sys(from), b[p] = poll_words_sys(from + 1);
    }
    late = 0;
#pragma unroll
    for (int p = 1; p < N; ++p)
      if (!is_word(a[p], number) || !is_word(b[p], number)) late = p;
    if (late && clock.expired((args.me + late) % N)) break;
  }
#pragma unroll
  for (int p = 1; p < N; ++p) {
    const bool there = is_word(a[p], number) && is_word(b[p], number);
    const uint4 v = there ? make_uint4(a[p].x, a[p].z, b[p].x, b[p].z) : make_uint4(0, 0, 0, 0);
    args.y[args.place(unit, (args.me + p) % N)] = v;
  }
}

template <int N, GatherParts PARTS>
__global__ void __launch_bounds__(kWordThreads, 1) gather_words_kernel(const __grid_constant__ GatherArgs args) {
  GatherHead* head = args.head(0);
  const uint32_t number = head->sequence[blockIdx.x] + 1;
  const GatherShare share(args.rows * args.local);
  for (uint32_t i = share.begin + threadIdx.x; i < share.end; i += blockDim.x) {
    const uint4 own = args.get<PARTS>(args.me, i);
#pragma unroll
    for (int p = 1; p < N; ++p) {
      const uint4 v = PARTS != GatherParts::kWhole ? args.get<PARTS>((args.me + p) % N, i) : own;
      uint4* to = args.words(p, args.me, number) + 2 * i;
      send_word(to, v.x, v.y, number);
      send_word(to + 1, v.z, v.w, number);
    }
    args.y[args.place(i, args.me)] = own;
  }
  GatherClock clock(args);
  for (uint32_t i = share.begin + threadIdx.x; i < share.end; i += blockDim.x) take_unit<N>(args, i, number, clock);
  __syncthreads();  // all threads have read the number
  if (threadIdx.x == 0) count_exchange(head->sequence, number);
}

// By one thread for each peer: tells it where y is, or null: nothing is to be written.
template <int N>
__device__ void tell_peer(const GatherArgs& args, int turn, uint64_t number, bool wanted) {
  const uint64_t y = wanted ? reinterpret_cast<uint64_t>(args.y) : 0;
  uint4* to = &args.head_of<N>(turn)->told[number & 1][args.me][blockIdx.x];
  send_word(to, static_cast<uint32_t>(y), static_cast<uint32_t>(y >> 32), static_cast<uint32_t>(number));
}
// By the same threads, behind all that tell: returns where the peer's y is, null when it is lost or has given up.
__device__ inline uint4* hear_peer(const GatherArgs& args, int peer, uint64_t number, GatherClock& clock) {
  const uint4* from = &args.head(0)->told[number & 1][peer][blockIdx.x];
  for (;;) {
    const uint4 v = poll_words_sys(from);
    if (is_word(v, static_cast<uint32_t>(number))) {
      if ((v.x | v.z) == 0) clock.lose(peer);
      return reinterpret_cast<uint4*>(v.x | static_cast<uint64_t>(v.z) << 32);
    }
    if (clock.expired(peer)) return nullptr;
  }
}

// Writes this CTA's share into the y of every device, `to` in turn.
template <int N, GatherParts PARTS>
__device__ __forceinline__ void write_share(const GatherArgs& args, uint4* const (&to)[N]) {
  const GatherShare share(args.rows * args.local);
  for (uint32_t i = share.begin + threadIdx.x; i < share.end; i += blockDim.x * kDirectLoads) {
    uint4 v[kDirectLoads];
#pragma unroll
    for (int p = 1; p <= N; ++p) {
      if (PARTS != GatherParts::kWhole || p == 1) {
#pragma unroll
        for (int u = 0; u < kDirectLoads; ++u) {
          const uint32_t unit = i + u * blockDim.x;
          if (unit < share.end) v[u] = args.get<PARTS>((args.me + p) % N, unit);
        }
      }
      uint4* y = to[p % N];
#pragma unroll
      for (int u = 0; u < kDirectLoads; ++u) {
        const uint32_t unit = i + u * blockDim.x;
        if (y && unit < share.end) y[args.place(unit, args.me)] = v[u];
      }
    }
  }
}

// Writes this device's rows of the CTA's share into the y of every device.
template <int N>
__device__ __forceinline__ void write_owned(const GatherArgs& args, uint4* const (&to)[N]) {
  const GatherShare share(args.rows * args.local);
  for (uint32_t i = share.begin + threadIdx.x; i < share.end; i += blockDim.x * kDirectLoads) {
    const uint4* from[kDirectLoads];  // the columns of device 0, or null
#pragma unroll
    for (int u = 0; u < kDirectLoads; ++u) {
      const uint32_t unit = i + u * blockDim.x, row = min(unit, share.end - 1) / args.local;
      const bool own = unit < share.end && __ldg(args.owner + row) == args.me;
      const int64_t source = own ? __ldg(args.source + row) : 0;
      from[u] = own ? args.x + source * N * args.local + (unit - row * args.local) : nullptr;
    }
#pragma unroll
    for (int p = 1; p <= N; ++p) {
      const int device = (args.me + p) % N;
      uint4 v[kDirectLoads];
#pragma unroll
      for (int u = 0; u < kDirectLoads; ++u)
        if (from[u]) v[u] = from[u][device * args.local];
      uint4* y = to[p % N];
#pragma unroll
      for (int u = 0; u < kDirectLoads; ++u)
        if (y && from[u]) y[i + u * blockDim.x] = v[u];
    }
  }
}

template <int N, GatherParts PARTS>
__global__ void __launch_bounds__(kDirectThreads, 1) gather_direct_kernel(const __grid_constant__ GatherArgs args) {
  __shared__ uint4* to[N];
  GatherHead* head = args.head(0);
  const uint64_t number = head->direct[blockIdx.x] + 1;
  const int turn = threadIdx.x, peer = (args.me + turn) % N;
  const bool meets = turn > 0 && turn < N;
  GatherClock clock(args);
  if (meets) tell_peer<N>(args, turn, number, !clock.lost);
  __syncthreads();
  if (turn < N) to[turn] = meets ? hear_peer(args, peer, number, clock) : args.y;
  __syncthreads();
  if constexpr (PARTS == GatherParts::kOwned)
    write_owned<N>(args, to);
  else
    write_share<N, PARTS>(args, to);
  __syncthreads();  // the threads that tell of it come behind all writes
  if (meets) store_release_sys(&args.head_of<N>(turn)->arrived[args.me][blockIdx.x], number);
  __syncthreads();
  while (meets && poll_acquire_sys(&head->arrived[peer][blockIdx.x]) < number)
    if (clock.expired(peer)) break;
  if (meets && clock.lost) tell_peer<N>(args, turn, number, false);
  __syncthreads();
  if (threadIdx.x == 0) count_exchange(head->direct, number);
}

template <int N, GatherParts PARTS>
inline cudaError_t launch_gather_of(const GatherArgs& args, cudaStream_t stream) {
  const int64_t units = static_cast<int64_t>(args.rows) * args.local, bytes = units * 16;
  if constexpr (PARTS == GatherParts::kOwned) {
    gather_direct_kernel<N, PARTS><<<kGatherCtas, kDirectThreads, 0, stream>>>(args);
  } else if (bytes <= kWordBytes && bytes * (N - 1) <= kMostWordBytes) {
    const int64_t ctas = std::min<int64_t>(kGatherCtas, (units + kWordThreads - 1) / kWordThreads);
    gather_words_kernel<N, PARTS><<<static_cast<int>(ctas), kWordThreads, 0, stream>>>(args);
  } else {
    gather_direct_kernel<N, PARTS><<<kGatherCtas, kDirectThreads, 0, stream>>>(args);
  }
  return cudaGetLastError();
}
// Modules load at a kernel's first launch and may wait for the device: not beside a waiting peer.
template <int N>
inline cudaError_t load_gather_of() {
  const void* kernels[] = {reinterpret_cast<const void*>(gather_words_kernel<N, GatherParts::kWhole>),
                           reinterpret_cast<const void*>(gather_direct_kernel<N, GatherParts::kWhole>),
                           reinterpret_cast<const void*>(gather_words_kernel<N, GatherParts::kColumns>),
                           reinterpret_cast<const void*>(gather_direct_kernel<N, GatherParts::kColumns>),
                           reinterpret_cast<const void*>(gather_words_kernel<N, GatherParts::kRows>),
                           reinterpret_cast<const void*>(gather_direct_kernel<N, GatherParts::kRows>),
                           reinterpret_cast<const void*>(gather_direct_kernel<N, GatherParts::kOwned>)};
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
inline cudaError_t launch_gather(const GatherArgs& args, GatherParts parts, cudaStream_t stream) {
  return for_devices(args.devices, [&](auto n) {
    constexpr int N = decltype(n)::value;
    switch (parts) {
      case GatherParts::kColumns: return launch_gather_of<N, GatherParts::kColumns>(args, stream);
      case GatherParts::kRows: return launch_gather_of<N, GatherParts::kRows>(args, stream);
      case GatherParts::kOwned: return launch_gather_of<N, GatherParts::kOwned>(args, stream);
      default: return launch_gather_of<N, GatherParts::kWhole>(args, stream);
    }
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
