// csrc/cluster.cuh for the emulator: a cluster is the CTAs that run side by side.
#pragma once
#include "cuda_emulator.h"

namespace lora_jax {

inline int cluster_rank() { return blockIdx.x % emu::kTogether; }
inline void cluster_sync() {
  const auto& blocks = emu::machine.together;
  if (blocks.size() != emu::kTogether) emu::fail("a cluster that is not whole");
  emu::meet(emu::machine.cluster, blocks.size() * blocks[0]->threads);
}
inline float2 cluster_load(uint32_t address, int rank) {
  if (address % 8) emu::fail("a load of 8 bytes off its boundary");
  float2 v;
  std::memcpy(&v, emu::machine.together[rank]->shared.data() + address, 8);
  return v;
}
inline void let_next_begin() {}
inline void wait_for_previous() {}

template <class Args>
cudaError_t launch_behind(void (*kernel)(Args), int ctas, int threads, int bytes, cudaStream_t, const Args& args) {
  emu::launch(kernel, ctas, threads, bytes, args);
  return cudaSuccess;
}

}  // namespace lora_jax
