// Work division of grouped LoRA: items of rows, units of work on them, stages of a unit, and the assignment to
// warps. lora_gemm/items.cuh has the overview.
#pragma once
#include "device/ptx.cuh"

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
  const __nv_bfloat16* b_pool;  // what launches by groups read: see with_widths
  int d_out;
};
constexpr int kMaxModules = 4;
constexpr uint32_t kMissing = ~0u;  // no two bfloat16 numbers that arithmetic gives

// What one launch of a call leaves to the next one on a device; zeros before the first. So nothing has to be
// reset between them: two kernels less a layer of experts, a microsecond each. They must not overlap, and all
// have the same number of CTAs: each adds it to a count, if to any, which runs to twice that and then from zero.
struct alignas(16) CallState {
  uint32_t begun;    // CTAs that have begun
  uint32_t cleared;  // CTAs that have made their part of h missing
  int draws[2];      // units drawn, of every second launch; the others make it zero
  uint32_t shrunk;   // CTAs that have shrunk their tiles
};

struct PairArgs {
  CUtensorMap maps[2][2];     // of A and B: with narrow boxes and with wide ones, see pool_map
  int wide[2];                // log2 of the pieces of 64 columns in the wide ones
  const __nv_bfloat16* pools[2];  // A and B
  Module modules[kMaxModules];
  const Item* items;
  const int* num_items;
  const int* row_order;       // sorted place -> row of x and y, see adapter_items/row_metadata.cuh
  const __nv_bfloat16* x;     // [rows, d_in]
  __nv_bfloat16* h;           // [modules, sorted rows, h_stride]
  CallState* state;           // of the call
  int num_modules, num_rows, num_slots;
  int d_in, d_out, h_stride, max_rank;
  bool shrink, expand;
  bool small_items;           // of at most kFewItemRows rows each
  bool accumulate;            // the expand adds to y; else y holds nothing before
  bool zeros_if_idle;         // without accumulate: whether y becomes zeros where no row has an adapter, or stays
  const int* live;            // null, or how many rows have an adapter: then some are in tiles, not in items
};

constexpr int kMaxRows = 32;   // rows of an item
constexpr int kShrinkRows = 16;  // of a shrink unit, unless it has all of its item's: see shrink_rows
constexpr int kMaxRank = 128;
constexpr int kManyRows = 1024;  // from which on a launch asks first whether there are items
// Of the pieces of 64 columns in a box, log2: the narrowest, and the wide ones of either pool.
constexpr int kNarrow = 1, kWideA = 3, kWideB = 2;
constexpr int kBlock = 64 << kNarrow;  // columns by which the expand is cut
constexpr int kConsumers = 4;  // warps
constexpr int kRowWarps = 2;   // one alone issues about a row copy in 60 cycles
constexpr int kUnitWarp = kConsumers, kWeightWarp = kConsumers + 1, kRowWarp = kConsumers + 2;
constexpr int kThreads = (kConsumers + 2 + kRowWarps) * 32;
constexpr int kTickets = 3;    // made out ahead of their use: more would bind late units to busy CTAs
constexpr int kDraws = 2;      // units drawn at once
constexpr int kMostOfRun = 1 << 17, kLeastOfDraw = 1 << 14;  // elements of B in a CTA's run, in a drawn unit
constexpr int kMostOfTile = 8;  // blocks, unless there are many
constexpr int kStreams = 4;     // runs of items that units are drawn from in turn, where segments are long
constexpr int kWideItem = 64;   // blocks from which on that helps
constexpr int kDrawnRounds = 2;  // shrink units of a CTA from which on they are drawn
constexpr int kFineRounds = 1;   // of them: smaller ones of a CTA, behind all others
constexpr int kSmallStage = 26 << 10;  // bytes

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
constexpr int kHeldRows = 3;   // at most of an item whose h comes with the ticket
template <int RANKS>
struct Ticket {
  static constexpr int kWords = RANKS / 2, kLaneWords = (kHeldRows * kWords + 31) / 32;
  Unit unit;
  int rows[kMaxRows];
  uint32_t h[kLaneWords * 32];  // kMissing where it was not there yet, or not asked for
};

