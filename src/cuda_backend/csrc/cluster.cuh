// What kernels of clusters and kernels that follow one another closely need of PTX and the runtime.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace lora_jax {

__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// Of all threads of the cluster; what they wrote to shared memory is seen after it.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Reads `addr`, an address of this CTA's shared memory, in that of the cluster's CTA `rank`.
__device__ __forceinline__ float2 cluster_load(uint32_t addr, int rank) {
  float2 v;
  asm volatile(
      "{\n.reg .b32 at;\nmapa.shared::cluster.u32 at, %2, %3;\nld.shared::cluster.v2.f32 {%0, %1}, [at];\n}"
      : "=f"(v.x), "=f"(v.y)
      : "r"(addr), "r"(rank)
      : "memory");
  return v;
}
// Lets the next kernel of the stream begin, as far as launched by launch_behind; waits until all
// that the kernel before has written is there.
__device__ __forceinline__ void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Launches a kernel whose CTAs may begin before the stream's last kernel has ended.
template <class Args>
cudaError_t launch_behind(void (*kernel)(Args), int ctas, int threads, int bytes, cudaStream_t stream,
                          const Args& args) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(ctas), config.blockDim = dim3(threads), config.dynamicSmemBytes = bytes;
  config.stream = stream, config.attrs = &early, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, args);
}

}  // namespace lora_jax
