// The expand of adapters with many rows, y += h B: see lora_tiles.cuh.
//
// A warp keeps its 64 columns of B in registers and streams rows past them: y is read ahead into
// registers, updated and written back, nothing of it sees shared memory. CTAs take equal runs of
// (512 columns, tile, 8 rows).
#pragma once
#include "tile_args.cuh"

namespace lora_jax {

constexpr int kTileWarps = 8, kTileThreads = kTileWarps * 32;
constexpr int kColumnGroup = kTileWarps * 64;  // a warp has 64 columns, a lane 8 of them

template <int STEPS>
struct ExpandShared {
  static constexpr int kStride = STEPS * 32 + 16;  // bytes of a row of h: rows on distinct banks
  unsigned char h[kTileRows * kStride];
  alignas(8) int rows[kTileRows];  // where they begin in y, in 16 bytes
};

// The warp's 64 columns of B as mma operands. A lane reads 8 columns of the rank rows it needs; operands
// have two of them from four rows. Both are four registers in a row, so the turn is made once, in place:
// left to the loop over rows, it would cost a move a register there.
template <int STEPS>
struct Columns {
  uint32_t a[STEPS][4][4];  // of 16 ranks: [2 columns][row of B], while they come [row of B][2 columns]

  // Past the rank: zeros. `turn` waits for what comes.
  __device__ __forceinline__ void fetch(const __nv_bfloat16* b, int d_out, int rank) {
    int k = (threadIdx.x & 3) * 2;
    b += static_cast<int64_t>(k) * d_out;
#pragma unroll
    for (int s = 0; s < STEPS; ++s, k += 16, b += static_cast<int64_t>(d_out) * 16)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = i % 2 + i / 2 * 8;
        const auto* from = reinterpret_cast<const uint4*>(b + static_cast<int64_t>(row) * d_out);
        const uint4 w = k + row < rank ? __ldg(from) : make_uint4(0, 0, 0, 0);
        a[s][i][0] = w.x, a[s][i][1] = w.y, a[s][i][2] = w.z, a[s][i][3] = w.w;
      }
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

// Adds h B to 8 rows x 64 columns of y: a lane has 8 columns from 8 * g on, of rows 2 * q and the next.
template <int STEPS>
__device__ __forceinline__ void update_rows(const Columns<STEPS>& columns, uint32_t h, uint4 (&y)[2]) {
  uint32_t v[STEPS / 2][4];
#pragma unroll
  for (int s = 0; s < STEPS / 2; ++s) ldmatrix(v[s], h + s * 64);
  auto two_columns = [&](int i, uint32_t& first, uint32_t& second) {
    float acc[4] = {};
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const uint32_t(&a)[4] = columns.a[s][i];
      mma_bf16(acc, a[0], a[1], a[2], a[3], v[s / 2][s % 2 * 2], v[s / 2][s % 2 * 2 + 1]);
    }
    first = add_bf16x2(first, acc[0], acc[2]), second = add_bf16x2(second, acc[1], acc[3]);
  };
  two_columns(0, y[0].x, y[1].x);
  two_columns(1, y[0].y, y[1].y);
  two_columns(2, y[0].z, y[1].z);
  two_columns(3, y[0].w, y[1].w);
}

// Some of a CTA's work: rows [begin, end) of a tile, for 512 columns.
struct Piece {
  Item tile;
  int begin, end;
};

// The CTA's run of units (512 columns, tile, 8 rows), one piece after the other; equal runs balance.
// Holds next to nothing, for registers are short: pieces are looked up anew.
struct Run {
  int left, column, tile, block;  // units to do; where the next one is

