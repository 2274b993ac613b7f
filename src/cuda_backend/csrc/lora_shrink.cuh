// The shrink of items (lora_gemm.cuh) and of tiles (lora_tiles.cuh) in one kernel, where that is all of a call:
// see lora_both.cuh for why.
#pragma once
#include "lora_gemm.cuh"
#include "lora_tiles.cuh"

namespace lora_jax {

// Of one module. Items come first, if there are any; what the first tile needs is on its way meanwhile. CTAs come in clusters,
// which do not wait for one another: no matter how many of them run at a time.
template <int NS, int STAGE, int RANKS>
__global__ void __launch_bounds__(kThreads, 2) shrink_kernel(const __grid_constant__ BothArgs p) {
  using S = Shared<NS, STAGE, RANKS>;
  auto& sm = *reinterpret_cast<S*>(shrink_memory());
  ShrinkEnd& end = shrink_end();
  static_assert(kThreads == kShrinkThreads && sizeof sm <= kShrinkBytes);
  constexpr bool apart = sizeof sm <= kShrinkEnd;  // else what the tiles begin with lies in what items need
  static_assert(offsetof(S, full) >= kShrinkRoom && (apart || offsetof(S, full) >= kShrinkEnd + sizeof end), "see ShrinkEnd");
  const int warp = threadIdx.x >> 5, cluster = static_cast<int>(blockIdx.x) / kCluster;
  auto begin_tile = [&] {
    if (warp == kWeightBoxWarp) fetch_site(p.tiles, cluster, end.site), copies_commit();
    if (threadIdx.x == kThreads - 1) make_shrink_barriers(end.bars);
  };
  const bool items = __ldg(p.items.num_items) > 0 || __ldg(p.tiles.cut + 3) == 0;
  if (apart) begin_tile();
  if (threadIdx.x == 0) prefetch_entries(p.tiles);
  if (threadIdx.x == 32) prefetch_map(&p.tiles.a_parts[cluster_rank() / 2][1]);
  make_barriers(p.items, sm);
  if (items) {
    serve_items<false>(p.items, sm);
    fence_shared_copies();  // which brought what tiles write over
    __syncthreads();
  }
  const bool copies = warp == kWeightBoxWarp;
  if (apart && copies) copies_wait<0>();
  if (static_cast<int>(blockIdx.x) / kCluster >= __ldg(p.tiles.cut + 3) * p.tiles.num_modules) return;
  if (!apart) begin_tile();
  if (!apart && copies) copies_wait<0>();
  cluster_begun();  // behind the items, which others' parts would write over
  __syncthreads();
  shrink_cluster<kMostRankOfPass>(p.tiles);
}

}  // namespace lora_jax
