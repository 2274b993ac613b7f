// Synchronisation and shared memory between the CTAs of a cluster.
#pragma once
#include <cuda_runtime.h>

#include "device/ptx.cuh"

namespace lora_jax {

__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// Of all threads of the cluster; what they wrote is seen after it.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The same in two, and nothing is seen but barriers that were made: threads arrive, and each waits before it ends.
__device__ __forceinline__ void cluster_begun() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_all_begun() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// Reads what lies at an address in another CTA of the cluster.
__device__ __forceinline__ int lds32_of(int cta, uint32_t addr) {
  int v;
  asm volatile("{\n.reg .u32 there;\nmapa.shared::cluster.u32 there, %1, %2;\nld.shared::cluster.s32 %0, [there];\n}"
               : "=r"(v)
               : "r"(addr), "r"(cta)
               : "memory");
  return v;
}
// Writes there.
__device__ __forceinline__ void sts32_in(int cta, uint32_t addr, uint32_t v) {
  asm volatile("{\n.reg .u32 there;\nmapa.shared::cluster.u32 there, %1, %2;\nst.shared::cluster.u32 [there], %0;\n}" ::"r"(v),
               "r"(addr), "r"(cta)
               : "memory");
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
// Where an address of this CTA's shared memory lies in another CTA of the cluster.
__device__ __forceinline__ uint32_t address_in(int cta, uint32_t addr) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(addr), "r"(cta));
  return there;
}
// Stores into the CTA that both addresses lie in; its barrier there counts the bytes. No fence is
// needed: who has waited for the barrier sees them.
__device__ __forceinline__ void cluster_store(uint32_t there, float4 v, uint32_t bar) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(there),
               "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(bar)
               : "memory");
}
// How a kernel is launched in clusters whose CTAs may share an SM: if they may not, clusters of four fill
// 124 of an H200's 132 SMs by two CTAs an SM. Returns how many attributes that takes.
inline int cluster_attributes(cudaLaunchAttribute* attributes, int ctas) {
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = ctas;
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeClusterSchedulingPolicyPreference;
  attributes[1].val.clusterSchedulingPolicyPreference = cudaClusterSchedulingPolicyLoadBalancing;
  return 2;
}
// How many such clusters the device can run at a time.
template <class Kernel>
cudaError_t count_clusters(int* clusters, Kernel kernel, int of, int ctas, int threads, int bytes) {
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(ctas), config.blockDim = dim3(threads), config.dynamicSmemBytes = bytes;
  config.attrs = attributes, config.numAttrs = cluster_attributes(attributes, of);
  return cudaOccupancyMaxActiveClusters(clusters, kernel, &config);
}

}  // namespace lora_jax
