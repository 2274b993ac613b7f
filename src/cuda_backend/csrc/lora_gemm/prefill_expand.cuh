// The expand of adapters with many rows, y += h B: see lora_gemm/prefill_shrink.cuh.
//
// A unit is 16 rows of a tile, for 256 columns. CTAs take equal runs of units. What a unit needs comes
// units ahead: its rows of y one copy each, its h in one, into a ring of stages in shared memory; B, which
// many units share, ahead of its first one. Two teams of warps take units in turn; a warp keeps 64 columns
// of B in registers.
#pragma once
#include "device/arithmetic.cuh"
#include "lora_gemm/prefill_args.cuh"

namespace lora_jax {

constexpr int kTileWarps = 8, kTileThreads = kTileWarps * 32;
constexpr int kUnitRows = 16, kUnitColumns = 256;
constexpr int kPieces = kUnitColumns / 64;    // of columns, each a warp's
constexpr int kTeams = kTileWarps / kPieces;  // of warps, which take units in turn
static_assert(kUnitColumns == 64 << kWideB, "one box brings 8 rank rows of a unit");
constexpr int kBatchUnits = kTileThreads / 4;      // looked up at a time
constexpr int kAskingThread = kTileThreads - 32;   // that asks whether h is there

struct alignas(16) ExpandUnit {
  int place, rows_rank;  // of its first row in the sorted order; rows, 0 if there is nothing to do, and rank << 8
  int weight_row, column;
  static constexpr int kTogether = 128;  // rows are neighbours in y
  __device__ __forceinline__ int rows() const { return rows_rank & 127; }
  __device__ __forceinline__ bool together() const { return rows_rank & kTogether; }
  __device__ __forceinline__ int rank() const { return rows_rank >> 8; }
};

template <int STEPS, int STAGES>
struct ExpandShared {
  static_assert(STAGES <= kTileWarps, "each warp begins one");
  static_assert(STAGES % kTeams == 0, "a stage is the same team's each time: it may not mistake the parity of the other's");
  static constexpr int kStages = STAGES, kHalves = (STEPS + 3) / 4;  // of 64 ranks
  static constexpr int kHalf = kUnitRows * 128, kRow = kUnitColumns * 2 + 16;  // rows of y on distinct banks
  static constexpr int kRows = (kUnitRows * kRow + 1023) / 1024 * 1024;  // or swizzled pieces of 64 columns
  static constexpr bool kBoxes = STEPS <= 4;  // bring neighbouring rows of y; at higher ranks that was not timed
  static constexpr int kGroup = kUnitColumns * 16;  // bytes of 8 rank rows of B
  alignas(1024) unsigned char b[STEPS * 2][kGroup];
  unsigned char h[STAGES][kHalves][kHalf];
  unsigned char y[STAGES][kRows];
  ExpandUnit units[kBatchUnits];
  int first_rows[kBatchUnits];
  int rows[kBatchUnits][kUnitRows];  // where they begin in y, with the unit's column, in 16 bytes
  alignas(8) uint64_t full[STAGES], empty[STAGES], b_full, b_empty, h_there;
  bool odd, there;  // whether this is every second launch of the call, see CallState; whether h is there
};

// A warp's 64 columns of B as mma operands. A lane reads 8 columns of the rank rows it needs; operands
// have two of them from four rows. Both are four registers in a row, so the turn is made once, in place:
// left to the loop over rows, it would cost a move a register there.
template <int STEPS>
struct Columns {
  uint32_t a[STEPS][4][4];  // of 16 ranks: [2 columns][row of B], while they come [row of B][2 columns]

