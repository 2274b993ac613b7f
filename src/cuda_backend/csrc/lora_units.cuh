// How grouped LoRA is cut: items of rows, units of work on them, stages of a unit, and the warp that
// makes out units. See lora_gemm.cuh for the whole.
#pragma once
#include "ptx.cuh"

#ifndef TRACE
#define TRACE(p, id)
#endif

namespace lora_jax {

struct alignas(16) Item {
  int slot, expert;
  int row_begin, num_rows;  // a range of the sorted order
};

// One of the linear maps of a launch; all have the same rows, x and pools.
struct Module {
  const int* entries;    // [slots, 5]: a_offset, b_offset, rank, a_stride, b_stride
  const float* scaling;  // [slots]
  __nv_bfloat16* y;      // [rows, d_out]
};
constexpr int kMaxModules = 4;
constexpr uint32_t kMissing = ~0u;  // no two bfloat16 numbers that arithmetic gives

struct PairArgs {
  CUtensorMap a_map, b_map;   // boxes of 8 rows x 128 columns, see pool_map
  Module modules[kMaxModules];
  const Item* items;
  const int* num_items;
  const int* row_order;       // sorted place -> row of x and y, see row_metadata.cuh
  const __nv_bfloat16* x;     // [rows, d_in]
  __nv_bfloat16* h;           // [modules, sorted rows, h_stride], of kMissing where the shrink is to come
  int* draws;                 // behind h, -1: number of the last unit drawn
  int num_modules, num_rows, num_slots;
  int d_in, d_out, h_stride, max_rank;
  bool shrink, expand;
#ifdef LORA_BENCH
  int knobs[6];
  long long* trace;
#endif
};

constexpr int kMaxRows = 32;   // rows of an item
constexpr int kMaxRank = 128;
constexpr int kBoxBytes = 2048;
constexpr int kBlock = 128;    // columns of a box
constexpr int kConsumers = 4;  // warps
constexpr int kRowWarps = 2;   // one alone issues about a row copy in 60 cycles
constexpr int kUnitWarp = kConsumers, kWeightWarp = kConsumers + 1, kRowWarp = kConsumers + 2;
constexpr int kThreads = (kConsumers + 2 + kRowWarps) * 32;
constexpr int kTickets = 4;  // made out ahead of their use
constexpr int kDraws = 2;    // tickets drawn at once: more would bind late units to busy CTAs

// ---------------------------------------------------------------- units and stages
enum Kind : int { kEnd, kShrink, kExpand };

// What every warp of a CTA needs to know of one unit.
struct Unit {
  Kind kind;
  int item, module;           // the item's number among those of all modules
  int weight_row;             // first rank row in the pool
  int groups;                 // 8-row groups of weights
  int rank, num_rows;
  int place;                  // of its first row in the sorted order
  int begin, end;             // columns of the pool
  int first_rank;             // shrink: of the unit
  float scaling;
};
struct Ticket {
  Unit unit;
  int rows[kMaxRows];
};

// A stage holds weights [box of 128 columns][group][2][8][64], then batch rows, 16 bytes longer
// than their data, so that lanes meet distinct banks.
__device__ __forceinline__ int row_stride(int width) { return width * 2 + 16; }
__device__ __forceinline__ uint32_t rows_at(const Unit& u, int width) {
  return (width + 127) / 128 * u.groups * kBoxBytes;
}

// Columns per stage: a multiple of 128, so that which warp adds which k never depends on it.
template <int STAGE>
__device__ __forceinline__ int stage_width(const Unit& u) {
  const int most = (STAGE - u.num_rows * 16) / (u.groups * 16 + u.num_rows * 2) / 128 * 128;
  const int columns = u.end - u.begin, stages = (columns + most - 1) / most;
  return (columns + stages * 128 - 1) / (stages * 128) * 128;
}

template <int NS>
struct Ring {
  int at = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next() {
    if (++at == NS) {
      at = 0;
      phase ^= 1;
    }
  }
};

template <int NS, int STAGE, int RANKS>
struct Shared {
  static constexpr int kStages = NS, kStage = STAGE, kSteps = RANKS / 16;
  static_assert(STAGE % 1024 == 0, "the copy engine's swizzle repeats every 1024 bytes");
  static_assert(RANKS * 256 + kMaxRows * 272 <= STAGE, "128 columns of everything must fit a stage");
  alignas(1024) unsigned char stages[NS][STAGE];
  Ticket tickets[kTickets];
  alignas(8) uint64_t full[NS], empty[NS], ticket_full[kTickets], ticket_empty[kTickets];
};

// Every warp but the unit warp learns a unit here, and lets the slot go when it is done.
template <class S>
__device__ __forceinline__ const Ticket& take(S& sm, const Ring<kTickets>& ring) {
  mbar_wait(&sm.ticket_full[ring.at], ring.phase);
  return sm.tickets[ring.at];
}
template <class S>
__device__ __forceinline__ void let_go(S& sm, Ring<kTickets>& ring) {
  __syncwarp();
  if ((threadIdx.x & 31) == 0) mbar_arrive(&sm.ticket_empty[ring.at]);
  ring.next();
}

// ---------------------------------------------------------------- the plan of a launch
struct Share {  // of an item: rank rows [begin, end) of a shrink unit, or blocks of columns
  Kind kind;
  int item, begin, end;
};

// Cuts the launch into shrink units, which CTAs have in turn; runs of blocks of the expand, as long
// as evens out what CTAs read; and units of blocks that CTAs draw when they are through with their
// own, because rows and ranks of items differ. Small launches have no time to draw. No result
// depends on the plan, so it may follow the number of items.
struct Plan {
  int num_items, items;          // of one module, of all
  int ranks, item_units, units;  // of a shrink unit at least; shrink units of an item, of all
  int blocks, first, last;       // of an item; this CTA's run, counted through all items
  int run_items;                 // items whose blocks lie in runs
  int tile, item_tiles, draws;   // blocks of a drawn unit, drawn units of an item, of all

