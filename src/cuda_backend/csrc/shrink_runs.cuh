// Even shares of the shrink for launches of few items. See lora_gemm.cuh for the whole.
//
// A slice of 16 rows costs a CTA twice what a row does, so units taken in turn leave those with the long
// segments behind. Here each CTA gets a run of equal cost through the groups of 8 rank rows of all slices.
#pragma once
#include "lora_units.cuh"

namespace lora_jax {

constexpr int kRunItems = 8, kMostRunItems = 32 * kRunItems;  // a lane looks at, a launch has of a module
constexpr int kSliceCost = 16;  // of the weights, in rows
constexpr int kUnitGroups = 4;  // at most

// Whether CTAs take runs: not where units are so many that turns are even, nor so few that each CTA has one.
__device__ __forceinline__ bool takes_runs(const PairArgs& p, int num_items) {
  const int groups = num_items * p.num_modules * item_units(p, 0), ctas = static_cast<int>(gridDim.x);
  const bool few = num_items <= kMostRunItems && num_items * p.num_modules <= 6 * ctas && groups < 16 * ctas;
  return p.shrink && few && groups * 3 >= ctas * 4;
}

__device__ __forceinline__ int slices_of(int rows) { return rows > kShrinkRows ? 2 : 1; }
// In sixteenths, so that the ends of runs fall between groups; 0 past the last item.
__device__ __forceinline__ int run_cost(int rows, bool there) {
  return there ? (slices_of(rows) * kSliceCost + rows) * 16 : 0;
}

// Returns the sum over this lane and those below.
__device__ __forceinline__ int lane_sums(int v) {
  const int lane = threadIdx.x & 31;
  for (int by = 1; by < 32; by *= 2) {
    const int below = __shfl_sync(~0u, v, max(lane - by, 0));
    if (lane >= by) v += below;
  }
  return v;
}
// Returns how many lanes hold at most v, where the lanes' numbers grow.
__device__ __forceinline__ int lanes_up_to(int number, int v) {
  int found = 0;
  for (int by = 16; by; by /= 2)
    if (__shfl_sync(~0u, number, found + by - 1) <= v) found += by;
  return found;
}

// The rows of a lane's items, asked for before the number of items is there.
struct RunRows {
  int rows[kRunItems];
  __device__ __forceinline__ explicit RunRows(const PairArgs& p) {
#pragma unroll
    for (int i = 0; i < kRunItems; ++i)
      rows[i] = __ldg(&p.items[min(static_cast<int>(threadIdx.x & 31) * kRunItems + i, p.num_rows - 1)].num_rows);
  }
};

// The CTA's run: lane n has its n-th unit, `count` in all.
struct ShrinkRun {
  Share share = kNothing;
  int count;

  __device__ __forceinline__ ShrinkRun(const PairArgs& p, const RunRows& known, int num_items) {
    const int lane = threadIdx.x & 31, cta = static_cast<int>(blockIdx.x), ctas = static_cast<int>(gridDim.x);
    auto cost_of = [&](int i) { return run_cost(known.rows[i], lane * kRunItems + i < num_items); };
    int mine = 0;
#pragma unroll
    for (int i = 0; i < kRunItems; ++i) mine += cost_of(i);
    const int sum = lane_sums(mine), module_cost = __shfl_sync(~0u, sum, 31), all = module_cost * p.num_modules;
    const int begin = static_cast<int>(static_cast<int64_t>(all) * cta / ctas);
    const int end = static_cast<int>(static_cast<int64_t>(all) * (cta + 1) / ctas);
    const int module = divide(begin, module_cost), from = begin - module * module_cost;
    int before = sum - mine, item = lane * kRunItems;  // the item of this lane that `from` lies in, if any does
#pragma unroll
    for (int i = 0; i < kRunItems - 1; ++i) {
      const int cost = cost_of(i);
      if (item == lane * kRunItems + i && before + cost <= from) before += cost, ++item;
    }
    const int at = min(lanes_up_to(sum, from), 31);
    cut(p, num_items, module * num_items + __shfl_sync(~0u, item, at), module * module_cost + __shfl_sync(~0u, before, at),
        begin, end);
  }

  // Of the items from `first` on, which has `before` in front of it, what lies in [begin, end).
  __device__ __forceinline__ void cut(const PairArgs& p, int num_items, int first, int before, int begin, int end) {
    const int lane = threadIdx.x & 31, groups = item_units(p, 0), at = first + lane, module = divide(at, num_items);
    const int rows = __ldg(&p.items[at - module * num_items].num_rows);
    const int cost = run_cost(rows, module < p.num_modules), pieces = slices_of(rows) * groups;
    const int own = before + lane_sums(cost) - cost;
    auto piece = [&](int x) {  // the first that begins at x or later
      return cost ? min(static_cast<int>(divide_up(max(x - own, 0) * pieces, cost)), pieces) : 0;
    };
    const int low = piece(begin), high = piece(end), middle = min(max(groups, low), high);  // where slices meet
    const int front = divide_up(middle - low, kUnitGroups), units = front + divide_up(high - middle, kUnitGroups);
    const int sum = lane_sums(units), source = min(lanes_up_to(sum, lane), 31);
    count = __shfl_sync(~0u, sum, 31);
    auto told = [&](int v) { return __shfl_sync(~0u, v, source); };
    const int n = lane - told(sum - units), ahead = told(front), both = told(units);
    const int l = told(low), meet = told(middle), h = told(high);
    const bool later = n >= ahead;
    const int from = later ? meet : l, to = later ? h : meet, parts = max(later ? both - ahead : ahead, 1);
    const int k = later ? n - ahead : n, slice = from >= groups, a = from + divide((to - from) * k, parts);
    const int b = from + divide((to - from) * (k + 1), parts);
    if (lane < count) share = Share{kShrink, first + source, (a - slice * groups) * 8, (b - slice * groups) * 8, slice};
  }
};

}  // namespace lora_jax
