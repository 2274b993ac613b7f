// How grouped LoRA is cut: items of rows, units of work on them, stages of a unit, and the warp that
// draws units by tickets. See lora_gemm.cuh for the whole.
#pragma once
#include "ptx.cuh"

namespace lora_jax {

struct alignas(16) Item {
  int slot, expert;
  int row_begin, num_rows;  // a range of the sorted order
};

struct PairArgs {
  CUtensorMap a_map, b_map;   // boxes of 8 rows x 128 columns, see pool_map
  const Item* items;
  const int* num_items;
  const int* row_order;       // sorted place -> row of x and y, see row_metadata.cuh
  const int* entries;         // [slots, 5]: a_offset, b_offset, rank, a_stride, b_stride
  const float* scaling;       // [slots]
  const __nv_bfloat16* x;     // [rows, d_in]
  __nv_bfloat16* y;           // [rows, d_out]
  __nv_bfloat16* h;           // [sorted rows, h_stride], whose last 8 columns hold nothing
  int* ready;                 // [items], zero: shrink units of an item that are in h
  int* tickets;               // zero: units handed out
  int num_rows, num_slots;
  int d_in, d_out, h_stride, max_rank;
  bool shrink, expand;
};

constexpr int kMaxRows = 32;   // rows of an item
constexpr int kMaxRank = 128;
constexpr int kBoxBytes = 2048;
constexpr int kConsumers = 4;  // warps
constexpr int kRowWarps = 2;   // one alone issues about a row copy in 60 cycles
constexpr int kTicketWarp = kConsumers, kWeightWarp = kConsumers + 1, kRowWarp = kConsumers + 2;
constexpr int kThreads = (kConsumers + 2 + kRowWarps) * 32;
constexpr int kTickets = 2;  // ahead of their use; more would bind late units to busy CTAs

// ---------------------------------------------------------------- units and stages
enum Kind : int { kEnd, kShrink, kExpand };

// What every warp of a CTA needs to know of one unit.
struct Ticket {
  Kind kind;
  int item;
  int weight_row;             // first rank row in the pool
  int groups;                 // 8-row groups of weights
  int rank, num_rows, row_begin;
  int begin, end;             // columns of the pool
  int first_rank;             // shrink: of the unit
  int units;                  // shrink units of the item
  float scaling;
  int rows[kMaxRows];
};

// A stage holds weights [box of 128 columns][group][2][8][64], then batch rows, then rows of h.
// Batch rows and h rows are 16 bytes longer than their data, so that lanes meet distinct banks.
__device__ __forceinline__ int row_stride(int width) { return width * 2 + 16; }
__device__ __forceinline__ uint32_t rows_at(const Ticket& t, int width) {
  return (width + 127) / 128 * t.groups * kBoxBytes;
}
__device__ __forceinline__ uint32_t h_at(const Ticket& t, int width) {
  return rows_at(t, width) + t.num_rows * row_stride(width);
}

// Columns per stage: a multiple of 128, so that which warp adds which k never depends on it.
template <int STAGE>
__device__ __forceinline__ int stage_width(const PairArgs& p, const Ticket& t) {
  const int fixed = t.num_rows * (16 + (t.kind == kExpand ? p.h_stride * 2 : 0));
  const int most = (STAGE - fixed) / (t.groups * 16 + t.num_rows * 2) / 128 * 128;
  const int columns = t.end - t.begin, stages = (columns + most - 1) / most;
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

template <int NS, int STAGE>
struct Shared {
  static constexpr int kStages = NS, kStage = STAGE;
  static_assert(STAGE % 1024 == 0, "the copy engine's swizzle repeats every 1024 bytes");
  alignas(1024) unsigned char stages[NS][STAGE];
  Ticket tickets[kTickets];
  alignas(8) uint64_t full[NS], empty[NS], ticket_full[kTickets], ticket_empty[kTickets];
};

// Every warp but the ticket warp learns a unit here, and lets the slot go when it is done.
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

// ---------------------------------------------------------------- ticket warp
// How the launch is cut. Small units balance, large ones cost fewer tickets and read x less often;
// no result depends on the choice, so it may follow the number of items.
struct Units {
  int ranks, tile;  // of a shrink unit, at least; columns of an expand unit
  int per_item_shrink, per_item_expand, shrink, total;
  __device__ Units(const PairArgs& p, int num_items) {
    const int ctas = static_cast<int>(gridDim.x), ranks8 = (p.max_rank + 7) / 8 * 8;
    ranks = 8;
    while (ranks < 32 && num_items * ((ranks8 + ranks * 2 - 1) / (ranks * 2)) >= ctas) ranks *= 2;
    tile = 128;
    while (tile * ranks8 < 65536 && num_items * ((p.d_out + tile * 2 - 1) / (tile * 2)) >= 6 * ctas) tile *= 2;
    per_item_shrink = (p.max_rank + ranks - 1) / ranks;
    per_item_expand = (p.d_out + tile - 1) / tile;
    shrink = p.shrink ? num_items * per_item_shrink : 0;
    total = shrink + (p.expand ? num_items * per_item_expand : 0);
  }
  __device__ __forceinline__ int item(int unit) const {
    return unit < shrink ? unit / per_item_shrink : (unit - shrink) / per_item_expand;
  }
};

// What of the item's slot each lane has read: lane c < 5 entry c, lane 5 scaling; and its row.
struct Site {
  int field, row;
};
__device__ __forceinline__ Site load_site(const PairArgs& p, const Item& it) {
  const int lane = threadIdx.x & 31;
  Site s{0, 0};
  if (lane < 5) s.field = __ldg(p.entries + it.slot * 5 + lane);
  else if (lane == 5) s.field = __float_as_int(__ldg(p.scaling + it.slot));
  if (lane < it.num_rows) s.row = __ldg(p.row_order + it.row_begin + lane);
  return s;
}

template <class S>
__device__ __forceinline__ void publish(S& sm, Ring<kTickets>& ring, const Ticket& made, int row) {
  const int lane = threadIdx.x & 31;
  mbar_wait(&sm.ticket_empty[ring.at], ring.phase ^ 1);
  Ticket& t = sm.tickets[ring.at];
  t.rows[lane] = row;
  if (lane == 0) {
    t.kind = made.kind, t.item = made.item, t.weight_row = made.weight_row, t.groups = made.groups;
    t.rank = made.rank, t.num_rows = made.num_rows, t.row_begin = made.row_begin;
    t.begin = made.begin, t.end = made.end, t.first_rank = made.first_rank, t.units = made.units;
    t.scaling = made.scaling;
  }
  __syncwarp();
  if (lane == 0) mbar_arrive(&sm.ticket_full[ring.at]);
  ring.next();
}

// Returns the unit as a ticket; kEnd when the item has no such part (a smaller rank than the largest).
__device__ __forceinline__ Ticket describe(const PairArgs& p, const Units& units, int unit, const Item& it,
                                           const Site& s) {
  const int a_offset = __shfl_sync(~0u, s.field, 0), b_offset = __shfl_sync(~0u, s.field, 1);
  const int rank = min(__shfl_sync(~0u, s.field, 2), p.max_rank);
  const int a_stride = __shfl_sync(~0u, s.field, 3), b_stride = __shfl_sync(~0u, s.field, 4);
  Ticket t;
  t.kind = kEnd, t.item = units.item(unit), t.rank = rank, t.num_rows = it.num_rows, t.row_begin = it.row_begin;
  t.scaling = __int_as_float(__shfl_sync(~0u, s.field, 5));
  const int ranks = it.num_rows <= 16 ? units.ranks : max(units.ranks, 16);
  t.units = (rank + ranks - 1) / ranks;
  if (unit < units.shrink) {
    t.first_rank = unit % units.per_item_shrink * ranks;
    t.weight_row = a_offset + it.expert * a_stride + t.first_rank;
    t.groups = (min(ranks, rank - t.first_rank) + 7) / 8;
    t.begin = 0, t.end = p.d_in;
    if (t.first_rank < rank) t.kind = kShrink;
  } else {
    t.first_rank = 0;
    t.weight_row = b_offset + it.expert * b_stride;
    t.groups = (rank + 7) / 8;
    t.begin = (unit - units.shrink) % units.per_item_expand * units.tile;
    t.end = min(t.begin + units.tile, p.d_out);
    if (rank > 0) t.kind = kExpand;
  }
  return t;
}

// Brings this CTA's share of the tables into L2 while the number of items is on its way.
__device__ __forceinline__ void prefetch_tables(const PairArgs& p) {
  const int at = blockIdx.x * 128;
  if (at < p.num_rows * 16) prefetch_l2(reinterpret_cast<const char*>(p.items) + at);
  if (at < p.num_rows * 4) prefetch_l2(reinterpret_cast<const char*>(p.row_order) + at);
  if (at < p.num_slots * 20) prefetch_l2(reinterpret_cast<const char*>(p.entries) + at);
  if (at < p.num_slots * 4) prefetch_l2(reinterpret_cast<const char*>(p.scaling) + at);
}

// Draws tickets ahead of their use: while one is made out, the next one's item and the ticket after
// that are on their way, so that a ticket costs one memory latency and not three.
template <class S>
__device__ void hand_out(const PairArgs& p, S& sm) {
  const int lane = threadIdx.x & 31;
  if (lane == 0) prefetch_tables(p);
  const Units units(p, *p.num_items);
  Ring<kTickets> ring;
  auto draw = [&] { return lane == 0 ? atomicAdd(p.tickets, 1) + static_cast<int>(gridDim.x) : 0; };
  auto load_item = [&](int unit) {
    if (unit >= units.total) return Item{};
    const int4 v = __ldg(reinterpret_cast<const int4*>(p.items) + units.item(unit));
    return Item{v.x, v.y, v.z, v.w};
  };
  int unit = blockIdx.x, next_draw = draw();
  Item item = load_item(unit);
  Site site = load_site(p, item);
  while (unit < units.total) {
    const int next = __shfl_sync(~0u, next_draw, 0);
    const Item next_item = load_item(next);
    next_draw = draw();
    const Ticket t = describe(p, units, unit, item, site);
    if (t.kind != kEnd) publish(sm, ring, t, site.row);
    unit = next, item = next_item, site = load_site(p, next_item);
  }
  Ticket end{};
  publish(sm, ring, end, 0);
}

}  // namespace lora_jax
