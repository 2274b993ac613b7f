// Launches kernels with as many CTAs as the SMs hold, overlapping the previous kernel: see let_next_begin and
// wait_for_previous.
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

}  // namespace lora_jax
