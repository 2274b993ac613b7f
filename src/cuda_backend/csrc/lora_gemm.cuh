// Grouped LoRA on Hopper in one launch: h = scaling * x A^T, then y += h B, for rows of many adapters.
//
// An item is up to kMaxRows rows of one segment (adapter, or adapter x expert). Its weights are the
// 16-row operand of mma and its rows the 8-column operand (swap-AB), so a segment of one row costs
// an n = 8 tile. Units of work are, first, (item, up to 32 rank rows) of the shrink, each over the
// whole of d_in, and then (item, tile of columns) of the expand. A persistent grid draws tickets.
// In each CTA one warp draws them ahead of time, one streams weights by tensor copies (8 rank rows x
// 128 columns a box), one copies the item's rows of x or y (any order of rows will do) and h, and
// the other warps multiply. Weights stream several stages ahead, across the borders of units.
//
//   shrink  A sum over k has no natural order, so lane t of a quad takes 8 consecutive k (16
//           bytes) of a weight row and the same 8 k of a batch row: both operands agree on k.
//   expand  B is kept rank-major [rank, d_out]. A lane reads 8 consecutive columns of the rank
//           rows it needs and pairs neighbouring rows with byte permutes; what it ends up with is
//           8 consecutive columns of one batch row: one 16-byte update of y.
//
// Sums have one fixed order: k mod 128 picks the warp, which adds its k in order; then warps in
// order. So a row's result depends on nothing but the row and its adapter. Expand units wait for
// their item's h; tickets hand out every shrink unit before the first expand unit and CTAs work in
// the order of tickets, so the wait always ends.
//
// The last 8-row box of a rank that is no multiple of 8 also reads rows of the next adapter. Shrink
// drops their sums and expand their weights, whatever the values.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

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

// ---------------------------------------------------------------- PTX
__device__ __forceinline__ uint32_t smem_u32(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void mbar_init(uint64_t* bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_u32(bar)), "r"(count));
}
__device__ __forceinline__ void mbar_expect(uint64_t* bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_u32(bar)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void mbar_arrive(uint64_t* bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_u32(bar)) : "memory");
}
__device__ __forceinline__ void mbar_wait(uint64_t* bar, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(smem_u32(bar)),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void bulk_copy(uint32_t dst, const void* src, uint32_t bytes, uint64_t* bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
      "l"(src), "r"(bytes), "r"(smem_u32(bar))
      : "memory");
}
__device__ __forceinline__ void box_copy(uint32_t dst, const CUtensorMap* map, int row, int block, uint64_t* bar) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::
          "r"(dst),
      "l"(map), "r"(0), "r"(row), "r"(block), "r"(smem_u32(bar))
      : "memory");
}
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
__device__ __forceinline__ void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
__device__ __forceinline__ int load_acquire(const int* p) {
  int v;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void consumer_sync() {
  asm volatile("bar.sync 1, %0;" ::"n"(kConsumers * 32) : "memory");
}
__device__ __forceinline__ uint4 lds128(uint32_t addr) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(addr));
  return v;
}
__device__ __forceinline__ uint32_t lds32(uint32_t addr) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(addr));
  return v;
}
__device__ __forceinline__ void mma_bf16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                         uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ uint32_t add_bf16x2(uint32_t y, float lo, float hi) {
  const float2 f = __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&y));
  __nv_bfloat162 v = __floats2bfloat162_rn(f.x + lo, f.y + hi);
  return *reinterpret_cast<uint32_t*>(&v);
}

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

// ---------------------------------------------------------------- producers
template <class S>
__device__ void produce_weights(const PairArgs& p, S& sm) {
  const int lane = threadIdx.x & 31;
  Ring<S::kStages> ring;
  Ring<kTickets> taken;
  while (true) {
    const Ticket& t = take(sm, taken);
    if (t.kind == kEnd) return;
    const CUtensorMap* map = t.kind == kShrink ? &p.a_map : &p.b_map;
    const int width = stage_width<S::kStage>(p, t), groups = t.groups;
    for (int c = t.begin; c < t.end; c += width) {
      mbar_wait(&sm.empty[ring.at], ring.phase ^ 1);
      const int boxes = (min(width, t.end - c) + 127) / 128 * groups;
      if (lane == 0) mbar_expect(&sm.full[ring.at], boxes * kBoxBytes);
      __syncwarp();
      const uint32_t dst = smem_u32(sm.stages[ring.at]);
      for (int i = lane; i < boxes; i += 32)
        box_copy(dst + i * kBoxBytes, map, t.weight_row + i % groups * 8, c / 64 + i / groups * 2, &sm.full[ring.at]);
      ring.next();
    }
    let_go(sm, taken);
  }
}