  // From 8-row groups in shared memory; past the rank: zeros. Returns a word that is there once all are.
  __device__ __forceinline__ uint32_t take(uint32_t b, int group, int rank) {
    const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    const uint32_t even = b + q * 256 + ((g ^ (q * 2)) << 4), odd = (even ^ 16) + 128;  // rows q * 2 and the next
#pragma unroll
    for (int s = 0; s < STEPS; ++s)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4 w = lds128_in_order((i % 2 ? odd : even) + (s * 2 + i / 2) * group);
        a[s][i][0] = w.x, a[s][i][1] = w.y, a[s][i][2] = w.z, a[s][i][3] = w.w;
      }
    const uint32_t last = a[STEPS - 1][3][3];
    if (rank < STEPS * 16) {
#pragma unroll
      for (int s = 0; s < STEPS; ++s)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (s * 16 + i / 2 * 8 + q * 2 + i % 2 >= rank) a[s][i][0] = a[s][i][1] = a[s][i][2] = a[s][i][3] = 0;
    }
    turn();
    return last;
  }
  // Pairs neighbouring rows of each column.
  __device__ __forceinline__ void turn() {
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      uint32_t t[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        t[i][0] = __byte_perm(a[s][0][i], a[s][1][i], 0x5410), t[i][1] = __byte_perm(a[s][0][i], a[s][1][i], 0x7632);
        t[i][2] = __byte_perm(a[s][2][i], a[s][3][i], 0x5410), t[i][3] = __byte_perm(a[s][2][i], a[s][3][i], 0x7632);
      }
#pragma unroll
      for (int i = 0; i < 16; ++i) a[s][i / 4][i % 4] = t[i / 4][i % 4];
    }
  }
};

// Adds lo and hi to two bfloat16.
__device__ __forceinline__ uint32_t add_pair(uint32_t y, float lo, float hi) {
  return bf16x2(__int_as_float(y << 16) + lo, __int_as_float(y & 0xffff0000u) + hi);
}

// Adds h B to 8 rows x 64 columns of y, by the first USED steps: a lane has 8 columns from 8 * g on, of rows
// 2 * q and the next. `h` are 8 rows of swizzled pieces of 64 ranks; what lies there past the rank may be
// anything.
template <class S, int USED, int STEPS>
__device__ __forceinline__ void update_rows(const Columns<STEPS>& columns, uint32_t h, int rank, uint4 (&y)[2]) {
  const int lane = threadIdx.x & 31;
  const uint32_t first = (lane & 7) * 128 + (((lane >> 3) ^ (lane & 7)) << 4);
  uint32_t v[USED / 2][4];
#pragma unroll
  for (int s = 0; s < USED / 2; ++s) ldmatrix(v[s], h + s / 2 * S::kHalf + (s % 2 ? first ^ 64 : first));
  if (rank <= USED * 16 - 8) {
#pragma unroll
    for (int s = 0; s < USED * 2; ++s)
      if (s * 8 >= rank) v[s / 4][s % 4] = 0;
  }
  float acc[4][4] = {};
#pragma unroll
  for (int s = 0; s < USED; ++s)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t(&a)[4] = columns.a[s][i];
      mma_bf16(acc[i], a[0], a[1], a[2], a[3], v[s / 2][s % 2 * 2], v[s / 2][s % 2 * 2 + 1]);
    }
  auto two_columns = [&](int i, uint32_t& first, uint32_t& second) {
    first = add_pair(first, acc[i][0], acc[i][2]), second = add_pair(second, acc[i][1], acc[i][3]);
  };
  two_columns(0, y[0].x, y[1].x);
  two_columns(1, y[0].y, y[1].y);
  two_columns(2, y[0].z, y[1].z);
  two_columns(3, y[0].w, y[1].w);
}

// Of a tile of so many blocks of 8 rows, for each group of columns.
__device__ __forceinline__ int units_of(int blocks) { return (blocks * 8 + kUnitRows - 1) / kUnitRows; }

