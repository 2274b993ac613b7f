// csrc/device/cluster.cuh for the emulator: some clusters run side by side.
#pragma once
#include "device/ptx.cuh"

namespace lora_jax {

inline int cluster_rank() { return blockIdx.x % emu::machine.cluster_ctas; }
inline emu::Block& cta_of_cluster(int rank) {
  return *emu::machine.blocks.at(blockIdx.x - emu::machine.blocks[0]->index.x - cluster_rank() + rank);
}
inline emu::Rendezvous& this_cluster() { return cta_of_cluster(0).cluster; }
inline int cluster_threads() { return emu::machine.current->block->threads * emu::machine.cluster_ctas; }
inline void cluster_sync() { emu::meet(this_cluster(), cluster_threads()); }
inline void cluster_begun() {
  emu::Rendezvous& r = this_cluster();
  emu::machine.current->cluster_turn = r.generation;
  if (++r.arrived == cluster_threads()) r.arrived = 0, ++r.generation, ++emu::machine.progress;
}
inline void cluster_all_begun() {
  const emu::Rendezvous& r = this_cluster();
  const uint64_t turn = emu::machine.current->cluster_turn;
  emu::wait_until([&, turn] { return r.generation > turn; });
}
inline int lds32_of(int cta, uint32_t address) {
  if (cta_of_cluster(cta).ended) emu::fail("a CTA of the cluster has ended and is read");
  int v;
  std::memcpy(&v, cta_of_cluster(cta).shared.data() + address, 4);
  return v;
}
inline void sts32_in(int cta, uint32_t address, uint32_t v) {
  if (cta_of_cluster(cta).ended) emu::fail("a CTA of the cluster has ended and is written to");
  std::memcpy(cta_of_cluster(cta).shared.data() + address, &v, 4);
}
// Does something as if the cluster's CTA `rank` did.
template <class Do> void in_cta(int rank, Do what) {
  emu::Block*& block = emu::machine.current->block;
  emu::Block* mine = block;
  block = &cta_of_cluster(rank);
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
