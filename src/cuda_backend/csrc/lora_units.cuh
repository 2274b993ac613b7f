// How grouped LoRA is cut: items of rows, units of work on them, stages of a unit, and the warp that
// makes out units. See lora_gemm.cuh for the whole.
#pragma once
#include "ptx.cuh"

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
  CUtensorMap maps[2][2];     // of A and B: with narrow boxes and with wide ones, see pool_map
  int wide[2];                // log2 of the pieces of 64 columns in the wide ones
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
  bool accumulate;            // the expand adds to y; else y holds nothing before
  bool wide_sums;             // where nothing is added to, y is float32
  bool leave_gaps;            // and rows of no item stay undefined
};

constexpr int kMaxRows = 32;   // rows of an item
constexpr int kMaxRank = 128;
// Of the pieces of 64 columns in a box, log2: the narrowest, and the wide ones of either pool.
constexpr int kNarrow = 1, kWideA = 3, kWideB = 2;
constexpr int kConsumers = 4;  // warps
constexpr int kRowWarps = 2;   // one alone issues about a row copy in 60 cycles
constexpr int kUnitWarp = kConsumers, kWeightWarp = kConsumers + 1, kRowWarp = kConsumers + 2;
constexpr int kThreads = (kConsumers + 2 + kRowWarps) * 32;
constexpr int kTickets = 3;    // made out ahead of their use: more would bind late units to busy CTAs
constexpr int kDraws = 2;      // units drawn at once
constexpr int kMostOfRun = 1 << 17, kLeastOfDraw = 1 << 14;  // elements of B in a CTA's run, in a drawn unit

// ---------------------------------------------------------------- units and stages
enum Kind : int { kEnd, kShrink, kExpand };

// What every warp of a CTA needs to know of one unit.
struct Unit {
  Kind kind;
  int item, module;           // the item's number among those of all modules
  int weight_row;             // first rank row in the pool
  int groups;                 // 8-row groups of weights
  int rank, num_rows;
  int staged_rows;            // rows that come with the weights: of x, or of y where the expand adds to it
  int place;                  // of its first row in the sorted order
  int begin, end;             // columns of the pool
  int wide, width;            // log2 of the pieces of 64 columns in a box; columns of a stage
  int first_rank;             // shrink: of the unit
  float scaling;
};
struct Ticket {
  Unit unit;
  int rows[kMaxRows];
};

// A stage holds weights [boxes along columns][group][pieces of 64 columns][8][64], then batch rows,
// 16 bytes longer than their data, so that lanes meet distinct banks.
__device__ __forceinline__ int row_stride(int width) { return width * 2 + 16; }
__device__ __forceinline__ uint32_t rows_at(const Unit& u) { return u.width * u.groups * 16; }

// Stages are multiples of 128 columns, so that which warp adds which k never depends on them, and
// of the boxes, which are wide where that fits.
__device__ __forceinline__ void cut_stages(Unit& u, int stage_bytes, int wide) {
  const unsigned of_column = max(u.groups * 16 + u.staged_rows * 2, 1);  // a rank of 0 without y has no bytes
  const unsigned fit = (stage_bytes - u.staged_rows * 16) / of_column;
  u.wide = fit >> (wide + 6) ? wide : kNarrow;
  const unsigned boxes = (u.end - u.begin + (64 << u.wide) - 1) >> (u.wide + 6), most = fit >> (u.wide + 6);
  const unsigned stages = (boxes + most - 1) / most;
  u.width = (boxes + stages - 1) / stages << (u.wide + 6);
}

// Where in a ring of NS slots one is, and the parity of the round, in one register.
template <int NS>
struct Ring {
  uint32_t state = 0;
  __device__ __forceinline__ int at() const { return state & 15; }
  __device__ __forceinline__ uint32_t phase() const { return state >> 4; }
  __device__ __forceinline__ void next() { state = at() + 1 == NS ? (state & 16) ^ 16 : state + 1; }
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
  mbar_wait(&sm.ticket_full[ring.at()], ring.phase());
  return sm.tickets[ring.at()];
}
template <class S>
__device__ __forceinline__ void let_go(S& sm, Ring<kTickets>& ring) {
  __syncwarp();
  if ((threadIdx.x & 31) == 0) mbar_arrive(&sm.ticket_empty[ring.at()]);
  ring.next();
}

