// How kernels are launched: as many CTAs as SMs hold, to overlap the kernel before: see let_next_begin and wait_for_previous.
#pragma once
#include <cuda_runtime.h>

namespace lora_jax {

inline cudaError_t count_sms(int* sms) {
  int device = 0;
  const cudaError_t e = cudaGetDevice(&device);
  return e == cudaSuccess ? cudaDeviceGetAttribute(sms, cudaDevAttrMultiProcessorCount, device) : e;
}

// Launches a kernel that may begin while the one before it runs, and waits for it where it has to.
template <class Args>
cudaError_t launch_early(void (*kernel)(Args), int ctas, int threads, int shared, cudaStream_t stream,
                         const Args& args) {
  cudaLaunchAttribute early[1];
  early[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early[0].val.programmaticStreamSerializationAllowed = 1;
  const cudaLaunchConfig_t config{dim3(ctas), dim3(threads), static_cast<size_t>(shared), stream, early, 1};
  return cudaLaunchKernelEx(&config, kernel, args);
}

// The same in clusters of `of` CTAs.
template <class Args>
cudaError_t launch_early_clusters(void (*kernel)(Args), int of, int ctas, int threads, int shared, cudaStream_t stream,
                                  const Args& args) {
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = of;
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  const cudaLaunchConfig_t config{dim3(ctas), dim3(threads), static_cast<size_t>(shared), stream, attributes, 2};
  return cudaLaunchKernelEx(&config, kernel, args);
}

}  // namespace lora_jax
