// A scan and a stable sort by a CTA of kScanThreads.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace lora_jax {

constexpr int kScanThreads = 1024;
constexpr int kRadixBits = 6, kRadix = 1 << kRadixBits;

struct SortShared {
  int counts[kRadix][kScanThreads / 32];  // of a digit, by the warp that holds the keys
  int warp_sums[kScanThreads / 32];
};

// The scan of a warp by `op`.
template <class Op>
__device__ __forceinline__ int warp_scan(int v, Op op) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, v, d);
    if (static_cast<int>(threadIdx.x & 31) >= d) v = op(other, v);
  }
  return v;
}

// Scans a number of each warp: by every warp for itself, which costs less than to wait for one of them.
// Returns what those of the warps before this one come to; `total` becomes what all do.
template <class Op>
__device__ __forceinline__ int scan_warps(const int* of_warps, int zero, Op op, int* total) {
  const int warp = threadIdx.x >> 5, all = warp_scan(of_warps[threadIdx.x & 31], op);
  *total = __shfl_sync(~0u, all, 31);
  const int before = __shfl_sync(~0u, all, max(warp - 1, 0));
  return warp > 0 ? before : zero;
}

// Exclusive scan over the CTA by `op`, whose neutral element is `zero`; all threads take part.
// `total` becomes the scan of everything.
template <class Op>
__device__ __forceinline__ int cta_scan(int v, int* warp_sums, int zero, Op op, int* total = nullptr) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int inclusive = warp_scan(v, op), shifted = __shfl_up_sync(~0u, inclusive, 1);
  if (lane == 31) warp_sums[warp] = inclusive;
  __syncthreads();
  int all;
  const int prefix = scan_warps(warp_sums, zero, op, &all);
  if (total) *total = all;
  __syncthreads();
  return lane > 0 ? op(prefix, shifted) : prefix;
}

__device__ __forceinline__ int plus(int x, int y) { return x + y; }
__device__ __forceinline__ int later(int x, int y) { return max(x, y); }

// The lanes of the warp that are live and hold the same number of `bits` bits. A ballot a bit costs much
// less than match.any, which takes the distinct numbers one after the other.
__device__ __forceinline__ unsigned same_lanes(bool live, uint32_t number, int bits) {
  unsigned same = __ballot_sync(~0u, live);
#pragma unroll 2
  for (int b = 0; b < bits; ++b) {
    const bool set = number >> b & 1;
    const unsigned ones = __ballot_sync(~0u, set);
    same &= set ? ones : ~ones;
  }
  return live ? same : 0;
}

// One stable pass: warp w owns the w-th run of keys, so order is by (digit, warp, place).
__device__ __forceinline__ void radix_pass(SortShared& sm, const uint32_t* from, uint32_t* to, int rows,
                                           int shift) {
  constexpr int kWarps = kScanThreads / 32;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int run = (rows + kWarps * 32 - 1) / (kWarps * 32) * 32, begin = warp * run;
  int* counts = &sm.counts[0][0];
  for (int i = tid; i < kRadix * kWarps; i += kScanThreads) counts[i] = 0;
  __syncthreads();
  auto each = [&](auto place) {
#pragma unroll 1
    for (int i = begin; i < min(begin + run, rows); i += 32) {
      const bool live = i + lane < rows;
      const uint32_t key = live ? from[i + lane] : 0;
      const int digit = key >> shift & (kRadix - 1);
      const unsigned peers = same_lanes(live, digit, kRadixBits);
      const int before = __popc(peers & ((1u << lane) - 1));
      if (live) place(key, digit, before);
      __syncwarp();
      if (live && before == 0) sm.counts[digit][warp] += __popc(peers);
      __syncwarp();
    }
  };
  each([](uint32_t, int, int) {});
  __syncthreads();
  static_assert(kRadix * kWarps == 2 * kScanThreads, "each thread scans two counts");
  const int a = counts[tid * 2], b = counts[tid * 2 + 1];
  const int place = cta_scan(a + b, sm.warp_sums, 0, plus);
  counts[tid * 2] = place, counts[tid * 2 + 1] = place + a;
  __syncthreads();
  each([&](uint32_t key, int digit, int before) { to[sm.counts[digit][warp] + before] = key; });
  __syncthreads();
}

}  // namespace lora_jax