// ---------------------------------------------------------------- the plan of a launch
struct Share {  // of an item: rank rows [begin, end) of a shrink unit, or blocks of columns
  Kind kind;
  int item, begin, end;
};
constexpr Share kNothing{kEnd, 0, 0, 0};

__device__ __forceinline__ unsigned divide(unsigned n, unsigned by) { return n / by; }
__device__ __forceinline__ unsigned divide_up(unsigned n, unsigned by) { return (n + by - 1) / by; }

// Ways to cut the shrink of an item: into units of 8, 16 or 32 rank rows.
constexpr int kCuts = 3;
__device__ __forceinline__ int item_units(const PairArgs& p, int cut) {
  return ((p.max_rank + 7) / 8 + (1 << cut) - 1) >> cut;
}
// Returns the cut by which the CTA with the most units is through first, by lanes 0 to kCuts - 1. What
// a unit costs besides its weights is about as much as 8 more rank rows.
__device__ __forceinline__ int best_cut(const PairArgs& p, int items) {
  const int cut = min(static_cast<int>(threadIdx.x & 31), kCuts - 1);
  const int longest = divide_up(items * item_units(p, cut), gridDim.x) * ((8 << cut) + 8);
  int best = 0;
#pragma unroll
  for (int c = 1; c < kCuts; ++c)
    if (__shfl_sync(~0u, longest, c) <= __shfl_sync(~0u, longest, best)) best = c;
  return best;
}

// Cuts the launch into shrink units, which CTAs have in turn, and blocks of columns of the expand. Of
// a small launch, which has no time to draw units, each CTA has one run of blocks, as long as evens
// out what CTAs read. Of a large one CTAs draw units when they are through with their own, because
// rows and ranks of items differ. No result depends on the plan, so it may follow the number of items.
struct Plan {
  int num_items, items;          // of one module, of all
  int ranks, item_units, units;  // of a shrink unit at least; shrink units of an item, of all
  int own_units;                 // of this CTA
  int blocks, first, last;       // of an item; this CTA's run, counted through all items
  int tile, item_tiles, draws;   // blocks of a drawn unit; drawn units of an item, of all

  __device__ __forceinline__ Plan(const PairArgs& p, int num_items, int cut)
      : num_items(num_items), items(num_items * p.num_modules) {
    const int ctas = static_cast<int>(gridDim.x), cta = static_cast<int>(blockIdx.x);
    const int wide = p.wide[1] + 6, block = (p.max_rank + 7) / 8 * 8 << wide;  // elements
    ranks = 8 << cut, item_units = lora_jax::item_units(p, cut);
    units = p.shrink ? items * item_units : 0;
    own_units = divide(max(units - cta + ctas - 1, 0), ctas);
    blocks = p.expand ? (p.d_out + (1 << wide) - 1) >> wide : 0;
    const int all = items * blocks, runs = all <= static_cast<int>(divide(kMostOfRun, block)) * ctas ? all : 0;
    const float cost = __fdividef(static_cast<float>(ranks) * p.d_in, block);  // of a shrink unit, in blocks
    first = run_begin(cta, runs, cost), last = run_begin(cta + 1, runs, cost);
    cut_draws(block, all - runs);
  }
  // Units are small enough for each CTA to draw some dozen, but not so small that drawing takes longer.
  __device__ __forceinline__ void cut_draws(int block, int left) {
    const int ctas = static_cast<int>(gridDim.x);
    tile = max(1, min(4, static_cast<int>(divide(kLeastOfDraw, block))));
    while (tile * block <= kLeastOfDraw * 2 && left >= 12 * ctas * tile * 2) tile *= 2;
    item_tiles = divide_up(blocks, tile);
    draws = left ? items * item_tiles : 0;
  }
  // CTAs below units % ctas have one more shrink unit than the others, and so fewer blocks.
  __device__ __forceinline__ int run_begin(int cta, int all, float cost) const {
    const int ctas = static_cast<int>(gridDim.x), more = units % gridDim.x;
    if (cta == ctas) return all;
    const float level = __fdividef(all + more * cost, ctas);
    const float few = max(level - cost, 0.f), many = level > cost ? level : __fdividef(all, ctas - more);
    return min(all, static_cast<int>(few * min(cta, more) + many * max(cta - more, 0)));
  }
  // Shrink units of this CTA, and with its run: one share an item.
  __device__ __forceinline__ int own() const {
    return own_units + (last > first ? divide(last - 1, blocks) - divide(first, blocks) + 1 : 0);
  }
  __device__ __forceinline__ Share own_share(int n) const {
    if (n < own_units) return shrink_share(n * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x));
    const int item = divide(first, blocks) + n - own_units;
    return Share{kExpand, item, max(first - item * blocks, 0), min(last - item * blocks, blocks)};
  }
  __device__ __forceinline__ Share shrink_share(int unit) const {
    const int item = divide(unit, item_units), begin = (unit - item * item_units) * ranks;
    return Share{kShrink, item, begin, begin + ranks};
  }
  __device__ __forceinline__ Share drawn_share(int n) const {
    if (n >= draws) return kNothing;
    const int item = divide(n, item_tiles), begin = (n - item * item_tiles) * tile;
    return Share{kExpand, item, begin, min(begin + tile, blocks)};
  }
};