// The h of a unit of more rows, in pieces of 16 bytes, whose order differs by row so that lanes meet distinct
// banks.
template <int RANKS, int ROWS>
struct HeldRows {
  static constexpr int kChunks = RANKS / 8;  // of a row
  uint4 chunks[ROWS > 0 ? ROWS * kChunks : 1];
  static __device__ __forceinline__ int at(int row, int chunk) {
    return row * kChunks + (chunk ^ row * kChunks / 8 % kChunks);
  }
};

// A stage holds weights [boxes along columns][group][pieces of 64 columns][8][64], then batch rows,
// 16 bytes longer than their data, so that lanes meet distinct banks.
__device__ __forceinline__ int row_stride(int width) { return width * 2 + 16; }
__device__ __forceinline__ uint32_t rows_at(const Unit& u) { return u.width * u.groups * 16; }

// Stages are multiples of 128 columns, so that which warp adds which k never depends on them, and
// of the boxes, which are wide where that fits.
__device__ __forceinline__ unsigned columns_in(const Unit& u, int stage_bytes) {
  const unsigned of_column = max(u.groups * 16 + u.staged_rows * 2, 1);  // a rank of 0 without y has no bytes
  return (stage_bytes - u.staged_rows * 16) / of_column;
}
__device__ __forceinline__ void cut_stages(Unit& u, int stage_bytes, int wide) {
  const unsigned fit = columns_in(u, stage_bytes);
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
  __device__ __forceinline__ Ring before() const {
    Ring last;
    last.state = at() ? state - 1 : ((state & 16) ^ 16) + NS - 1;
    return last;
  }
  __device__ __forceinline__ void next() { state = at() + 1 == NS ? (state & 16) ^ 16 : state + 1; }
};

template <int NS, int STAGE, int RANKS>
struct Shared {
  static constexpr int kStages = NS, kStage = STAGE, kSteps = RANKS / 16;
  static constexpr int kTickets = lora_jax::kTickets, kRowWarps = lora_jax::kRowWarps;
  static constexpr bool kTellsAsked = true;
  static constexpr bool kBringsH = RANKS <= 64;  // else it takes room that stages need
  static_assert(STAGE % 1024 == 0, "the copy engine's swizzle repeats every 1024 bytes");
  static_assert(RANKS * 256 + kMaxRows * 272 <= STAGE, "128 columns of everything must fit a stage");
  alignas(1024) unsigned char stages[NS][STAGE];
  using Ticket = lora_jax::Ticket<RANKS>;
  Ticket tickets[kTickets];
  using Held = HeldRows<RANKS, kBringsH ? kMaxRows : 0>;
  Held held;
  alignas(8) uint64_t full[NS], empty[NS], ticket_full[kTickets], ticket_empty[kTickets];
  uint64_t asked[kTickets];  // for almost all of a unit's weights
  uint64_t cleared;  // h by all CTAs
  uint64_t h_full, h_empty;  // what is held
  int tiles;  // how many there are, for lora_gemm/prefill_with_items.cuh: the items leave no register
};

// Every warp but the unit warp learns a unit here, and lets the slot go when it is done.
template <class S>
__device__ __forceinline__ const typename S::Ticket& take(S& sm, const Ring<S::kTickets>& ring) {
  mbar_wait(&sm.ticket_full[ring.at()], ring.phase());
  return sm.tickets[ring.at()];
}
template <class S>
__device__ __forceinline__ void let_go(S& sm, Ring<S::kTickets>& ring) {
  __syncwarp();
  if ((threadIdx.x & 31) == 0) mbar_arrive(&sm.ticket_empty[ring.at()]);
  ring.next();
}

// By a warp: makes the rows of places [begin, end) zero in all modules, every `step`-th of them. Lanes look up the
// rows of some places together, so that stores do not wait for them one by one.
__device__ __forceinline__ void zero_rows(const PairArgs& p, int begin, int end, int step) {
  const int lane = static_cast<int>(threadIdx.x & 31);
  for (int place = begin; place < end; place += step * 32) {
    const int mine = place + lane * step, count = min(32, (end - place + step - 1) / step);
    const int looked_up = mine < end ? __ldg(p.row_order + mine) : 0;
    for (int n = 0; n < count; ++n) {
      const int64_t row = __shfl_sync(~0u, looked_up, n);
      for (int m = 0; m < p.num_modules; ++m) {
        auto* y = reinterpret_cast<uint4*>(p.modules[m].y + row * p.d_out);
        for (int c = lane; c < p.d_out / 8; c += 32) y[c] = make_uint4(0, 0, 0, 0);
      }
    }
  }
}

