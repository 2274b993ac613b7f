// Shrink and expand of tiles in one kernel, which may begin while that of the items ends.
//
// Clusters shrink their tiles (lora_tiles.cuh); then each CTA expands its run of units (expand_tiles.cuh), of which
// it asks for y and B while others still shrink. Where there are no tiles, nothing waits but for that to be known.
#pragma once
#include "expand_tiles.cuh"
#include "lora_tiles.cuh"

namespace lora_jax {

// By all threads: shrinks the tiles of this CTA's cluster, if it has some, whose first one's site is there; then
// warps have as many registers as each other again.
template <int RANKS>
__device__ __forceinline__ void shrink_first(const TileArgs& p, unsigned char* shared) {
  cluster_begun();
  __syncthreads();
  if (threadIdx.x < kShrinkWarps * 32) {
    more_registers<192>();
    TileShrink<RANKS>(p, shared).template all<true>();
    fewer_registers<128>();
  } else {
    fewer_registers<64>();
    TileShrink<RANKS>(p, shared).template all<false>();
    more_registers<128>();
  }
  fence_shared_copies();  // which write over what this has written
  __syncthreads();
}

template <int RANKS, int STAGES>
__global__ void __launch_bounds__(kTileThreads, 2) pair_tiles_kernel(const __grid_constant__ TileArgs p) {
  extern __shared__ __align__(1024) unsigned char pair_raw[];
  using S = ExpandShared<RANKS / 16, STAGES>;
  static_assert(sizeof(S) <= kShrinkBytes && kTileThreads == kShrinkThreads, "one CTA does both");
  ShrinkEnd& end = shrink_end(pair_raw);
  const int warp = threadIdx.x >> 5, cluster = blockIdx.x / kCluster, tiles = __ldg(p.cut + 3);
  // Of one module it is the cluster's own, asked for before it is known how many there are.
  const int first = p.num_modules == 1 ? cluster : cluster % max(tiles, 1);
  if (p.shrink && warp == kWeightBoxWarp) fetch_site(p, first, end.site), copies_commit();
  if (warp == kWeightBoxWarp + 1) prefetch_units(p);
  if (threadIdx.x == 32) make_shrink_barriers(end.bars);
  if (warp == kWeightBoxWarp) copies_wait<0>();
  if (tiles > 0) {
    const bool odd = p.shrink && threadIdx.x == kAskingThread && load_word(p.shrunk) >= gridDim.x;
    if (p.shrink && cluster < tiles * p.num_modules) shrink_first<RANKS>(p, pair_raw);
    if (p.shrink && threadIdx.x == kAskingThread) release_count(p.shrunk, 2 * gridDim.x - 1);
    S& sm = *reinterpret_cast<S*>(pair_raw);
    if (threadIdx.x == kAskingThread) sm.odd = odd, sm.there = false;
    expand_tiles<true, RANKS / 16, STAGES>(p, sm);
  }
  wait_for_previous();
}

}  // namespace lora_jax