__device__ __forceinline__ void wait_for_h(const PairArgs& p, const Ticket& t) {
  while (load_acquire(&p.ready[t.item]) < t.units) __nanosleep(20);
  asm volatile("fence.proxy.async;" ::: "memory");
}

// The row warps take turns by row; the first one also fetches h, whose rows lie together.
template <class S>
__device__ void produce_rows(const PairArgs& p, S& sm) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) - kRowWarp, row = lane * kRowWarps + warp;
  Ring<S::kStages> ring;
  Ring<kTickets> taken;
  while (true) {
    const Ticket& t = take(sm, taken);
    if (t.kind == kEnd) return;
    const bool expand = t.kind == kExpand, copies_h = expand && warp == 0;
    const int64_t ld = expand ? p.d_out : p.d_in;
    const __nv_bfloat16* from = (expand ? p.y : p.x) + (row < t.num_rows ? t.rows[row] * ld : 0);
    const int width = stage_width<S::kStage>(p, t), h_bytes = copies_h ? t.num_rows * p.h_stride * 2 : 0;
    const int my_rows = (t.num_rows + kRowWarps - 1 - warp) / kRowWarps;
    for (int c = t.begin; c < t.end; c += width) {
      mbar_wait(&sm.empty[ring.at], ring.phase ^ 1);
      uint64_t* full = &sm.full[ring.at];
      const uint32_t base = smem_u32(sm.stages[ring.at]);
      const int bytes = min(width, t.end - c) * 2;
      if (lane == 0) mbar_expect(full, my_rows * bytes + h_bytes);
      __syncwarp();
      if (row < t.num_rows) bulk_copy(base + rows_at(t, width) + row * row_stride(width), from + c, bytes, full);
      if (copies_h) {
        if (p.shrink && c == t.begin) wait_for_h(p, t);
        if (lane == 0) bulk_copy(base + h_at(t, width), p.h + static_cast<int64_t>(t.row_begin) * p.h_stride, h_bytes, full);
      }
      ring.next();
    }
    let_go(sm, taken);
  }
}

// ---------------------------------------------------------------- shrink
// Two chains of sums, by bit 3 of k within a lane's 8, keep the tensor cores' latency apart.
template <int MT, int J>
__device__ __forceinline__ void shrink_stage(const Ticket& t, uint32_t base, int width, int columns,
                                             float (&acc)[2][MT][J][4]) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  const uint32_t mine = base + (warp >> 1) * 1024 + g * 128 + ((((warp & 1) * 4 + q) ^ g) << 4);
  const uint32_t box = t.groups * kBoxBytes, rows = base + rows_at(t, width) + q * 16;
  uint32_t wa[MT * 2], xa[J];  // groups and rows past the end read the first: results are not used
#pragma unroll
  for (int i = 0; i < MT * 2; ++i) wa[i] = mine + (i < t.groups ? i : 0) * kBoxBytes;
#pragma unroll
  for (int j = 0; j < J; ++j) xa[j] = rows + (j * 8 + g < t.num_rows ? j * 8 + g : 0) * row_stride(width);
#pragma unroll(J == 1 ? 4 : J == 2 ? 2 : 1)
  for (int k = warp * 32; k < columns; k += 32 * kConsumers) {
    const uint32_t at = (k >> 7) * box;
    uint4 v[J], w[MT * 2];
#pragma unroll
    for (int j = 0; j < J; ++j) v[j] = lds128(xa[j] + k * 2);
#pragma unroll
    for (int i = 0; i < MT * 2; ++i) w[i] = lds128(wa[i] + at);
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int j = 0; j < J; ++j) {
        mma_bf16(acc[0][m][j], w[m * 2].x, w[m * 2 + 1].x, w[m * 2].y, w[m * 2 + 1].y, v[j].x, v[j].y);
        mma_bf16(acc[1][m][j], w[m * 2].z, w[m * 2 + 1].z, w[m * 2].w, w[m * 2 + 1].w, v[j].z, v[j].w);
      }
  }
}