// ---------------------------------------------------------------- the unit warp
// What is on its way from memory of a share: its item and the item's slot in its module.
struct Site {
  int module;
  Item item;
  int a_offset, b_offset, rank, a_stride, b_stride;
  float scaling;
};
// Items past the last hold anything: what is read by them is not used, but must be there.
__device__ __forceinline__ void load_item(const PairArgs& p, Site& site, int item) {
  const int4 v = __ldg(reinterpret_cast<const int4*>(p.items) + min(item, p.num_rows - 1));
  site.item = Item{static_cast<int>(min(static_cast<unsigned>(v.x), p.num_slots - 1u)), v.y, v.z, v.w};
}
__device__ __forceinline__ void load_slot(const PairArgs& p, Site& site) {
  const Module& m = p.modules[site.module];
  const int* e = m.entries + site.item.slot * 5;
  site.a_offset = __ldg(e), site.b_offset = __ldg(e + 1), site.rank = __ldg(e + 2);
  site.a_stride = __ldg(e + 3), site.b_stride = __ldg(e + 4);
  site.scaling = __ldg(m.scaling + site.item.slot);
}
// Returns what each lane knows of the rows of lane `from`: the place of one of them.
__device__ __forceinline__ int load_row(const PairArgs& p, const Site& site, int from) {
  const int place = __shfl_sync(~0u, site.item.row_begin, from) + static_cast<int>(threadIdx.x & 31);
  return __ldg(p.row_order + min(static_cast<unsigned>(place), p.num_rows - 1u));
}

// Returns the share as a unit; kEnd when the item has no such part (a smaller rank than the largest).
__device__ __forceinline__ Unit make_unit(const PairArgs& p, const Share& s, const Site& site, int stage_bytes) {
  Unit u{};
  u.item = s.item, u.module = site.module, u.scaling = site.scaling;
  u.rank = min(site.rank, p.max_rank), u.num_rows = site.item.num_rows, u.place = site.item.row_begin;
  u.staged_rows = s.kind == kShrink || p.accumulate ? u.num_rows : 0;
  if (s.kind == kShrink) {
    const bool twice = u.num_rows > 16 && s.end - s.begin == 8;  // which halves what is read of x
    const int ranks = twice ? 16 : s.end - s.begin;
    u.first_rank = twice ? s.begin * 2 : s.begin;
    u.weight_row = site.a_offset + site.item.expert * site.a_stride + u.first_rank;
    u.groups = (min(ranks, u.rank - u.first_rank) + 7) / 8;
    u.end = p.d_in;
    if (u.first_rank < u.rank) u.kind = kShrink;
  } else if (s.kind == kExpand) {
    u.weight_row = site.b_offset + site.item.expert * site.b_stride;
    u.groups = (u.rank + 7) / 8;
    u.begin = s.begin << (p.wide[1] + 6), u.end = min(s.end << (p.wide[1] + 6), p.d_out);
    if (u.rank > 0 || !p.accumulate) u.kind = kExpand;
  }
  if (u.kind != kEnd) cut_stages(u, stage_bytes, p.wide[u.kind - kShrink]);
  return u;
}

template <class S>
__device__ __forceinline__ void publish(S& sm, Ring<kTickets>& ring, const Unit& mine, int from, int row) {
  const int lane = threadIdx.x & 31;
  if (__shfl_sync(~0u, static_cast<int>(mine.kind), from) == kEnd) return;
  mbar_wait(&sm.ticket_empty[ring.at()], ring.phase() ^ 1);
  Ticket& t = sm.tickets[ring.at()];
  t.rows[lane] = row;
  if (lane == from) t.unit = mine;
  __syncwarp();
  if (lane == 0) mbar_arrive(&sm.ticket_full[ring.at()]);
  ring.next();
}

