// How grouped LoRA of few rows is cut: tables that a CTA holds as a whole, its shrink units and its run of
// the expand. See lora_few.cuh for the kernel.
#pragma once
#include "unit_warp.cuh"

namespace lora_jax {

constexpr int kFewRows = 128;    // of a launch
constexpr int kFewItemRows = 8;  // of an item: see rows_per_item in lora_gemm.py
constexpr int kFewCuts = 2;      // the shrink is cut into units of 8 or 16 rank rows

__device__ __forceinline__ float reciprocal(int n) { return __fdividef(1.f, static_cast<float>(n)); }
// n / d of numbers that a float holds, given 1 / d: a division would take its time.
__device__ __forceinline__ int quotient(int n, float by) { return static_cast<int>((n + .5f) * by); }

// ---------------------------------------------------------------- tables
struct FewTables {
  int4 items[kFewRows];
  int order[kFewRows];
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
#ifndef OWN_EXPAND
#define OWN_EXPAND .8f
#define OWN_PAIR .8f
#endif
// What is left of the expand is drawn, block by block, by those who are through with their runs first: what an SM
// gets of the memory's bandwidth differs by a third.
constexpr float kOwnOfExpand = OWN_EXPAND, kOwnOfPair = OWN_PAIR;
constexpr int kLeastRun = 2;  // blocks, where some are drawn

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
  __device__ __forceinline__ void cut_expand(const PairArgs& p) {
    const int all = items * blocks, ctas = static_cast<int>(gridDim.x);
    const float mean = all * by_ctas;
    if (p.shrink) {
      drawn = mean >= kLeastRun + 1 ? static_cast<int>(all * (1.f - kOwnOfPair)) : 0;
      return cut_run([&](int cta) { return min(all - drawn, static_cast<int>(run_begin(p, cta, all - drawn))); }, all - drawn);
    }
    const int run = static_cast<int>(mean * kOwnOfExpand);
    if (run < kLeastRun) return drawn = 0, cut_run([&](int cta) { return static_cast<int>(__fmul_rn(mean, cta)); }, all);
    first = blockIdx.x * run, last = first + run, drawn = all - ctas * run;
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
