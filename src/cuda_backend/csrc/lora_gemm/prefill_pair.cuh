// Shrink and expand of tiles in one kernel, which may begin while that of the items ends.
//
// Clusters shrink their tiles (lora_gemm/prefill_shrink.cuh); then each CTA expands its run of units (lora_gemm/prefill_expand.cuh), of which
// it asks for y and B while others still shrink. Where there are no tiles, nothing waits but for that to be known.
#pragma once
#include "lora_gemm/prefill_expand.cuh"
#include "lora_gemm/prefill_shrink.cuh"

namespace lora_jax {

// By all threads: shrinks the tiles of this CTA's cluster, if it has some, of whose first one `rows` are; then warps
// have as many registers as each other again.
template <int RANKS>
__device__ __forceinline__ void shrink_first(const TileArgs& p, ShrinkRows& rows) {
  cluster_begun();
  __syncthreads();
  shrink_cluster<RANKS>(p, rows);
  if (threadIdx.x < kShrinkWarps * 32) fewer_registers<128>();
  else more_registers<128>();
  fence_shared_copies();  // which write over what this has written
  __syncthreads();
}

template <int RANKS, int STAGES>
__global__ void __launch_bounds__(kTileThreads, 2) pair_tiles_kernel(const __grid_constant__ TileArgs p) {
  using S = ExpandShared<RANKS / 16, STAGES>;
  static_assert(sizeof(S) <= kShrinkBytes && kTileThreads == kShrinkThreads, "one CTA does both");
  const int cluster = blockIdx.x / kCluster, tiles = load_now(p.cut + 3);
  // Of one module it is the cluster's own, asked for before it is known how many there are.
  ShrinkRows rows;
  if (threadIdx.x >= kWeightBoxWarp * 32) rows.ask(p, p.num_modules == 1 ? cluster : cluster % max(tiles, 1));
  if (threadIdx.x == 0) prefetch_entries(p);
  if (threadIdx.x == 32) make_shrink_barriers();
  if (threadIdx.x == kWeightBoxWarp * 32) prefetch_map(&p.a_parts[cluster_rank() / 2][1]);
  if (tiles > 0) {
    const bool odd = threadIdx.x == kAskingThread && load_word(p.shrunk) >= gridDim.x;
    if (cluster < tiles * p.num_modules) shrink_first<RANKS>(p, rows);
    if (threadIdx.x == kAskingThread) release_count(p.shrunk, 2 * gridDim.x - 1);
    S& sm = *reinterpret_cast<S*>(shrink_memory());
    if (threadIdx.x == kAskingThread) sm.odd = odd, sm.there = false;
    expand_tiles<true, RANKS / 16, STAGES>(p, sm);
  }
  wait_for_previous();
}

}  // namespace lora_jax
