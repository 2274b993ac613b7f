// Launches of few rows of few adapters that are served by groups alone.
#pragma once
#include "lora_gemm/cluster_launch.cuh"
#include "lora_gemm/decode_gated.cuh"

namespace lora_jax {

inline cudaError_t launch_joined(const PairArgs& args, cudaStream_t stream) {
  return launch_clusters<FewShared<3, 34816, 64>>(joined_kernel<3, 34816, 64>, args, stream);
}
inline cudaError_t launch_gated(GatedArgs args, cudaStream_t stream) {
  args.pair = with_widths(args.pair);
  return launch_clusters<FewShared<3, 34816, 64>>(gated_kernel<3, 34816, 64>, args, stream);
}

}  // namespace lora_jax
