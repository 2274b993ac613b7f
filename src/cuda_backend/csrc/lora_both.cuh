// Items (lora_gemm.cuh) and tiles (lora_tiles.cuh, expand_tiles.cuh) in one kernel: their expand with
// the shrink of items if there is one, and their shrink where that is all.
//
// How many tiles there are only the device knows. Where there are none, these are pair_kernel, and the
// question has cost nothing: a kernel of their own, launched to return at once, would take a microsecond.
#pragma once
#include "expand_tiles.cuh"
#include "lora_gemm.cuh"
#include "lora_tiles.cuh"

namespace lora_jax {

static_assert(kThreads == kTileThreads, "one CTA serves both");

// Zeros for the rows of nobody, which come last. By a fill before the kernel they would delay it, 1 to 2 us
// of a pair on an H200.
__device__ __forceinline__ void zero_rows_behind(const PairArgs& p) {
  const int warps = static_cast<int>(gridDim.x) * (kThreads / 32);
  const int warp = static_cast<int>(blockIdx.x) * (kThreads / 32) + (threadIdx.x >> 5);
  zero_rows(p, __ldg(p.live) + warp, p.num_rows, warps);
}

template <int NS, int STAGE, int RANKS, int EXPAND_STAGES>
__global__ void __launch_bounds__(kThreads, 2) both_kernel(const __grid_constant__ BothArgs p) {
  extern __shared__ __align__(1024) unsigned char both_raw[];
  auto& sm = *reinterpret_cast<Shared<NS, STAGE, RANKS>*>(both_raw);
  auto& tiled = *reinterpret_cast<ExpandShared<RANKS / 16, EXPAND_STAGES>*>(both_raw);  // in the stages
  static_assert(sizeof tiled <= sizeof sm.stages, "barriers lie behind");
  const int tiles = __ldg(p.tiles.cut);
  const bool items = __ldg(p.items.num_items) > 0 || tiles == 0;
  if (threadIdx.x == 0) sm.tiles = tiles;
  if (threadIdx.x == 32) prefetch_map(&p.tiles.b_boxes), prefetch_map(&p.tiles.h_rows);
  let_next_begin();
  make_barriers(p.items, sm);
  if (items) serve_items(p.items, sm);  // without any it would look for some before it ends
  __syncthreads();
  if (sm.tiles > 0) expand_tiles<false, RANKS / 16, EXPAND_STAGES>(p.tiles, tiled);
  if (!p.items.accumulate) zero_rows_behind(p.items);
  wait_for_previous();
}

// Of one module. Items come first, if there are any; what the first tile needs is on its way meanwhile. CTAs come in clusters,
// which do not wait for one another: no matter how many of them run at a time.
template <int NS, int STAGE, int RANKS>
__global__ void __launch_bounds__(kThreads, 2) shrink_kernel(const __grid_constant__ BothArgs p) {
  extern __shared__ __align__(1024) unsigned char shrink_both_raw[];
  using S = Shared<NS, STAGE, RANKS>;
  auto& sm = *reinterpret_cast<S*>(shrink_both_raw);
  ShrinkEnd& end = shrink_end(shrink_both_raw);
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
  shrink_cluster<kMostRankOfPass>(p.tiles, shrink_both_raw);
}

}  // namespace lora_jax