// By all threads, four a unit: looks up `count` units from `first` on, counted through (columns, tile, rows).
// Units of tiles smaller than the largest may be empty.
template <class S>
__device__ __forceinline__ void look_up(const TileArgs& p, const Module& m, int first, int count, S& sm) {
  constexpr int kEach = kUnitRows / 4;
  const int thread = thread_anew(), slot = thread >> 2, q = thread & 3, n = min(slot, count - 1);
  const int tile_units = units_of(__ldg(p.cut + 1)), tiles = __ldg(p.cut), of_all = (first + n) / tile_units;
  const int group = of_all / tiles, begin = (first + n - of_all * tile_units) * kUnitRows, column = group * kUnitColumns;
  const Item t = load_tile(p, of_all - group * tiles);
  const int* entry = m.entries + t.slot * 5;
  const int rank = min(__ldg(entry + 2), p.max_rank);
  const int weight_row = __ldg(entry + 1) + t.expert * __ldg(entry + 4);
  const int place = t.row_begin + min(begin, t.num_rows - 1);
  const int rows = rank == 0 && p.accumulate ? 0 : min(max(t.num_rows - begin, 0), kUnitRows);
  int row[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) row[i] = q * kEach + i < rows ? __ldg(p.row_order + place + q * kEach + i) : 0;
  const int first_row = __shfl_sync(~0u, row[0], threadIdx.x & 28);
  bool together = S::kBoxes && rows == kUnitRows && p.accumulate;
#pragma unroll
  for (int i = 0; i < kEach; ++i) together = together && row[i] == first_row + q * kEach + i;
  const unsigned alike = __ballot_sync(~0u, together) >> (threadIdx.x & 28) & 15;
  if (slot >= count) return;
#pragma unroll
  for (int i = 0; i < kEach; ++i) sm.rows[n][q * kEach + i] = q * kEach + i < rows ? row[i] * (p.d_out / 8) + column / 8 : 0;
  if (q == 0) sm.units[n] = ExpandUnit{place, rows | (alike == 15 ? ExpandUnit::kTogether : 0) | rank << 8, weight_row, column};
  if (q == 0) sm.first_rows[n] = first_row;
}

// What the warps of a CTA do with a batch of units. A team takes one in turn with the others; when all its
// warps are through with it, one of them brings another in its stead.
template <bool SHRINKS, bool ADDS, int STEPS, class S>
struct BatchExpand {
  const TileArgs& p;
  S& sm;
  const Module& m;
  const int module, count;

