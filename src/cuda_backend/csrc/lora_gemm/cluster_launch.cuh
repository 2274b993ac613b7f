// Launches a kernel of few rows in clusters, two CTAs on an SM.
#pragma once
#include "device/launch_early.cuh"
#include "lora_gemm/decode_shrink.cuh"

namespace lora_jax {

// Tells modules their pool and width, where all have the launch's.
inline PairArgs with_widths(PairArgs args) {
  for (Module& m : args.modules)
    if (!m.b_pool) m.b_pool = args.pools[1], m.d_out = args.d_out;
  return args;
}
// In clusters that shrink_at_once counts on.
template <class S, class Args>
cudaError_t launch_clusters(void (*kernel)(Args), const Args& args, cudaStream_t stream) {
  static_assert(sizeof(S) <= 113 * 1024, "two CTAs must fit an SM");
  cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(S));
  int sms = 0;
  if (e == cudaSuccess) e = count_sms(&sms);
  if (e != cudaSuccess) return e;
  cudaLaunchAttribute attributes[2];
  const unsigned count = cluster_attributes(attributes, kShrinkParts);
  const int clusters = max(1, sms * 2 / kShrinkParts);
  const cudaLaunchConfig_t config{dim3(clusters * kShrinkParts), dim3(kThreads), sizeof(S), stream, attributes, count};
  return cudaLaunchKernelEx(&config, kernel, args);
}

}  // namespace lora_jax
