// Items (lora_gemm.cuh) and tiles (lora_tiles.cuh, expand_tiles.cuh) in one kernel: their shrink and expand, or
// one of them where that is all.
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

struct PrefetchRun {
  const TileArgs& p;
  __device__ __forceinline__ void operator()() const {
    if (p.accumulate) prefetch_run(p, thread_anew() - kFirstCopyWarp * 32, kCopyWarps * 32);
  }
};

// By all threads: shrinks the tiles of this CTA's cluster, if it has some, and counts the CTA as one that has.
__device__ __forceinline__ void shrink_before(const TileArgs& p, unsigned char* shared) {
  const int tiles = __ldg(p.cut + 3);
  if (static_cast<int>(blockIdx.x) / kCluster < tiles * p.num_modules) {
    cluster_begun();
    __syncthreads();
    // As shrink_cluster; then warps have as many registers as each other again.
    if (threadIdx.x < kShrinkWarps * 32) {
      more_registers<192>();
      TileShrink<kMostRankOfPass>(p, shared).template all<true>();
      fewer_registers<128>();
    } else {
      fewer_registers<64>();
      TileShrink<kMostRankOfPass, PrefetchRun>(p, shared, PrefetchRun{p}).template all<false>();
      more_registers<128>();
    }
    fence_shared_copies();  // which write over what this has written
    __syncthreads();
  }
  if (threadIdx.x == 0) release_count(p.shrunk, 2 * gridDim.x - 1);
}

// Where it shrinks tiles, CTAs come in clusters, which have their tiles first: so h is there, or almost, when
// the items have been served.
template <int NS, int STAGE, int RANKS, int EXPAND_STAGES>
__global__ void __launch_bounds__(kThreads, 2) both_kernel(const __grid_constant__ BothArgs p) {
  extern __shared__ __align__(1024) unsigned char both_raw[];
  auto& sm = *reinterpret_cast<Shared<NS, STAGE, RANKS>*>(both_raw);
  auto& tiled = *reinterpret_cast<ExpandShared<RANKS / 16, EXPAND_STAGES>*>(both_raw);  // in the stages
  static_assert(sizeof tiled <= sizeof sm.stages, "barriers lie behind");
  static_assert(sizeof sm <= kShrinkEnd, "what the tiles begin with lies behind what items need");
  const int tiles = __ldg(p.tiles.cut);
  const bool items = __ldg(p.items.num_items) > 0 || tiles == 0;
  const bool fetches = p.tiles.shrunk && threadIdx.x / 32 == kWeightBoxWarp;
  if (p.tiles.shrunk) {
    ShrinkEnd& end = shrink_end(both_raw);
    // Of one module it is the cluster's own, asked for before it is known how many there are.
    const int cluster = blockIdx.x / kCluster, shrunk = p.tiles.num_modules == 1 ? cluster + 1 : __ldg(p.tiles.cut + 3);
    if (fetches) fetch_site(p.tiles, cluster % max(shrunk, 1), end.site), copies_commit();
    if (threadIdx.x == kThreads - 1) make_shrink_barriers(end.bars);
    if (threadIdx.x == 32) prefetch_map(&p.tiles.a_parts[cluster_rank() / 2][1]);
    if (threadIdx.x == 0) sm.odd = load_word(p.tiles.shrunk) >= gridDim.x;
  }
  if (threadIdx.x / 32 == kWeightBoxWarp + 1) prefetch_units(p.tiles);
  if (threadIdx.x == 0) sm.tiles = tiles;
  if (threadIdx.x == 32) prefetch_map(&p.tiles.b_boxes), prefetch_map(&p.tiles.h_rows);
  make_barriers(p.items, sm);
  if (fetches) copies_wait<0>();
  if (p.tiles.shrunk && tiles > 0) shrink_before(p.tiles, both_raw);
  if (items) serve_items(p.items, sm);  // without any it would look for some before it ends
  __syncthreads();
  if (sm.tiles > 0) expand_tiles<RANKS / 16, EXPAND_STAGES>(p.tiles, tiled, sm.odd);
  if (!p.items.accumulate) zero_rows_behind(p.items);
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
