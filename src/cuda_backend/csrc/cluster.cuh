// What the CTAs of a cluster do together.
#pragma once
#include <cuda_runtime.h>

#include "ptx.cuh"

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
// Arrives at the barrier that lies where `bar` does in the cluster's CTA `rank`. Orders nothing but what
// this thread has read: a release by the whole cluster would take a microsecond.
__device__ __forceinline__ void cluster_arrive(uint64_t* bar, int rank) {
  asm volatile(
      "{\n.reg .b32 at;\nmapa.shared::cluster.u32 at, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [at];\n}" ::"r"(smem_u32(bar)),
      "r"(rank)
      : "memory");
}
// As box_copy, into every CTA of the cluster whose bit is set, where `dst` and `bar` lie in each.
__device__ __forceinline__ void cluster_box_copy(uint32_t dst, const CUtensorMap* map, int row, int block,
                                                 uint64_t* bar, uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%2, %3, %4}], [%5], %6;" ::"r"(dst),
      "l"(map), "r"(0), "r"(row), "r"(block), "r"(smem_u32(bar)), "h"(ctas)
      : "memory");
}
// How many clusters of a kernel the device can run at a time.
template <class Kernel>
cudaError_t count_clusters(int* clusters, Kernel kernel, int ctas, int threads, int bytes) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(ctas), config.blockDim = dim3(threads), config.dynamicSmemBytes = bytes;
  return cudaOccupancyMaxActiveClusters(clusters, kernel, &config);
}

}  // namespace lora_jax
