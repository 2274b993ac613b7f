// Host side of the segments' kernel.
#pragma once
#include "lora_gemm/launch.cuh"
#include "lora_gemm/segments.cuh"

namespace lora_jax {

// Shrinks and expands rows that stand in order, of ranks of at most kSegmentRank, and adds to y.
inline cudaError_t launch_segments(const PairArgs& pair, cudaStream_t stream) {
  if (pair.max_rank > kSegmentRank || !pair.accumulate) return cudaErrorInvalidValue;
  SegmentArgs args{pair};
  cudaError_t e = pool_map(&args.x, pair.x, pair.num_rows, pair.d_in, kNarrow);
  for (int m = 0; m < pair.num_modules && e == cudaSuccess; ++m)
    e = pool_map(&args.y[m], pair.modules[m].y, pair.num_rows, pair.d_out, kNarrow);
  constexpr int bytes = sizeof(SegmentShared);
  static_assert(bytes <= 113 * 1024, "two CTAs must fit an SM");
  int sms = 0;
  if (e == cudaSuccess) e = count_sms(&sms);
  if (e == cudaSuccess) e = cudaFuncSetAttribute(segment_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (e != cudaSuccess) return e;
  segment_kernel<<<sms * 2, kSegmentThreads, bytes, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace lora_jax