// Sums the chains and the warps' parts in order and hands this unit's columns of h over. `scratch`
// is the unit's last stage.
template <int MT, int J>
__device__ __forceinline__ void finish_shrink(const PairArgs& p, const Ticket& t, float* scratch, uint64_t* release,
                                              const float (&acc)[2][MT][J][4]) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  constexpr int N = J * 8, LD = MT * 16 + 1;
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int j = 0; j < J; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        scratch[(warp * N + j * 8 + q * 2 + (c & 1)) * LD + m * 16 + g + (c >> 1) * 8] =
            acc[0][m][j][c] + acc[1][m][j][c];
  consumer_sync();
  const int r = t.first_rank + lane;
  for (int n = warp; n < t.num_rows; n += kConsumers) {
    float s = 0.f;
    if (lane < t.groups * 8) {
#pragma unroll
      for (int w = 0; w < kConsumers; ++w) s += scratch[(w * N + n) * LD + lane];
      p.h[static_cast<int64_t>(t.row_begin + n) * p.h_stride + r] = __float2bfloat16(r < t.rank ? s * t.scaling : 0.f);
    }
  }
  asm volatile("fence.proxy.async;" ::: "memory");  // copies write the scratch next, and read h
  __syncwarp();
  if (lane == 0) mbar_arrive(release);
  consumer_sync();
  // One lane's fence covers what the barrier has ordered before it; the other warps go on.
  if (warp == (t.item & (kConsumers - 1)) && lane == 0) {
    __threadfence();
    atomicAdd(&p.ready[t.item], 1);
  }
}

template <int MT, int J, class S>
__device__ __forceinline__ void shrink_unit(const PairArgs& p, S& sm, Ring<S::kStages>& ring, const Ticket& t) {
  static_assert(kConsumers * 8 * J * (MT * 16 + 1) * 4 <= S::kStage, "the warps' parts must fit a stage");
  const int width = stage_width<S::kStage>(p, t), lane = threadIdx.x & 31;
  float acc[2][MT][J][4] = {};
  for (int k = 0; k < p.d_in; k += width) {
    mbar_wait(&sm.full[ring.at], ring.phase);
    shrink_stage<MT, J>(t, smem_u32(sm.stages[ring.at]), width, min(width, p.d_in - k), acc);
    if (k + width < p.d_in) {
      __syncwarp();
      if (lane == 0) mbar_arrive(&sm.empty[ring.at]);
      ring.next();
    }
  }
  consumer_sync();  // all warps have read the last stage
  finish_shrink<MT, J>(p, t, reinterpret_cast<float*>(sm.stages[ring.at]), &sm.empty[ring.at], acc);
  ring.next();
}

// ---------------------------------------------------------------- expand
// acc[i] += h B for 64 columns: columns 8 * g + 2 * i and the next, rows of the item by lane.
template <int J>
__device__ __forceinline__ void expand_block(const Ticket& t, uint32_t weights, uint32_t h, int h_stride, int n0,
                                             float (&acc)[4][J][4]) {
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  const uint32_t even = weights + q * 256 + ((g ^ (q * 2)) << 4), odd = weights + q * 256 + 128 + ((g ^ (q * 2 + 1)) << 4);
  uint32_t ha[J];
#pragma unroll
  for (int j = 0; j < J; ++j) ha[j] = h + (n0 + j * 8 + g < t.num_rows ? n0 + j * 8 + g : 0) * h_stride + q * 4;
#pragma unroll 2
  for (int k = 0; k < t.groups; k += 2) {
    const bool whole = k + 1 < t.groups;  // else h is 0 for the second group of 8, whatever the weights
    const uint32_t lo = k * kBoxBytes, hi = whole ? lo + kBoxBytes : lo;
    uint4 w0 = lds128(even + lo), w1 = lds128(odd + lo), w2 = lds128(even + hi), w3 = lds128(odd + hi);
    const int left = t.rank - k * 8;
    if (left < 16) {  // h is 0 past the rank, but 0 times a foreign NaN is not
      const uint4 none = make_uint4(0, 0, 0, 0);
      if (left <= q * 2) w0 = none;
      if (left <= q * 2 + 1) w1 = none;
      if (left <= q * 2 + 8) w2 = none;
      if (left <= q * 2 + 9) w3 = none;
    }
    uint32_t hs[J][2];
#pragma unroll
    for (int j = 0; j < J; ++j) {
      hs[j][0] = lds32(ha[j] + k * 16);
      hs[j][1] = whole ? lds32(ha[j] + k * 16 + 16) : 0u;
    }
    auto step = [&](float (&out)[J][4], uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
      const uint32_t a0 = __byte_perm(r0, r1, 0x5410), a1 = __byte_perm(r0, r1, 0x7632);
      const uint32_t a2 = __byte_perm(r2, r3, 0x5410), a3 = __byte_perm(r2, r3, 0x7632);
#pragma unroll
      for (int j = 0; j < J; ++j) mma_bf16(out[j], a0, a1, a2, a3, hs[j][0], hs[j][1]);
    };
    step(acc[0], w0.x, w1.x, w2.x, w3.x);
    step(acc[1], w0.y, w1.y, w2.y, w3.y);
    step(acc[2], w0.z, w1.z, w2.z, w3.z);
    step(acc[3], w0.w, w1.w, w2.w, w3.w);
  }
}

