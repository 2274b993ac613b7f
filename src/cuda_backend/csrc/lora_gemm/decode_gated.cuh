// y = silu(gate + its adapters) (up + its adapters) of few rows of few adapters, in one launch: what an MLP does with
// its two products. The bits are those of few_kernel (lora_gemm/decode.cuh) and silu_times_kernel behind it.
//
// A unit has the same columns of gate and of up. Rows without an adapter are multiplied by all threads, last.
#pragma once
#include "device/silu.cuh"
#include "lora_gemm/decode.cuh"

namespace lora_jax {

struct GatedArgs {
  PairArgs pair;        // its modules are gate and up, whose y are read alone; all items are of at most kFewItemRows rows
  __nv_bfloat16* y;     // [rows, d_out]
  const int* num_rows;  // those behind are zeros
};
struct GatedUnit {
  GroupUnit part[2];  // gate and up
};

template <class S>
__device__ __forceinline__ GatedUnit gated_unit(const PairArgs& p, const S& sm, const GroupPlan& plan, int unit) {
  const int of_group = plan.of_group(p, 0), group = quotient(unit, reciprocal(of_group)), first = (unit - group * of_group) * plan.width;
  return GatedUnit{{group_part(p, sm, plan, group, first, 0), group_part(p, sm, plan, group, first, 1)}};
}
// Of a block, up's weights come behind gate's.
__device__ __forceinline__ void fetch_gated(const PairArgs& p, const GatedUnit& u, const GroupPlan& plan, uint32_t to) {
#pragma unroll
  for (int m = 0; m < 2; ++m) fetch_blocks(p, u.part[m], plan, to + m * (plan.block_bytes / 2));
  copies_commit();
}

// As expand_groups, of both modules.
template <class S>
__device__ void expand_gated(const GatedArgs& a, S& sm, int num_items) {
  const PairArgs& p = a.pair;
  constexpr int kHWords = kFewItemRows * S::kHStride;
  constexpr int kRoom = (S::kStages * S::kStage - 2 * kGroupItems * kHWords * 4) / 2;
  static_assert(2 * S::kSteps * 2048 <= kRoom, "two blocks and h must fit");
  const GroupPlan plan(p, sm.groups.count, num_items, kRoom, 2);
  const int warp = threadIdx.x >> 5, buffer = plan.width * plan.block_bytes;
  const uint32_t weights = smem_u32(sm.stages);
  uint32_t* h = reinterpret_cast<uint32_t*>(&sm.stages[0][0] + 2 * kRoom / 16 * 16) + warp * 2 * kHWords;
  int unit = gridDim.x - 1 - blockIdx.x, at = 0;  // the first CTAs have a shrink behind them
  if (unit >= plan.total) return;
  GatedUnit next = gated_unit(p, sm, plan, unit);
  fetch_gated(p, next, plan, weights);
  for (; unit < plan.total; unit += gridDim.x, at ^= 1) {
    const GatedUnit u = next;
    const int items = u.part[0].items, tasks = items * u.part[0].blocks;
    const bool more = unit + static_cast<int>(gridDim.x) < plan.total;
    GroupTask gate, up;
    auto ask = [&](int task) { gate = group_task(p, sm, u.part[0], task), up = group_task(p, sm, u.part[1], task); };
    auto bring = [&] {
#pragma unroll
      for (int m = 0; m < 2; ++m) bring_h<S>(p, m, gate.item, u.part[m].rank, h + m * kHWords);
    };
    if (warp < tasks) ask(warp);
    if (more) next = gated_unit(p, sm, plan, unit + gridDim.x), fetch_gated(p, next, plan, weights + (at ^ 1) * buffer);
    if (warp < tasks) bring();
    if (more) copies_wait<1>();
    else copies_wait<0>();
    __syncthreads();
    for (int task = warp; task < tasks; task += kGroupItems) {
      if (task > warp) {
        ask(task);
        __syncwarp();
        if (items > 1) bring();
      }
      const uint32_t block = weights + at * buffer + gate.block * plan.block_bytes;
      // Zeros added to a zero would change its sign.
      if (u.part[0].rank > 0) add_to_task<S>(gate, block, h, u.part[0].rank);
      if (u.part[1].rank > 0) add_to_task<S>(up, block + plan.block_bytes / 2, h + kHWords, u.part[1].rank);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        gate.y[e] = silu_times_8(gate.y[e], up.y[e]);
        gate.out[e] = a.y + (gate.out[e] - p.modules[0].y);
      }
      store_task(gate);
    }
    __syncthreads();  // the blocks that come next but one may overwrite these
  }
}

// Rows of no item, which come last in the order, 8 columns a thread.
template <class S>
__device__ __forceinline__ void multiply_others(const GatedArgs& a, const S& sm, int num_items) {
  const PairArgs& p = a.pair;
  const int4 last = sm.tables.items[max(num_items - 1, 0)];
  const int first = num_items > 0 ? last.z + last.w : 0, columns = p.d_out / 8, real = __ldg(a.num_rows);
  for (int i = blockIdx.x * kThreads + threadIdx.x; i < (p.num_rows - first) * columns; i += gridDim.x * kThreads) {
    const int n = i / columns, row = sm.tables.order[first + n];
    const int64_t at = static_cast<int64_t>(row) * columns + i - n * columns;
    auto of = [&](int m) { return load_now(reinterpret_cast<const int4*>(p.modules[m].y) + at); };
    auto* y = reinterpret_cast<uint4*>(a.y) + at;
    if (row >= real) {
      *y = make_uint4(0, 0, 0, 0);
      continue;
    }
    const int4 gate = of(0), up = of(1);
    *y = silu_times_8(make_uint4(gate.x, gate.y, gate.z, gate.w), make_uint4(up.x, up.y, up.z, up.w));
  }
}

template <int NS, int STAGE, int RANKS>
__global__ void __launch_bounds__(kThreads, 2) gated_kernel(const __grid_constant__ GatedArgs a) {
  extern __shared__ __align__(1024) unsigned char gated_raw[];
  auto& sm = *reinterpret_cast<FewShared<NS, STAGE, RANKS>*>(gated_raw);
  const int num_items = shrink_always(a.pair, sm);
  if (num_items > 0) expand_gated(a, sm, num_items);
  multiply_others(a, sm, num_items);
}

}  // namespace lora_jax
