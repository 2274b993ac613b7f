// Work division of grouped LoRA of few rows: tables that each CTA holds completely, its shrink units and its
// run of the expand. lora_gemm/decode.cuh has the kernel.
#pragma once
#include "lora_gemm/unit_fetch.cuh"

namespace lora_jax {

constexpr int kFewRows = 256;    // of a launch, at most
constexpr int kFewRowsOfMany = 128;  // where adapters may be many
constexpr int kFewItemRows = 8;      // of an item: see rows_per_item in lora_gemm.py
constexpr int kFewCuts = 2;      // the shrink is cut into units of 8 or 16 rank rows

__device__ __forceinline__ float reciprocal(int n) { return __fdividef(1.f, static_cast<float>(n)); }
// n / d of numbers that a float holds, given 1 / d: a division would take its time.
__device__ __forceinline__ int quotient(int n, float by) { return static_cast<int>((n + .5f) * by); }

// ---------------------------------------------------------------- tables
struct FewTables {
  int4 items[kFewRows];
  uint16_t order[kFewRows];
};

// What a lane of the unit warp asks for before it does anything else: its part of the tables, and the
// item of this CTA's first shrink unit, were the shrink cut in the lane's way.
struct AskedTables {
  int num_items;
  int4 guessed;
  int4 items[kFewRows / 32];
  int order[kFewRows / 32];
};
__device__ __forceinline__ int guessed_cut() { return min(static_cast<int>(threadIdx.x & 31), kFewCuts - 1); }
__device__ __forceinline__ AskedTables ask_tables(const PairArgs& p) {
  const auto* items = reinterpret_cast<const int4*>(p.items);
  AskedTables t{};
  t.num_items = *p.num_items;
  const int item = quotient(blockIdx.x, reciprocal(item_units(p, guessed_cut())));
  if (p.shrink) t.guessed = __ldg(items + min(item, p.num_rows - 1));
#pragma unroll
  for (int i = 0; i < kFewRows / 32; ++i) {
    const int at = i * 32 + static_cast<int>(threadIdx.x & 31);
    if (at < p.num_rows) t.items[i] = __ldg(items + at), t.order[i] = __ldg(p.row_order + at);
  }
  return t;
}
__device__ __forceinline__ void keep_tables(FewTables& tables, const AskedTables& asked) {
#pragma unroll
  for (int i = 0; i < kFewRows / 32; ++i) {
    const int at = i * 32 + static_cast<int>(threadIdx.x & 31);
    tables.items[at] = asked.items[i], tables.order[at] = asked.order[i];
  }
  __syncwarp();
}
// Brings this CTA's share of the slots' tables into L2 while the items are on their way, and of h where
// that is given; by a warp.
__device__ __forceinline__ void prefetch_slots(const PairArgs& p) {
  const int lane = threadIdx.x & 31, at = blockIdx.x * 128;
  if (lane < p.num_modules) {
    const Module& m = p.modules[lane];
    if (at < p.num_slots * 20) prefetch_l2(reinterpret_cast<const char*>(m.entries) + at);
    if (at < p.num_slots * 4) prefetch_l2(reinterpret_cast<const char*>(m.scaling) + at);
  }
  if (!p.shrink && lane == 0 && at < p.num_rows * p.h_stride * 2) prefetch_l2(reinterpret_cast<const char*>(p.h) + at);
}
__device__ __forceinline__ Site find_site(const PairArgs& p, int module, const int4& item) {
  Site site{};
  site.module = module;
  site.item = Item{static_cast<int>(min(static_cast<unsigned>(item.x), p.num_slots - 1u)), item.y, item.z, item.w};
  load_slot(p, site);
  return site;
}

// By a thread of each CTA: as count_begun; the next launch's draws become zero.
__device__ __forceinline__ uint32_t count_launch(const PairArgs& p) {
  const uint32_t before = count_begun(p);
  if (before == 0 || before == gridDim.x) p.state->draws[!is_odd(before)] = 0;
  return before;
}

// ---------------------------------------------------------------- the plan of a launch
constexpr int kLightRows = 3;       // of an item whose stages are as wide as may be
constexpr float kHeavyCost = 1.6f;  // of an item of more rows: it has half as much on its way, and comes later
// What is left of the expand is drawn, block by block, by those who are through with their runs first: what an SM
// gets of the memory's bandwidth differs by a third, and by runs alone the last of 264 CTAs end 2 us after the mean
// one. 64 distinct rows, rank 64, on an H200: 33.5 us for 34.1, 128 by Zipf 29.7 for 30.7, the pair of the former
// 40.0 for 41.2. Pairs of shorter runs lose as much by the draws.
constexpr float kOwnOfExpand = .9f, kOwnOfPair = .8f;
constexpr int kLeastRun = 2, kLeastOfPair = 12;  // blocks of a CTA, where some are drawn
constexpr float kFirstBytes = 3000.f;         // of A a nanosecond: see wait_for_shrinks

// What the expand of the items before each one costs, that of one of few rows being 1; by a warp.
struct ItemCosts {
  uint32_t heavy[kFewRows / 32];  // items of more rows
  int num_items;
  __device__ __forceinline__ explicit ItemCosts(const AskedTables& asked) : num_items(asked.num_items) {
#pragma unroll
    for (int w = 0; w < kFewRows / 32; ++w)
      heavy[w] = __ballot_sync(~0u, w * 32 + static_cast<int>(threadIdx.x & 31) < num_items && asked.items[w].w > kLightRows);
  }
  __device__ __forceinline__ float before(int item) const {
    int count = 0;
#pragma unroll
    for (int w = 0; w < kFewRows / 32; ++w) {
      const int in = item - w * 32;  // of this window, items before
      count += __popc(in >= 32 ? heavy[w] : in > 0 ? heavy[w] & ((1u << in) - 1) : 0u);
    }
    return item + (kHeavyCost - 1.f) * count;
  }
  // Returns how many of all items' blocks lie before `cost`.
  __device__ __forceinline__ int blocks_before(float cost, int blocks) const {
    int item = -1;
#pragma unroll
    for (int w = 0; w < kFewRows / 32; ++w) {
      const int i = w * 32 + static_cast<int>(threadIdx.x & 31);
      item += __popc(__ballot_sync(~0u, i < num_items && before(i) <= cost));
    }
    const float start = before(item), part = __fdividef(cost - start, before(item + 1) - start);
    return item * blocks + min(static_cast<int>(part * blocks), blocks);
  }
};

// Shrink units, which CTAs have in turn, one run of blocks of columns a CTA, and blocks that are drawn. No result
// depends on the plan. Its divisions are multiplications: a CTA waits for each of them.
struct FewPlan {
  float by_ctas, by_blocks;
  int blocks;                          // of an item
  int num_items, items;                // of one module, of all
  int cut, item_units, units;          // shrink units of an item, of all
  int rounds, more;                    // units of each CTA; of so many one more
  int first, last;                     // this CTA's run, counted through all items
  int drawn;                           // blocks behind all runs