// Warps share out blocks of 64 columns x 8 * J rows.
template <int J>
__device__ __forceinline__ void expand_stage(const PairArgs& p, const Ticket& t, uint32_t base, int width, int col,
                                             int columns) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  const int row_blocks = t.num_rows > J * 8 ? 2 : 1;
  for (int part = warp; part * 64 < columns * row_blocks; part += kConsumers) {
    const int b = part / row_blocks, n0 = part % row_blocks * J * 8;
    float acc[4][J][4] = {};
    expand_block<J>(t, base + (b >> 1) * t.groups * kBoxBytes + (b & 1) * 1024, base + h_at(t, width), p.h_stride * 2,
                    n0, acc);
#pragma unroll
    for (int j = 0; j < J; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int n = n0 + j * 8 + q * 2 + e;
        if (n < t.num_rows) {
          uint4 o = lds128(base + rows_at(t, width) + n * row_stride(width) + b * 128 + g * 16);
          o.x = add_bf16x2(o.x, acc[0][j][e], acc[0][j][e + 2]);
          o.y = add_bf16x2(o.y, acc[1][j][e], acc[1][j][e + 2]);
          o.z = add_bf16x2(o.z, acc[2][j][e], acc[2][j][e + 2]);
          o.w = add_bf16x2(o.w, acc[3][j][e], acc[3][j][e + 2]);
          __stcs(reinterpret_cast<uint4*>(p.y + static_cast<int64_t>(t.rows[n]) * p.d_out + col + b * 64 + g * 8), o);
        }
      }
  }
}

template <int J, class S>
__device__ __forceinline__ void expand_unit(const PairArgs& p, S& sm, Ring<S::kStages>& ring, const Ticket& t) {
  const int width = stage_width<S::kStage>(p, t);
  for (int c = t.begin; c < t.end; c += width) {
    mbar_wait(&sm.full[ring.at], ring.phase);
    expand_stage<J>(p, t, smem_u32(sm.stages[ring.at]), width, c, min(width, t.end - c));
    __syncwarp();
    if ((threadIdx.x & 31) == 0) mbar_arrive(&sm.empty[ring.at]);
    ring.next();
  }
}

template <class S>
__device__ void consume(const PairArgs& p, S& sm) {
  Ring<S::kStages> ring;
  Ring<kTickets> taken;
  while (true) {
    const Ticket& t = take(sm, taken);
    if (t.kind == kEnd) return;
    if (t.kind == kShrink) {
      if (t.num_rows <= 8 && t.groups <= 2) shrink_unit<1, 1>(p, sm, ring, t);
      else if (t.num_rows <= 8) shrink_unit<2, 1>(p, sm, ring, t);
      else if (t.num_rows <= 16) shrink_unit<2, 2>(p, sm, ring, t);
      else shrink_unit<2, 4>(p, sm, ring, t);
    } else {
      if (t.num_rows <= 8) expand_unit<1>(p, sm, ring, t);
      else expand_unit<2>(p, sm, ring, t);
    }
    let_go(sm, taken);
  }
}

template <int NS, int STAGE>
__global__ void __launch_bounds__(kThreads, 2) pair_kernel(const __grid_constant__ PairArgs p) {
  extern __shared__ __align__(1024) unsigned char raw[];
  auto& sm = *reinterpret_cast<Shared<NS, STAGE>*>(raw);
  if (threadIdx.x == 0) {
    for (int i = 0; i < NS; ++i) {
      mbar_init(&sm.full[i], 1 + kRowWarps);
      mbar_init(&sm.empty[i], kConsumers);
    }
    for (int i = 0; i < kTickets; ++i) {
      mbar_init(&sm.ticket_full[i], 1);
      mbar_init(&sm.ticket_empty[i], kConsumers + 1 + kRowWarps);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const int warp = threadIdx.x >> 5;
  if (warp < kConsumers) {
    consume(p, sm);
  } else if (warp == kTicketWarp) {
    hand_out(p, sm);
  } else if (warp == kWeightWarp) {
    if (threadIdx.x == kWeightWarp * 32) prefetch_map(p.shrink ? &p.a_map : &p.b_map);
    produce_weights(p, sm);
  } else {
    produce_rows(p, sm);
  }
}

}  // namespace lora_jax
