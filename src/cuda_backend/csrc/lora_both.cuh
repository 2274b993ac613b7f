// pair_kernel (lora_gemm.cuh) and the expand of tiles (expand_tiles.cuh) as one kernel.
//
// How many tiles there are only the device knows. Where there are none, this is pair_kernel, and the
// question has cost nothing: a kernel of their own, launched to return at once, would take a microsecond.
#pragma once
#include "expand_tiles.cuh"
#include "lora_gemm.cuh"

namespace lora_jax {

static_assert(kThreads == kTileThreads, "one CTA serves both");

template <int NS, int STAGE, int RANKS, int AHEAD>
__global__ void __launch_bounds__(kThreads, 2) both_kernel(const __grid_constant__ BothArgs p) {
  extern __shared__ __align__(1024) unsigned char both_raw[];
  auto& sm = *reinterpret_cast<Shared<NS, STAGE, RANKS>*>(both_raw);
  auto& tiled = *reinterpret_cast<ExpandShared<RANKS / 16>*>(both_raw);  // in the first stage
  static_assert(sizeof tiled <= STAGE, "barriers lie behind");
  const int tiles = __ldg(p.tiles.cut);
  const bool items = __ldg(p.items.num_items) > 0 || tiles == 0;
  if (threadIdx.x == 0) sm.tiles = tiles;
  let_next_begin();
  make_barriers(p.items, sm);
  if (items) serve_items(p.items, sm);  // without any it would look for some before it ends
  __syncthreads();
  if (sm.tiles > 0) expand_tiles<RANKS / 16, AHEAD>(p.tiles, tiled);
  wait_for_previous();
}

}  // namespace lora_jax