// Zeros for rows of no item, by warps of all CTAs, which share out those behind the last item, and the items,
// before each of which there may be some; or several warps share a gap, since few items leave long ones. Where items
// leave many rows, all warps of a CTA store zeros when they are through with its units; else its row warps, which are
// through first. Items of low ranks are smaller: see rows_per_item in lora_gemm.py.
__device__ __forceinline__ void zero_gaps(const PairArgs& p) {
  const int num_items = *p.num_items;
  if (!p.zeros_if_idle && (p.live ? *p.live : num_items) == 0) return;
  const bool many = num_items * (p.max_rank > 16 ? kMaxRows : kMaxRows / 2) <= p.num_rows / 4 * 3;
  const int of_cta = many ? kThreads / 32 : kRowWarps, nth = static_cast<int>(threadIdx.x / 32) - (many ? 0 : kRowWarp);
  if (nth < 0) return;
  const int warps = static_cast<int>(gridDim.x) * of_cta, warp = static_cast<int>(blockIdx.x) * of_cta + nth;
  auto end_of = [&](int i) {
    const int4 v = __ldg(reinterpret_cast<const int4*>(p.items) + max(i, 0));
    return i < 0 ? 0 : v.z + v.w;
  };
  if (p.live) return zero_rows(p, *p.live + warp, p.num_rows, warps);  // rows in tiles are in no item
  zero_rows(p, end_of(num_items - 1) + warp, p.num_rows, warps);
  const int sharers = max(1, warps / max(1, num_items));  // of a gap
  for (int i = warp / sharers; i < num_items; i += warps / sharers)
    zero_rows(p, end_of(i - 1) + warp % sharers, __ldg(&p.items[i].row_begin), sharers);
}

// ---------------------------------------------------------------- launches of one call
// By a thread of each CTA: how many have begun in this launch, and before that in the one before if this one
// is a second one, `odd`.
__device__ __forceinline__ uint32_t count_begun(const PairArgs& p) {
  return atomicInc(&p.state->begun, 2 * gridDim.x - 1);
}
__device__ __forceinline__ bool is_odd(uint32_t begun) { return begun >= gridDim.x; }

// By a warp: makes this CTA's part of h missing, and then says so.
__device__ __forceinline__ void clear_h(const PairArgs& p) {
  const int lane = threadIdx.x & 31, words = p.num_modules * p.num_rows * (p.h_stride / 8);  // of 16 bytes
  const uint4 missing = make_uint4(kMissing, kMissing, kMissing, kMissing);
  for (int i = blockIdx.x * 32 + lane; i < words; i += gridDim.x * 32) reinterpret_cast<uint4*>(p.h)[i] = missing;
  __syncwarp();
  if (lane == 0) release_count(&p.state->cleared, 2 * gridDim.x - 1);
}
// By a warp: waits until all CTAs have done that, and tells the others of its own, who wait for `cleared`.
__device__ __forceinline__ void await_clear(const PairArgs& p, bool odd, uint64_t* cleared) {
  while ((acquire_word(&p.state->cleared) >= gridDim.x) == odd) {}
  __syncwarp();
  if ((threadIdx.x & 31) == 0) mbar_arrive(cleared);
}

// ---------------------------------------------------------------- the plan of a launch
struct Share {  // of an item: rank rows [begin, end) of a slice, or blocks of columns
  Kind kind;
  int item, begin, end;
  int slice;
};
constexpr Share kNothing{kEnd, 0, 0, 0, 0};

__device__ __forceinline__ unsigned divide(unsigned n, unsigned by) { return n / by; }
__device__ __forceinline__ unsigned divide_up(unsigned n, unsigned by) { return (n + by - 1) / by; }

// Of so few units it counts how soon they begin and end.
__device__ __forceinline__ bool few_units(int units) { return units <= 2 * static_cast<int>(gridDim.x); }

