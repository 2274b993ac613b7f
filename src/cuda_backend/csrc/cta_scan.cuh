// A scan over all threads of a CTA of kScanThreads.
#pragma once
#include <cuda_runtime.h>

namespace lora_jax {

constexpr int kScanThreads = 1024;

// Exclusive scan over the CTA by `op`, whose neutral element is `zero`; all threads take part.
// `total` becomes the scan of everything.
template <class Op>
__device__ __forceinline__ int cta_scan(int v, int* warp_sums, int zero, Op op, int* total = nullptr) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  auto warp_scan = [&](int x) {
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(~0u, x, d);
      if (lane >= d) x = op(other, x);
    }
    return x;
  };
  const int inclusive = warp_scan(v), shifted = __shfl_up_sync(~0u, inclusive, 1);
  if (lane == 31) warp_sums[warp] = inclusive;
  __syncthreads();
  if (warp == 0) warp_sums[lane] = warp_scan(warp_sums[lane]);
  __syncthreads();
  if (total) *total = warp_sums[kScanThreads / 32 - 1];
  const int prefix = warp > 0 ? warp_sums[warp - 1] : zero;
  __syncthreads();
  return lane > 0 ? op(prefix, shifted) : prefix;
}

__device__ __forceinline__ int plus(int x, int y) { return x + y; }
__device__ __forceinline__ int later(int x, int y) { return max(x, y); }

}  // namespace lora_jax
