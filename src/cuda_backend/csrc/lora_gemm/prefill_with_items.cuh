// Items (lora_gemm/items.cuh) and tiles (lora_gemm/prefill_expand.cuh) in one kernel: their expand with the shrink of items
// if there is one.
//
// How many tiles there are only the device knows. Where there are none, this is pair_kernel, and the
// question has cost nothing: a kernel of their own, launched to return at once, would take a microsecond.
#pragma once
#include "lora_gemm/prefill_expand.cuh"
#include "lora_gemm/items.cuh"

namespace lora_jax {

static_assert(kThreads == kTileThreads, "one CTA serves both");

// Zeros for the rows of nobody, which come last. By a fill before the kernel they would delay it, 1 to 2 us
// of a pair on an H200.
__device__ __forceinline__ void zero_rows_behind(const PairArgs& p) {
  const int warps = static_cast<int>(gridDim.x) * (kThreads / 32);
  const int warp = static_cast<int>(blockIdx.x) * (kThreads / 32) + (threadIdx.x >> 5), live = __ldg(p.live);
  if (live > 0 || p.zeros_if_idle) zero_rows(p, live + warp, p.num_rows, warps);
}

template <int NS, int STAGE, int RANKS, int EXPAND_STAGES>
__global__ void __launch_bounds__(kThreads, 2) both_kernel(const __grid_constant__ BothArgs p) {
  extern __shared__ __align__(1024) unsigned char both_raw[];
  auto& sm = *reinterpret_cast<Shared<NS, STAGE, RANKS>*>(both_raw);
  auto& tiled = *reinterpret_cast<ExpandShared<RANKS / 16, EXPAND_STAGES>*>(both_raw);  // in the stages
  static_assert(sizeof tiled <= sizeof sm.stages, "barriers lie behind");
  const int tiles = __ldg(p.tiles.cut);
  const bool items = __ldg(p.items.num_items) > 0;
  if (threadIdx.x == 0) sm.tiles = tiles;
  if (threadIdx.x == 32) prefetch_map(&p.tiles.b_boxes), prefetch_map(&p.tiles.h_rows);
  let_next_begin();
  make_barriers(p.items, sm);
  if (items) serve_items(p.items, sm);  // without any it would look for some; all CTAs leave the call's state as it is
  __syncthreads();
  if (sm.tiles > 0) expand_tiles<false, RANKS / 16, EXPAND_STAGES>(p.tiles, tiled);
  if (!p.items.accumulate) zero_rows_behind(p.items);
  wait_for_previous();
}

}  // namespace lora_jax