  __device__ Plan(const PairArgs& p, int num_items) : num_items(num_items), items(num_items * p.num_modules) {
    const int ranks8 = (p.max_rank + 7) / 8 * 8;
    cut_shrink(p, ranks8);
    cut_expand(p, ranks8);
    const float cost = static_cast<float>(ranks) * p.d_in / (ranks8 * kBlock);  // of a shrink unit, in blocks
    first = run_begin(blockIdx.x, cost), last = run_begin(blockIdx.x + 1, cost);
  }
  __device__ __forceinline__ void cut_shrink(const PairArgs& p, int ranks8) {
    const int ctas = static_cast<int>(gridDim.x);
#ifdef LORA_BENCH
    const int rounds = p.expand ? p.knobs[4] : p.knobs[0];
#else
    const int rounds = p.expand ? 1 : 4;
#endif
    ranks = 8;
    while (ranks < 32 && items * ((ranks8 + ranks * 2 - 1) / (ranks * 2)) >= ctas * rounds) ranks *= 2;
    item_units = (ranks8 + ranks - 1) / ranks;
    units = p.shrink ? items * item_units : 0;
  }
  __device__ __forceinline__ void cut_expand(const PairArgs& p, int ranks8) {
#ifdef LORA_BENCH
    const int base = p.knobs[1], share = p.knobs[2], rounds = p.knobs[3];
#else
    const int base = 1024, share = 50, rounds = 6;
#endif
    const int ctas = static_cast<int>(gridDim.x);
    blocks = p.expand ? (p.d_out + kBlock - 1) / kBlock : 0;
    const int most = base / ranks8 * ctas, all = items * blocks;
    run_items = all <= most ? items : min(items, (most + static_cast<int>((all - most) * (share * 0.01f))) / blocks);
    tile = 1;
    while (tile * ranks8 <= 256 && (items - run_items) * blocks >= rounds * ctas * tile * 2) tile *= 2;
    item_tiles = (blocks + tile - 1) / tile;
    draws = (items - run_items) * item_tiles;
  }
  // CTAs below units % ctas have one more shrink unit than the others, and so fewer blocks.
  __device__ __forceinline__ int run_begin(int cta, float cost) const {
    const int ctas = static_cast<int>(gridDim.x), more = units % ctas, all = run_items * blocks;
    if (cta == ctas) return all;
    const float level = (all + more * cost) / ctas;
    const float few = max(level - cost, 0.f), many = level > cost ? level : static_cast<float>(all) / (ctas - more);
    return min(all, static_cast<int>(few * min(cta, more) + many * max(cta - more, 0)));
  }
  // Shrink units of this CTA, and with its run: one share an item.
  __device__ __forceinline__ int own_units() const {
    const int ctas = static_cast<int>(gridDim.x), cta = static_cast<int>(blockIdx.x);
    return max(units - cta + ctas - 1, 0) / ctas;
  }
  __device__ __forceinline__ int own() const {
    return own_units() + (last > first ? (last - 1) / blocks - first / blocks + 1 : 0);
  }
  __device__ __forceinline__ Share own_share(int n) const {
    const int shrinks = own_units();
    if (n < shrinks) {
      const int unit = n * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x), item = unit / item_units;
      return Share{kShrink, item, (unit - item * item_units) * ranks, (unit - item * item_units + 1) * ranks};
    }
    const int item = first / blocks + n - shrinks;
    return Share{kExpand, item, max(first - item * blocks, 0), min(last - item * blocks, blocks)};
  }
  __device__ __forceinline__ Share drawn_share(int n) const {
    const int item = n / item_tiles, begin = (n - item * item_tiles) * tile;
    return Share{kExpand, run_items + item, begin, min(begin + tile, blocks)};
  }
};

