// Who shrinks which units where a launch does nothing else: what CTAs do weighs the same.
//
// Units of 16 rows take twice as long as those of few. A long item has two of them for each unit that a short
// one has, and their CTAs should have fewer others. In the first round a CTA has the unit of its number, which
// it can begin before it knows of any item; CTAs from the end of the grid have the second slices as well. What
// is left goes to the CTAs that have least so far, one after the other. Shrink of 1024 rows of 198 adapters of
// rank 64, Zipf, on an H200: TODO.
#pragma once
#include "lora_units.cuh"

namespace lora_jax {

constexpr int kMostCounted = 1024;  // items, 32 a lane

// Whether it pays to look at the items: some have several rounds to come, but not so many that they even out.
__device__ __forceinline__ bool shares_differ(const Plan& plan, int num_items) {
  const int ctas = static_cast<int>(gridDim.x);
  return num_items <= kMostCounted && plan.units > ctas && plan.units < 8 * ctas;
}

// What a warp knows of items: which of them are long.
struct LongItems {
  uint32_t mine = 0;     // of items 32 * lane and those behind it, a bit each
  int before = 0, all = 0;

  __device__ __forceinline__ LongItems(const PairArgs& p, int num_items) {
    const int lane = threadIdx.x & 31;
    for (int w = 0; w * 32 < num_items; ++w) {
      const int at = w * 32 + lane;
      const uint32_t found = __ballot_sync(~0u, at < num_items && __ldg(&p.items[min(at, num_items - 1)].num_rows) > kShrinkRows);
      if (lane == w) mine = found;
    }
    int upto = __popc(mine);
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(~0u, upto, d);
      if (lane >= d) upto += other;
    }
    before = upto - __popc(mine), all = __shfl_sync(~0u, upto, 31);
  }
  // By all lanes, of an item each.
  __device__ __forceinline__ bool is_long(int item) const { return __shfl_sync(~0u, mine, item / 32) >> item % 32 & 1; }
  __device__ __forceinline__ int before_item(int item) const {
    const uint32_t word = __shfl_sync(~0u, mine, item / 32);
    return __shfl_sync(~0u, before, item / 32) + __popc(word & ((1u << item % 32) - 1));
  }
  // By all lanes, for the same n: the n-th long item.
  __device__ __forceinline__ int find(int n) const {
    const int word = __popc(__ballot_sync(~0u, before <= n)) - 1;  // the last lane that begins at or before it
    uint32_t bits = __shfl_sync(~0u, mine, word);
    for (int skip = n - __shfl_sync(~0u, before, word); skip > 0; --skip) bits &= bits - 1;
    return word * 32 + __ffs(bits) - 1;
  }
};

// A CTA's shares beside its first unit. Levels say what CTAs have, in units of few rows; who has no more than a
// level takes one of what is left, before those that have more.
struct ShrinkShares {
  const Plan& plan;
  bool fit;                // else this is not how to share out
  int own = 0;
  int second = -1;         // the long item whose second slice is one of them, if any
  int level, sizes[3];     // of this CTA; how many CTAs have no more than 1, 2 and 3
  int ranks[3];            // how many of them come before this CTA

  __device__ __forceinline__ ShrinkShares(const Plan& plan, const LongItems& items) : plan(plan) {
    const int ctas = static_cast<int>(gridDim.x), cta = static_cast<int>(blockIdx.x), per = plan.item_units;
    const int from = ctas - items.all * per;  // CTAs that have a second slice
    fit = from >= ctas / 2;
    if (!fit) return;
    auto long_ctas = [&](int end) {  // that have a long item's first slice, of those before `end`
      const int item = divide(end, per);
      return items.before_item(item) * per + (items.is_long(item) ? end - item * per : 0);
    };
    const int before = long_ctas(cta), first = long_ctas(from), all = long_ctas(ctas);
    const int found = items.find(divide(ctas - 1 - cta, per));
    if (cta >= from) second = found;
    level = 1 + items.is_long(divide(cta, per)) + 2 * (cta >= from);
    sizes[0] = from - first, sizes[1] = from, sizes[2] = ctas - (all - first);
    ranks[0] = cta - before, ranks[1] = cta, ranks[2] = cta < from ? cta : cta - (before - first);
    for (own = second >= 0; unit_of(level + own - (second >= 0)) < plan.units; ++own) {}
  }
  __device__ __forceinline__ int unit_of(int level) const {
    const int ctas = static_cast<int>(gridDim.x);
    if (level == 1) return ctas + ranks[0];
    if (level == 2) return ctas + sizes[0] + ranks[1];
    if (level == 3) return ctas + sizes[0] + sizes[1] + ranks[2];
    return (level - 3) * ctas + sizes[0] + sizes[1] + sizes[2] + static_cast<int>(blockIdx.x);
  }
  __device__ __forceinline__ Share share(int n) const {
    const int per = plan.item_units, from_end = static_cast<int>(gridDim.x - 1 - blockIdx.x);
    const bool slice = second >= 0 && n == 0;
    const int unit = unit_of(level + n - (second >= 0)), item = slice ? second : divide(unit, per);
    const int begin = (slice ? from_end - divide(from_end, per) * per : unit - item * per) * plan.ranks;
    return n < own ? Share{kShrink, item, begin, begin + plan.ranks, slice} : kNothing;
  }
};

}  // namespace lora_jax
