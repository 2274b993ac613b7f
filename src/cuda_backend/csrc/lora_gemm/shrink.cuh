// The shrink of items (lora_gemm/items.cuh) and of tiles (lora_gemm/prefill_shrink.cuh) in one kernel, where that is all of a call:
// see lora_gemm/prefill_with_items.cuh for why.
#pragma once
#include "lora_gemm/items.cuh"
#include "lora_gemm/prefill_shrink.cuh"

namespace lora_jax {

// Of one module. Items come first, if there are any; what the first tile needs is on its way meanwhile. CTAs come
// in clusters, which do not wait for one another: no matter how many of them run at a time.
template <int NS, int STAGE, int RANKS>
__global__ void __launch_bounds__(kThreads, 2) shrink_kernel(const __grid_constant__ BothArgs p) {
  using S = Shared<NS, STAGE, RANKS>;
  auto& sm = *reinterpret_cast<S*>(shrink_memory());
  static_assert(kThreads == kShrinkThreads && sizeof sm <= kShrinkBytes);
  constexpr bool apart = sizeof sm <= kShrinkEnd;  // else what the tiles begin with lies in what items need
  constexpr int before = apart ? kShrinkRoom : kShrinkEnd + sizeof(ShrinkBarriers);
  static_assert(offsetof(S, full) >= before, "see kShrinkEnd");
  const int cluster = static_cast<int>(blockIdx.x) / kCluster;
  const int tiles = load_now(p.tiles.cut + 3), few = load_now(p.items.num_items);  // both at once
  ShrinkRows rows;
  if (threadIdx.x >= kWeightBoxWarp * 32) rows.ask(p.tiles, cluster);
  if (threadIdx.x == 0) prefetch_entries(p.tiles);
  if (threadIdx.x == 32) prefetch_map(&p.tiles.a_parts[cluster_rank() / 2][1]);
  if (apart && threadIdx.x == 64) make_shrink_barriers();
  make_barriers(p.items, sm);
  if (few > 0 || tiles == 0) {
    serve_items<false, kMaxRows>(p.items, sm);
    fence_shared_copies();  // which brought what tiles write over
    __syncthreads();
    rows = ShrinkRows{};  // no register holds them meanwhile
    if (threadIdx.x >= kWeightBoxWarp * 32) rows.ask(p.tiles, cluster);
  }
  if (cluster >= load_now(p.tiles.cut + 3)) return;
  if (!apart) {
    if (threadIdx.x == 64) make_shrink_barriers();
    __syncthreads();
  }
  cluster_begun();  // behind the items, which others' parts would write over
  shrink_cluster<kMostRankOfPass>(p.tiles, rows);
}

}  // namespace lora_jax