// Ways to cut the shrink of an item: into units of 8, 16 or 32 rank rows.
constexpr int kCuts = 3;
__device__ __forceinline__ int item_units(const PairArgs& p, int cut) {
  return ((p.max_rank + 7) / 8 + (1 << cut) - 1) >> cut;
}
// Returns the way to cut, by what was fastest on an H200. Coarse units where there are many or d_in is
// small; fine ones where CTAs are idle otherwise, unless they read long segments' x once more.
__device__ __forceinline__ int choose_cut(const PairArgs& p, int num_items) {
  auto units_of_cta = [&](int cut) {
    return __fdividef(static_cast<float>(num_items * p.num_modules * item_units(p, cut)), static_cast<float>(gridDim.x));
  };
  if (units_of_cta(2) >= 2.f || p.d_in < 2048) return 2;
  return units_of_cta(0) <= .75f && p.num_rows <= 8 * num_items ? 0 : 1;
}

// Returns how many rows a shrink unit may have, of kernels whose units have MOST where they are drawn: then SMs read
// long segments' weights once for all of an item, and L2 gives them no more than it can (1024 rows of 194 adapters
// of rank 64, Zipf, on an H200: 30.9 us, by 16 rows 33.0). Fewer units would leave CTAs waiting for such ones.
template <int MOST>
__device__ __forceinline__ int shrink_rows(const PairArgs& p, int units) {
  return !p.expand && units >= kDrawnRounds * static_cast<int>(gridDim.x) ? MOST : kShrinkRows;
}

// Cuts the launch into shrink units, which CTAs have in turn, or draw where they are many and all there is to
// do, and blocks of columns of the expand. Of a small launch, which has no time to draw units, each CTA has
// one run of blocks. Of a large one CTAs draw units when they are through with their own, because rows and
// ranks of items differ. No result depends on the plan, so it may follow the number of items.
template <int MOST_ROWS>
struct Plan {
  static constexpr bool kFine = MOST_ROWS > kShrinkRows;  // units that are drawn are smaller at last
  int num_items, items;          // of one module, of all
  int ranks, item_units, units;  // of a shrink unit at least; shrink units of an item, of all
  int unit_rows;                 // of a shrink unit at most
  int coarse, fine_ranks, fine_units;  // items cut like that; of those behind them: ranks of a unit, units of an item
  int own_units;                 // of this CTA
  int shrink_draws;              // units of a shrink that are drawn
  int blocks, first, last;       // of an item; this CTA's run, counted through all items
  int tile, item_tiles, draws;   // blocks of a drawn unit; drawn units of an item, of all
  int streams, stream_items;     // runs of items that units are drawn from in turn; items of a run
  int first_item;                // of a run, to be drawn