// ---------------------------------------------------------------- the unit warp
// What is on its way from memory of a share: its item and the item's slot in its module.
struct Site {
  Item item;
  int module, a_offset, b_offset, rank, a_stride, b_stride;
  float scaling;
};
__device__ __forceinline__ Item load_item(const PairArgs& p, int item) {
  const int4 v = __ldg(reinterpret_cast<const int4*>(p.items) + item);
  return Item{v.x, v.y, v.z, v.w};
}
__device__ __forceinline__ Site load_site(const PairArgs& p, const Plan& plan, const Share& s, const Item* known) {
  Site site{};
  if (s.kind == kEnd) return site;
  site.module = s.item / plan.num_items;
  site.item = known ? *known : load_item(p, s.item - site.module * plan.num_items);
  const Module& m = p.modules[site.module];
  const int* e = m.entries + site.item.slot * 5;
  site.a_offset = __ldg(e), site.b_offset = __ldg(e + 1), site.rank = __ldg(e + 2);
  site.a_stride = __ldg(e + 3), site.b_stride = __ldg(e + 4);
  site.scaling = __ldg(m.scaling + site.item.slot);
  return site;
}

// Returns the share as a unit; kEnd when the item has no such part (a smaller rank than the largest).
__device__ __forceinline__ Unit make_unit(const PairArgs& p, const Plan& plan, const Share& s, const Site& site) {
  Unit u{};
  u.item = s.item, u.module = site.module, u.scaling = site.scaling;
  u.rank = min(site.rank, p.max_rank), u.num_rows = site.item.num_rows, u.place = site.item.row_begin;
  const int ranks = u.num_rows <= 16 ? plan.ranks : max(plan.ranks, 16);
  if (s.kind == kShrink) {
    u.first_rank = s.begin / plan.ranks * ranks;
    u.weight_row = site.a_offset + site.item.expert * site.a_stride + u.first_rank;
    u.groups = (min(ranks, u.rank - u.first_rank) + 7) / 8;
    u.end = p.d_in;
    if (u.first_rank < u.rank) u.kind = kShrink;
  } else if (s.kind == kExpand) {
    u.weight_row = site.b_offset + site.item.expert * site.b_stride;
    u.groups = (u.rank + 7) / 8;
    u.begin = s.begin * kBlock, u.end = min(s.end * kBlock, p.d_out);
    if (u.rank > 0) u.kind = kExpand;
  }
  return u;
}

