// csrc/cluster.cuh for the emulator: a cluster is the CTAs that run side by side.
#pragma once
#include "ptx.cuh"

namespace lora_jax {

inline int cluster_rank() { return blockIdx.x % emu::machine.blocks.size(); }
inline void cluster_sync() {
  emu::meet(emu::machine.cluster, emu::machine.current->block->threads * emu::machine.blocks.size());
}
inline int lds32_of(int cta, uint32_t address) {
  if (emu::machine.blocks.at(cta)->ended) emu::fail("a CTA of the cluster has ended and is read");
  int v;
  std::memcpy(&v, emu::machine.blocks[cta]->shared.data() + address, 4);
  return v;
}
inline void sts32_in(int cta, uint32_t address, uint32_t v) {
  if (emu::machine.blocks.at(cta)->ended) emu::fail("a CTA of the cluster has ended and is written to");
  std::memcpy(emu::machine.blocks[cta]->shared.data() + address, &v, 4);
}
// Does something as if the cluster's CTA `rank` did.
template <class Do> void in_cta(int rank, Do what) {
  emu::Block*& block = emu::machine.current->block;
  emu::Block* mine = block;
  block = emu::machine.blocks[rank].get();
  what(block->shared.data() - mine->shared.data());
  block = mine;
}
inline void cluster_arrive(uint64_t* bar, int rank) {
  in_cta(rank, [&](int64_t by) {
    mbar_arrive(reinterpret_cast<uint64_t*>(reinterpret_cast<unsigned char*>(bar) + by));
  });
}
// An address in another CTA has its number in the upper byte.
inline uint32_t address_in(int cta, uint32_t address) { return static_cast<uint32_t>(cta) << 24 | address; }
template <class T> void cluster_store(uint32_t there, T v, uint32_t bar) {
  if (there >> 24 != bar >> 24) emu::fail("a store into one CTA of the cluster, a barrier in another");
  in_cta(there >> 24, [&](int64_t) {
    auto move = [=](unsigned char* to) { std::memcpy(to, &v, sizeof v); };
    emu::copy_later(move, there & 0xffffff, sizeof v, reinterpret_cast<uint64_t*>(emu::at_shared(bar & 0xffffff)));
  });
}
inline int cluster_attributes(cudaLaunchAttribute* attributes, int ctas) {
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = ctas;
  return 1;
}
template <class Kernel> cudaError_t count_clusters(int* clusters, Kernel, int, int, int, int) {
  return *clusters = 3 * emu::machine.sms, cudaSuccess;
}

}  // namespace lora_jax