  __device__ __forceinline__ Plan(const PairArgs& p, int num_items, int cut)
      : num_items(num_items), items(num_items * p.num_modules) {
    const int ctas = static_cast<int>(gridDim.x), cta = static_cast<int>(blockIdx.x);
    const int block = (p.max_rank + 7) / 8 * 8 * kBlock;  // elements
    ranks = 8 << cut, item_units = lora_jax::item_units(p, cut);
    units = p.shrink ? items * item_units : 0;
    unit_rows = shrink_rows<MOST_ROWS>(p, units);
    own_units = divide_up(units, ctas) * slices();
    // Of a shrink alone CTAs have their first unit and second slices, and draw the others: what an SM gets of the
    // memory's bandwidth differs by a third, and long segments' units take longer.
    shrink_draws = !p.expand && units >= kDrawnRounds * ctas ? units - ctas : 0;
    if constexpr (kFine) cut_fine(p, cut);
    if (shrink_draws) own_units = 1 + (slices() - 1) * divide_up(units, ctas);
    blocks = p.expand ? divide_up(p.d_out, kBlock) : 0;
    const int all = items * blocks, runs = all <= static_cast<int>(divide(kMostOfRun, block)) * ctas ? all : 0;
    const bool apart = items * 4 <= ctas;  // else longer runs are on more items, each of which costs a unit
    const float cost = apart ? __fdividef(static_cast<float>(ranks) * p.d_in, block) : 0.f;  // of a shrink unit, in blocks
    first = run_begin(cta, runs, cost), last = run_begin(cta + 1, runs, cost);
    const bool long_segments = p.num_rows >= 3 * num_items && p.max_rank > 16 && blocks >= kWideItem;
    cut_draws(block, all - runs, long_segments ? kStreams : 1);
    // Long segments stand at an end where slots are in the order of their use. Their h is the last to come,
    // and they take a CTA the longest: so after a shrink, runs begin with their last quarter.
    first_item = p.shrink ? stream_items * 3 / 4 : 0;
  }
  // The last units are half as large, so that CTAs end at about the same time (as above: 30.9 us, else 31.6).
  __device__ __forceinline__ void cut_fine(const PairArgs& p, int cut) {
    const int ctas = static_cast<int>(gridDim.x), finer = max(cut - 1, 0);
    coarse = items, fine_ranks = 8 << finer, fine_units = lora_jax::item_units(p, finer);
    if (shrink_draws == 0) return;
    const int behind = items - divide_up(ctas, item_units), wanted = divide(kFineRounds * ctas, fine_units);
    coarse -= min(behind, wanted), units += (items - coarse) * (fine_units - item_units), shrink_draws = units - ctas;
  }
  // Of an item, at most.
  __device__ __forceinline__ int slices() const { return kFine && unit_rows == kMaxRows ? 1 : kMaxRows / kShrinkRows; }
  // Units are small enough for each CTA to draw some dozen, but not so small that drawing takes longer.
  // Those of long segments, which stand side by side, ask more of a CTA and less of memory than others: so
  // they are drawn in turn with others (1024 rows of 194 adapters of rank 64, Zipf, on an H200: 109.1 us,
  // from one run of items 111.8). Where segments are short or d_out is small that costs up to a microsecond.
  __device__ __forceinline__ void cut_draws(int block, int left, int runs) {
    const int ctas = static_cast<int>(gridDim.x);
    tile = max(1, min(kMostOfTile, static_cast<int>(divide(kLeastOfDraw, block))));
    while (tile * block <= kLeastOfDraw * 2 && left >= 12 * ctas * tile * 2) tile *= 2;
    if (blocks * block <= kLeastOfDraw * 2) tile = max(blocks, 1);
    item_tiles = divide_up(blocks, tile);
    streams = runs, stream_items = divide_up(items, streams);
    draws = left ? stream_items * streams * item_tiles : 0;
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
    if (n < own_units) return shrink_share(n);
    const int item = divide(first, blocks) + n - own_units;
    return Share{kExpand, item, max(first - item * blocks, 0), min(last - item * blocks, blocks), 0};
  }
  // CTAs take units in turn, and second slices, if any, from the other end of the grid: so those of a long
  // segment meet no first ones of such, but come at the same time, while L2 holds its weights.
  __device__ __forceinline__ Share shrink_share(int n) const {
    const int ctas = static_cast<int>(gridDim.x);
    const int slice = shrink_draws ? n > 0 : n % slices(), round = shrink_draws ? max(n - 1, 0) : divide(n, slices());
    return shrink_of(round * ctas + (slice ? ctas - 1 - static_cast<int>(blockIdx.x) : static_cast<int>(blockIdx.x)), slice);
  }
  __device__ __forceinline__ Share shrink_of(int unit, int slice) const {
    if (unit >= units) return kNothing;
    if constexpr (kFine) {
      if (const int past = unit - coarse * item_units; past >= 0) {
        const int nth = divide(past, fine_units), begin = (past - nth * fine_units) * fine_ranks;
        return Share{kShrink, coarse + nth, begin, begin + fine_ranks, slice};
      }
    }
    const int item = divide(unit, item_units), begin = (unit - item * item_units) * ranks;
    return Share{kShrink, item, begin, begin + ranks, slice};
  }
  __device__ __forceinline__ Share drawn_share(int n) const {
    if (n >= draws) return kNothing;
    const int turn = divide(n, streams), nth = divide(turn, item_tiles), begin = (turn - nth * item_tiles) * tile;
    const int at = first_item + nth, wraps = at >= stream_items ? stream_items : 0;
    const int item = (n - turn * streams) * stream_items + at - wraps;
    return item < items ? Share{kExpand, item, begin, min(begin + tile, blocks), 0} : kNothing;
  }
};

}  // namespace lora_jax