template <class S>
__device__ __forceinline__ void publish(S& sm, Ring<kTickets>& ring, const Unit& mine, int from, int row) {
  const int lane = threadIdx.x & 31;
  mbar_wait(&sm.ticket_empty[ring.at], ring.phase ^ 1);
  Ticket& t = sm.tickets[ring.at];
  t.rows[lane] = row;
  if (lane == from) t.unit = mine;
  __syncwarp();
  if (lane == 0) mbar_arrive(&sm.ticket_full[ring.at]);
  ring.next();
}

// Makes out the units of `count` lanes at once, so that they cost the latencies of one.
template <class S>
__device__ __forceinline__ void publish_all(const PairArgs& p, S& sm, Ring<kTickets>& ring, const Plan& plan,
                                            const Share& share, int count, const Item* known = nullptr) {
  const int lane = threadIdx.x & 31;
  const Site site = load_site(p, plan, share, known);
  auto load_row = [&](int from) {
    const int rows = __shfl_sync(~0u, site.item.num_rows, from), place = __shfl_sync(~0u, site.item.row_begin, from);
    return from < count && lane < rows ? __ldg(p.row_order + place + lane) : 0;
  };
  int next_row = load_row(0);
  const Unit unit = make_unit(p, plan, share, site);
  for (int from = 0; from < count; ++from) {
    const int row = next_row;
    next_row = load_row(from + 1);
    if (__shfl_sync(~0u, static_cast<int>(unit.kind), from) != kEnd) publish(sm, ring, unit, from, row);
    TRACE(p, 1);
  }
}

// Brings this CTA's share of the tables into L2 while the number of items is on its way.
__device__ __forceinline__ void prefetch_tables(const PairArgs& p) {
  const int at = blockIdx.x * 128;
  if (at < p.num_rows * 16) prefetch_l2(reinterpret_cast<const char*>(p.items) + at);
  if (at < p.num_rows * 4) prefetch_l2(reinterpret_cast<const char*>(p.row_order) + at);
  for (int m = 0; m < p.num_modules; ++m) {
    if (at < p.num_slots * 20) prefetch_l2(reinterpret_cast<const char*>(p.modules[m].entries) + at);
    if (at < p.num_slots * 4) prefetch_l2(reinterpret_cast<const char*>(p.modules[m].scaling) + at);
  }
}

template <class S>
__device__ void hand_out(const PairArgs& p, S& sm) {
  const int lane = threadIdx.x & 31;
  if (lane == 0) prefetch_tables(p);
#ifdef SPECULATE
  const int guessed_units = ((p.max_rank + 7) / 8 + (1 << min(lane, 2)) - 1) >> min(lane, 2);
  Item guess = load_item(p, min(static_cast<int>(blockIdx.x) / guessed_units, p.num_rows - 1));
#endif
  const Plan plan(p, *p.num_items);
  Ring<kTickets> ring;
  const int own = plan.own();
  const Share none{kEnd, 0, 0, 0};
  int n = 0;
#ifdef SPECULATE
  if (plan.own_units() && static_cast<int>(blockIdx.x) / plan.item_units < plan.num_items) {
    const int at = plan.ranks >> 4;
    guess.slot = __shfl_sync(~0u, guess.slot, at), guess.expert = __shfl_sync(~0u, guess.expert, at);
    guess.row_begin = __shfl_sync(~0u, guess.row_begin, at), guess.num_rows = __shfl_sync(~0u, guess.num_rows, at);
    publish_all(p, sm, ring, plan, lane == 0 ? plan.own_share(0) : none, 1, &guess);
    n = 1;
  }
#endif
  for (; n < own; n += 32)
    publish_all(p, sm, ring, plan, n + lane < own ? plan.own_share(n + lane) : none, min(own - n, 32));
  if (plan.draws) wait_for_previous();
  while (plan.draws) {
    const int drawn = lane < kDraws ? atomicAdd(p.draws, 1) + 1 : plan.draws;
    const int count = __shfl_sync(~0u, drawn, 0) < plan.draws ? kDraws : 0;
    if (!count) break;
    publish_all(p, sm, ring, plan, drawn < plan.draws ? plan.drawn_share(drawn) : none, count);
  }
  publish(sm, ring, Unit{}, 0, 0);
}

}  // namespace lora_jax