  __device__ explicit Run(const TileArgs& p) {
    const int tiles = p.cut[0], tile_blocks = p.cut[1], units = (p.d_out + kColumnGroup - 1) / kColumnGroup * tiles;
    const int64_t total = static_cast<int64_t>(units) * tile_blocks;
    const int first = static_cast<int>(total * blockIdx.x / gridDim.x);
    left = static_cast<int>(total * (blockIdx.x + 1) / gridDim.x) - first;
    if (left == 0) return;
    block = first % tile_blocks, tile = first / tile_blocks % tiles;
    column = first / tile_blocks / tiles * kColumnGroup;
  }
  __device__ __forceinline__ Piece piece(const TileArgs& p) const {
    const Item t = load_tile(p, tile);
    return Piece{t, block * 8, min(min(block + left, __ldg(p.cut + 1)) * 8, t.num_rows)};
  }
  __device__ __forceinline__ void skip(const TileArgs& p) {
    left = max(left - (__ldg(p.cut + 1) - block), 0), block = 0;
    if (++tile == __ldg(p.cut)) tile = 0, column += kColumnGroup;
  }
};

template <int STEPS>
__device__ __forceinline__ void load_h(const TileArgs& p, const __nv_bfloat16* h, int rows, int rank, ExpandShared<STEPS>& sm) {
  const uint32_t base = smem_u32(sm.h);
  const int groups = (rank + 7) / 8;
#pragma unroll 1
  for (int i = threadIdx.x; i < rows * STEPS * 2; i += kTileThreads) {
    const int n = i / (STEPS * 2), c = i % (STEPS * 2);  // past the rank: zeros
    const __nv_bfloat16* from = h + n * p.h_stride;
    copy_16(base + n * ExpandShared<STEPS>::kStride + c * 16, c < groups ? from + c * 8 : from, c < groups ? 16 : 0);
  }
  copies_commit();
}

// The warp's share of a piece. Where y is added to, it is read AHEAD x 8 rows before it is needed.
// `begin` runs while the first reads are on their way, and returns when h is there.
template <bool ADDS, int STEPS, int AHEAD, class Begin>
__device__ __forceinline__ void expand_rows(const TileArgs& p, __nv_bfloat16* out, int rows, int column, const Columns<STEPS>& columns,
                                            ExpandShared<STEPS>& sm, Begin begin) {
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  const bool mine = column < p.d_out;
  auto* y = reinterpret_cast<uint4*>(out + column + g * 8);
  uint4 ahead[AHEAD][2] = {};
  auto each_row = [&](int n0, auto f) {
    const int2 at = *reinterpret_cast<const int2*>(sm.rows + n0 + q * 2);
    f(0, y + static_cast<uint32_t>(at.x)), f(1, y + static_cast<uint32_t>(at.y));
  };
  auto fetch = [&](int n0, uint4(&v)[2]) {
    if (ADDS && n0 < rows) each_row(n0, [&](int e, const uint4* at) { load_last(v[e], at, mine && n0 + q * 2 + e < rows); });
  };
#pragma unroll
  for (int d = 0; d < AHEAD; ++d) fetch(d * 8, ahead[d]);
  begin();
  if (!mine) return;
  const uint32_t h = smem_u32(sm.h) + (lane & 7) * ExpandShared<STEPS>::kStride + (lane >> 3) * 16;
  for (int n0 = 0; n0 < rows; n0 += AHEAD * 8) {
#pragma unroll
    for (int d = 0; d < AHEAD; ++d) {
      const int n = n0 + d * 8;
      if (n >= rows) break;
      if (!ADDS) ahead[d][0] = ahead[d][1] = make_uint4(0, 0, 0, 0);
      update_rows<STEPS>(columns, h + n * ExpandShared<STEPS>::kStride, ahead[d]);
      each_row(n, [&](int e, uint4* at) { store_last(at, ahead[d][e], n + q * 2 + e < rows); });
      fetch(n + AHEAD * 8, ahead[d]);
    }
  }
}

// The CTA's run of a module. Where h comes from the kernel before, it is read once that has ended.
template <int STEPS, int AHEAD>
__device__ __forceinline__ void expand_module(const TileArgs& p, int module, ExpandShared<STEPS>& sm) {
  Columns<STEPS> columns;
  bool have_columns = false;
  Run run(p);
  int row = 0;  // that this thread will tell the others
  auto look_ahead = [&] {
    if (run.left == 0) return;
    const Piece w = run.piece(p);
    if (w.begin + threadIdx.x < w.end) row = __ldg(p.row_order + w.tile.row_begin + w.begin + threadIdx.x) * (p.d_out / 8);
  };
  for (look_ahead(); run.left > 0;) {
    const Piece w = run.piece(p);
    const int column = run.column + (threadIdx.x >> 5) * 64, rows = w.end - w.begin, begin = w.tile.row_begin + w.begin;
    const Module& m = p.modules[module];
    const int* entry = m.entries + w.tile.slot * 5;
    const int rank = min(__ldg(entry + 2), p.max_rank);
    if (rows <= 0 || (rank == 0 && p.accumulate)) {  // smaller than the largest tile, or nothing to add
      run.skip(p);
      look_ahead();
      have_columns = false;
      continue;
    }
    __syncthreads();  // the last piece's rows are done with
    if (threadIdx.x < rows) sm.rows[threadIdx.x] = row;
    const bool fresh = column < p.d_out && !have_columns;
    if (fresh) {
      const int64_t weight_row = __ldg(entry + 1) + w.tile.expert * __ldg(entry + 4);
      columns.fetch(p.b_pool + weight_row * p.d_out + column + (threadIdx.x & 31) / 4 * 8, p.d_out, rank);
    }
    __syncthreads();
    auto begin_rows = [&] {
      if (p.behind) wait_for_previous();
      load_h(p, h_row(p, module, begin), rows, rank, sm);
      if (fresh) columns.turn();
      const int column_before = run.column;
      run.skip(p);
      look_ahead();
      if (run.left > 0) {
        const Item next = load_tile(p, run.tile);
        have_columns = next.slot == w.tile.slot && next.expert == w.tile.expert && run.column == column_before;
      }
      copies_wait<0>();
      __syncthreads();
    };
    if (p.accumulate) expand_rows<true, STEPS, AHEAD>(p, m.y, rows, column, columns, sm, begin_rows);
    else expand_rows<false, STEPS, 1>(p, m.y, rows, column, columns, sm, begin_rows);
  }
}

template <int STEPS, int AHEAD>
__device__ __forceinline__ void expand_tiles(const TileArgs& p, ExpandShared<STEPS>& sm) {
#pragma unroll 1
  for (int module = 0; module < p.num_modules; ++module) expand_module<STEPS, AHEAD>(p, module, sm);
}

// For ranks that leave no registers for a second CTA on an SM; smaller ones are both_kernel's.
template <int STEPS, int AHEAD>
__global__ void __launch_bounds__(kTileThreads, 1) expand_tiles_kernel(const __grid_constant__ TileArgs p) {
  extern __shared__ __align__(16) unsigned char expand_raw[];
  let_next_begin();
  expand_tiles<STEPS, AHEAD>(p, *reinterpret_cast<ExpandShared<STEPS>*>(expand_raw));
  wait_for_previous();
}

}  // namespace lora_jax