  __device__ __forceinline__ ExpandUnit unit(int n) const {
    const int4 v = *reinterpret_cast<const int4*>(sm.units + n);
    return ExpandUnit{v.x, v.y, v.z, v.w};
  }
  // A box has all columns, where there are fewer too.
  __device__ __forceinline__ int bytes_of_row(const ExpandUnit& u) const {
    return u.together() ? kUnitColumns * 2 : min(p.d_out - u.column, kUnitColumns) * 2;
  }
  __device__ __forceinline__ int halves(const ExpandUnit& u) const { return u.rows() == 0 ? 0 : u.rank() > 64 ? 2 : 1; }
  __device__ __forceinline__ void expect(const ExpandUnit& u, int at) const {
    if ((threadIdx.x & 31) == 0) mbar_expect(&sm.full[at], halves(u) * S::kHalf + (ADDS ? u.rows() * bytes_of_row(u) : 0));
  }
  // A lane brings row `row` of y; the first one all that are neighbours.
  __device__ __forceinline__ void fetch_y(int n, const ExpandUnit& u, int at, int row) const {
    if (!ADDS || row >= (u.together() ? 1 : u.rows())) return;
    if (u.together()) return box_copy(smem_u32(sm.y[at]), &p.y_boxes[module], sm.first_rows[n], u.column / 64, &sm.full[at]);
    const auto* from = m.y + static_cast<int64_t>(static_cast<uint32_t>(sm.rows[n][row])) * 8;
    bulk_copy(smem_u32(sm.y[at]) + row * S::kRow, from, bytes_of_row(u), &sm.full[at]);
  }
  __device__ __forceinline__ void fetch_h(const ExpandUnit& u, int at) const {
    const int lane = threadIdx.x & 31;
    if (lane < halves(u))
      tile_copy(smem_u32(sm.h[at][lane]), &p.h_rows, lane * 64, module * p.num_rows + u.place, 0, 0, &sm.full[at]);
  }
  // By a warp, one of some `sharers`: its part of the weights of the first unit from `n` on that needs other ones.
  __device__ __forceinline__ void fetch_b(int n, int2 have, int sharer, int sharers) const {
    const int lane = threadIdx.x & 31;
    for (; n < count; n += 32) {
      const ExpandUnit u = unit(min(n + lane, count - 1));
      const unsigned other = __ballot_sync(~0u, n + lane < count && u.rows() > 0 && (u.weight_row != have.x || u.column != have.y));
      if (other == 0) continue;
      const ExpandUnit next = unit(n + __ffs(other) - 1);
      const int groups = (next.rank() + 7) / 8, group = sharer + lane * sharers;
      if (group == 0) mbar_expect(&sm.b_full, groups * S::kGroup);
      __syncwarp();
      if (group < groups) box_copy(smem_u32(sm.b[group]), &p.b_boxes, next.weight_row + group * 8, next.column / 64, &sm.b_full);
      return;
    }
  }
  // Until all CTAs have shrunk their tiles: one thread asks, once.
  __device__ __forceinline__ void await_h() const {
    if (threadIdx.x == kAskingThread && !sm.there) {
      while ((acquire_word(p.shrunk) >= gridDim.x) == sm.odd) {}
      mbar_arrive(&sm.h_there), sm.there = true;
    }
    __syncwarp();
    mbar_wait(&sm.h_there, 0);
    fence_copies();  // which read what others wrote
  }
  // What the first units need, in the order in which it is needed.
  __device__ __forceinline__ void begin(const Ring<S::kStages>& ring, int2 have) const {
    const int thread = thread_anew(), warp = thread >> 5, lane = thread & 31, filled = min(S::kStages, count);
    fetch_b(0, have, warp, kTileWarps);
    Ring<S::kStages> at = ring;  // all stages are free
    for (int n = 0; n < warp; ++n) at.next();
    const bool one = warp < filled;
    if (one) expect(unit(warp), at.at());
    __syncwarp();
    if (one && !p.shrink) fetch_h(unit(warp), at.at());
    Ring<S::kStages> to = ring;
#pragma unroll 1
    for (int n = 0; n < filled; ++n, to.next())
      if (lane < kUnitRows / kTileWarps) fetch_y(n, unit(n), to.at(), warp * (kUnitRows / kTileWarps) + lane);
    if (!p.shrink) return;
    if constexpr (SHRINKS) await_h();
    else wait_for_previous();
    if (one) fetch_h(unit(warp), at.at());
  }
  template <int USED>
  __device__ __forceinline__ void update(const Columns<STEPS>& columns, int n, const ExpandUnit& u, int at, int piece) const {
    const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    auto* y = reinterpret_cast<uint4*>(m.y) + piece * 8 + g;
#pragma unroll 1
    for (int part = 0; part < kUnitRows / 8; ++part) {
      if (part * 8 >= u.rows()) break;
      const int row = part * 8 + q * 2;
      const uint32_t in_box = piece * (kUnitRows * 128) + row * 128 + ((g ^ q * 2) << 4);
      const uint32_t from = smem_u32(sm.y[at]) + (u.together() ? in_box : row * S::kRow + piece * 128 + g * 16);
      uint4 v[2] = {};
      if (ADDS) v[0] = lds128(from), v[1] = lds128(u.together() ? (from ^ 16) + 128 : from + S::kRow);
      update_rows<S, USED>(columns, smem_u32(sm.h[at]) + part * 1024, u.rank(), v);
      const int2 to = *reinterpret_cast<const int2*>(&sm.rows[n][row]);
      store_last(y + static_cast<uint32_t>(to.x), v[0], row < u.rows());
      store_last(y + static_cast<uint32_t>(to.y), v[1], row + 1 < u.rows());
    }
  }
  __device__ __forceinline__ void run(Columns<STEPS>& columns, Ring<S::kStages>& ring, int2& have, uint32_t& b_phase) const {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, piece = warp % kPieces, team = warp / kPieces;
    begin(ring, have);
#pragma unroll 1
    for (int n = 0; n < count; ++n, ring.next()) {
      const ExpandUnit u = unit(n);
      if (u.rows() > 0 && (u.weight_row != have.x || u.column != have.y)) {
        have = make_int2(u.weight_row, u.column);
        mbar_wait(&sm.b_full, b_phase);
        const uint32_t last = columns.take(smem_u32(sm.b[0]) + piece * 1024, S::kGroup, u.rank());
        __syncwarp();
        if (lane == 0) mbar_arrive(&sm.b_empty + (last & p.max_rank >> 16));  // once the last of them is here
        if (warp == kTileWarps - 1) {
          mbar_wait(&sm.b_empty, b_phase);
          fetch_b(n + 1, have, 0, 1);
        }
        b_phase ^= 1;
      }
      if (n % kTeams != team) continue;
      const int at = ring.at();
      mbar_wait(&sm.full[at], ring.phase());
      if (u.column + piece * 64 < p.d_out) {
        if (u.rank() <= STEPS * 8) update<STEPS / 2>(columns, n, u, at, piece);
        else update<STEPS>(columns, n, u, at, piece);
      }
      __syncwarp();
      if (lane == 0) mbar_arrive(&sm.empty[at]);
      if (n / kTeams % kPieces == piece && n + S::kStages < count) {
        mbar_wait(&sm.empty[at], ring.phase());
        const ExpandUnit later = unit(n + S::kStages);
        expect(later, at);
        __syncwarp();
        fetch_h(later, at);
        fetch_y(n + S::kStages, later, at, lane);
      }
    }
  }
};