// Publishes the first shrink unit of this CTA, for which all that is on the way from memory is asked
// for by lanes 0 to kCuts - 1, one for each way to cut, while the number of items is on its way too.
// Returns whether there was such a unit.
template <class S>
__device__ __forceinline__ bool publish_first(const PairArgs& p, S& sm, Ring<kTickets>& ring, const int* count,
                                              int& num_items, int& cut) {
  const int lane = threadIdx.x & 31, guess = min(lane, kCuts - 1), units = item_units(p, guess);
  Site site{};
  Share share{kShrink, static_cast<int>(divide(blockIdx.x, units)), 0, 0};
  num_items = *count;
  load_item(p, site, share.item);
  load_slot(p, site);
  int rows[kCuts];
#pragma unroll
  for (int c = 0; c < kCuts; ++c) rows[c] = load_row(p, site, c);
  share.begin = (blockIdx.x - share.item * units) * (8 << guess), share.end = share.begin + (8 << guess);
  cut = best_cut(p, num_items * p.num_modules);
  const bool there = p.shrink && __shfl_sync(~0u, share.item, cut) < num_items;
  if (there) {
    const Unit unit = make_unit(p, share, site, S::kStage);
    publish(sm, ring, unit, cut, cut == 0 ? rows[0] : cut == 1 ? rows[1] : rows[2]);
  }
  return there;
}

// Makes out the units of `count` lanes at once, so that they cost the latencies of one.
template <class S>
__device__ __forceinline__ void publish_all(const PairArgs& p, S& sm, Ring<kTickets>& ring, const Share& share,
                                            Site& site, int count) {
  load_slot(p, site);
  int next_row = load_row(p, site, 0);
  const Unit unit = make_unit(p, share, site, S::kStage);
  for (int from = 0; from < count; ++from) {
    const int row = next_row;
    next_row = load_row(p, site, from + 1);
    publish(sm, ring, unit, from, row);
  }
}
__device__ __forceinline__ Site find_item(const PairArgs& p, const Plan& plan, const Share& share) {
  Site site{};
  site.module = divide(share.item, plan.num_items);
  load_item(p, site, share.item - site.module * plan.num_items);
  return site;
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

// Draws units ahead of their use: while two are waiting to be taken, the numbers of the next two are
// on their way.
template <class S>
__device__ __forceinline__ void hand_out_draws(const PairArgs& p, S& sm, Ring<kTickets>& ring, const Plan& plan) {
  const int lane = threadIdx.x & 31;
  auto draw = [&] { return lane < kDraws ? atomicAdd(p.draws, 1) + 1 : plan.draws; };
  wait_for_previous();
  int drawn = draw();
  while (__shfl_sync(~0u, drawn, 0) < plan.draws) {
    const Share share = plan.drawn_share(drawn);
    Site site = find_item(p, plan, share);
    drawn = draw();
    publish_all(p, sm, ring, share, site, kDraws);
  }
}

template <class S>
__device__ void hand_out(const PairArgs& p, S& sm) {
  const int lane = threadIdx.x & 31;
  if (lane == 0) prefetch_tables(p);
  Ring<kTickets> ring;
  int num_items, cut;
  const bool begun = publish_first(p, sm, ring, p.num_items, num_items, cut);
  if (num_items > 0) {
    const Plan plan(p, num_items, cut);
    const int own = plan.own();
    for (int n = begun ? 1 : 0; n < own; n += 32) {
      const Share share = n + lane < own ? plan.own_share(n + lane) : kNothing;
      Site site = find_item(p, plan, share);
      publish_all(p, sm, ring, share, site, min(own - n, 32));
    }
    if (plan.draws) hand_out_draws(p, sm, ring, plan);
  }
  wait_for_previous();  // even without a unit: what runs after this kernel must not meet the one before
  mbar_wait(&sm.ticket_empty[ring.at()], ring.phase() ^ 1);
  if (lane == 0) {
    sm.tickets[ring.at()].unit.kind = kEnd;
    mbar_arrive(&sm.ticket_full[ring.at()]);
  }
}

}  // namespace lora_jax