  // What does not depend on the number of items is known before it has come.
  __device__ __forceinline__ explicit FewPlan(const PairArgs& p)
      : by_ctas(reciprocal(gridDim.x)), blocks((p.d_out + kBlock - 1) / kBlock) {
    by_blocks = reciprocal(blocks);
  }
  // Fine units where CTAs are idle otherwise, or have some anyway, by what was fastest on an H200.
  __device__ __forceinline__ void cut_shrink(const PairArgs& p, int count) {
    num_items = count, items = count * p.num_modules;
    const float fine = items * by_ctas * lora_jax::item_units(p, 0);  // units of a CTA
    cut = fine <= .75f || fine >= (p.d_in < 2048 ? 2.f : 1.5f) ? 0 : 1, item_units = lora_jax::item_units(p, cut);
    units = p.shrink ? items * item_units : 0;
    rounds = quotient(units, by_ctas), more = units - rounds * static_cast<int>(gridDim.x);
  }
  // Of an expand alone.
  __device__ __forceinline__ void cut_no_shrink(const PairArgs& p, int count) {
    num_items = count, items = count * p.num_modules;
    cut = 0, item_units = 1, units = rounds = more = 0;
  }
  __device__ __forceinline__ void cut_expand(const PairArgs& p, const AskedTables& asked) {
    const int all = items * blocks;
    const float mean = all * by_ctas;
    drawn = 0;
    if (!p.shrink) {
      const int run = static_cast<int>(mean * kOwnOfExpand);
      if (run < kLeastRun) return cut_run([&](int cta) { return static_cast<int>(__fmul_rn(mean, cta)); }, all);
      first = blockIdx.x * run, last = first + run, drawn = all - static_cast<int>(gridDim.x) * run;
      return;
    }
    if (mean >= kLeastOfPair) drawn = static_cast<int>(all * (1.f - kOwnOfPair));
    else if (costs_differ(p)) return cut_by_costs(p, ItemCosts(asked));
    const int own = all - drawn;
    cut_run([&](int cta) { return min(own, static_cast<int>(run_begin(p, cta, own))); }, own);
  }
  // Where y comes with large weights and items are few: 64 rows of 32 adapters, Zipf, rank 64, on an H200 take
  // 26.3 us by blocks and 25.8 by costs, 32 rows of 19 adapters 18.8 and 17.1. Else it costs up to a microsecond.
  __device__ __forceinline__ bool costs_differ(const PairArgs& p) const {
    const bool large = p.shrink && p.accumulate && p.max_rank > 32;
    return large && items * 4 <= static_cast<int>(gridDim.x) && p.num_rows > num_items + kLightRows;
  }
  __device__ __forceinline__ void cut_by_costs(const PairArgs& p, const ItemCosts& costs) {
    const float module_cost = costs.before(num_items);
    cut_run([&](int cta) {
      const float cost = run_begin(p, cta, module_cost * p.num_modules * blocks) * by_blocks;
      const int module = static_cast<int>(__fdividef(cost, module_cost));
      if (module >= p.num_modules) return items * blocks;
      return module * num_items * blocks + costs.blocks_before(cost - module * module_cost, blocks);
    }, items * blocks);
  }
  // A CTA's run ends where the next one's begins, to the bit: so both come out of the same instructions.
  template <class Begin>
  __device__ __forceinline__ void cut_run(Begin begin, int all) {
#pragma unroll 1
    for (int cta = blockIdx.x; cta <= static_cast<int>(blockIdx.x) + 1; ++cta)
      first = last, last = cta == static_cast<int>(gridDim.x) ? all : begin(cta);
  }
  // A CTA with one more shrink unit than others has fewer blocks, where items are few: else its neighbours'
  // longer runs are on more items, each of which costs them a unit.
  __device__ __forceinline__ float run_begin(const PairArgs& p, int cta, float all) const {
    const int ctas = static_cast<int>(gridDim.x);
    const int block = (p.max_rank + 7) / 8 * 8 * kBlock;  // elements
    const float cost = items * 4 <= ctas ? __fdividef(static_cast<float>(8 << cut) * p.d_in, block) : 0.f;
    const float level = (all + more * cost) * by_ctas, few = max(level - cost, 0.f);
    const float many = level > cost ? level : __fdividef(all, static_cast<float>(ctas - more));
    return few * min(cta, more) + many * max(cta - more, 0);
  }
  __device__ __forceinline__ int own_units() const { return rounds + (static_cast<int>(blockIdx.x) < more ? 1 : 0); }
  // Shrink units of this CTA, and with its run: one share an item.
  __device__ __forceinline__ int own() const {
    const int run = last > first ? quotient(last - 1, by_blocks) - quotient(first, by_blocks) + 1 : 0;
    return own_units() + run;
  }
  __device__ __forceinline__ Share shrink_share(int n) const {
    const int unit = n * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
    const int item = quotient(unit, reciprocal(item_units)), begin = (unit - item * item_units) * (8 << cut);
    return Share{kShrink, item, begin, begin + (8 << cut), 0};
  }
  __device__ __forceinline__ Share share(int n) const {
    if (n < own_units()) return shrink_share(n);
    const int item = quotient(first, by_blocks) + n - own_units();
    return Share{kExpand, item, max(first - item * blocks, 0), min(last - item * blocks, blocks), 0};
  }
  __device__ __forceinline__ Share drawn_share(int n) const {
    const int block = items * blocks - drawn + n, item = quotient(block, by_blocks), begin = block - item * blocks;
    return Share{kExpand, item, begin, begin + 1, 0};
  }
};

// Returns the share as a unit. Of an expand alone units of few rows have small stages, which are begun and ended sooner;
// what waits for h has stages as large as they may be: so much comes meanwhile. Those of a shrink unit are even, and all
// of them on their way at once where they can.
template <class S>
__device__ __forceinline__ Unit few_unit(const PairArgs& p, const Share& s, const Site& site) {
  Unit u = describe_unit(p, s, site);
  if (u.kind == kEnd) return u;
  const int wide = p.wide[u.kind - kShrink];
  const float by_column = reciprocal(max(u.groups * 16 + u.staged_rows * 2, 1));
  auto fit_in = [&](int bytes) { return static_cast<int>(.99999f * (bytes - u.staged_rows * 16) * by_column); };
  const bool small = !p.shrink && u.num_rows <= kHeldRows && fit_in(kSmallStage) >= kBlock;
  const int fit = fit_in(small ? kSmallStage : S::kStage);
  u.wide = fit >> (wide + 6) ? wide : kNarrow;
  const int boxes = (u.end - u.begin + (64 << u.wide) - 1) >> (u.wide + 6), most = fit >> (u.wide + 6);
  const int even = u.kind == kShrink ? (boxes + S::kStages - 1) / S::kStages : most;
  u.width = min(most, even) << (u.wide + 6);
  return u;
}

}  // namespace lora_jax