// The CTA's run of a module; equal runs balance. Where h comes from the kernel before, it is read once
// that has ended.
template <bool SHRINKS, int STEPS, class S>
__device__ __forceinline__ void expand_module(const TileArgs& p, int module, S& sm, Ring<S::kStages>& ring, uint32_t& b_phase) {
  const Module& m = p.modules[module];
  const int groups = (p.d_out + kUnitColumns - 1) / kUnitColumns;
  const int64_t total = static_cast<int64_t>(groups) * __ldg(p.cut) * units_of(__ldg(p.cut + 1));
  const int end = static_cast<int>(total * (blockIdx.x + 1) / gridDim.x);
  Columns<STEPS> columns;
  int2 have = make_int2(-1, -1);
  for (int first = static_cast<int>(total * blockIdx.x / gridDim.x); first < end; first += kBatchUnits) {
    const int count = min(end - first, kBatchUnits);
    __syncthreads();  // the last batch is done with
    look_up(p, m, first, count, sm);
    __syncthreads();
    if (p.accumulate) BatchExpand<SHRINKS, true, STEPS, S>{p, sm, m, module, count}.run(columns, ring, have, b_phase);
    else BatchExpand<SHRINKS, false, STEPS, S>{p, sm, m, module, count}.run(columns, ring, have, b_phase);
  }
}

template <bool SHRINKS, int STEPS, int STAGES>
__device__ __forceinline__ void expand_tiles(const TileArgs& p, ExpandShared<STEPS, STAGES>& sm) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      mbar_init(&sm.full[i], 1);
      mbar_init(&sm.empty[i], kPieces);
    }
    mbar_init(&sm.b_full, 1);
    mbar_init(&sm.b_empty, kTileWarps);
    if (SHRINKS) mbar_init(&sm.h_there, 1);
    fence_barriers();
  }
  Ring<STAGES> ring;
  uint32_t b_phase = 0;
#pragma unroll 1
  for (int module = 0; module < p.num_modules; ++module) expand_module<SHRINKS, STEPS>(p, module, sm, ring, b_phase);
}

// For ranks that leave no registers for a second CTA on an SM; smaller ones are both_kernel's.
template <int STEPS, int STAGES>
__global__ void __launch_bounds__(kTileThreads, 1) expand_tiles_kernel(const __grid_constant__ TileArgs p) {
  extern __shared__ __align__(1024) unsigned char expand_raw[];
  let_next_begin();
  expand_tiles<false, STEPS, STAGES>(p, *reinterpret_cast<ExpandShared<STEPS, STAGES>*>(expand_raw));
  wait_for_previous();
}

}  // namespace lora_jax
