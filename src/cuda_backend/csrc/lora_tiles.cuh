// Grouped LoRA on Hopper for adapters with many rows: h = scaling * x A^T, then y += h B, two kernels.
//
// A tile is up to kTileRows rows of one segment, in any order of rows. Both kernels give a row the
// very bits that pair_kernel (lora_gemm.cuh) gives it: the same products in each mma, the same order
// of sums. So which of them serves a segment may follow from the batch, and no result shows it.
//
//   shrink  A cluster of 4 CTAs shares out the 4 parts of a sum over k (k / 32 mod 4), because each
//           part must be added in the order of k by one thread. So a CTA reads pieces of 64 bytes of
//           rows and weights, whole lines between the four, and weights once a tile. The parts
//           meet over distributed shared memory, in order.
//   expand  A warp keeps its 64 columns of B in registers and streams rows past them: y is read
//           ahead into registers, updated and written back, nothing of it sees shared memory. CTAs
//           take equal runs of (512 columns, tile, 8 rows).
#pragma once
#include "cluster.cuh"
#include "lora_units.cuh"

namespace lora_jax {

#ifndef COPY_X
#define COPY_X copy_16
#endif
constexpr int kTileRows = 128, kLeastTileRows = 32;  // of a tile, unless its segment has fewer
constexpr int kTileWarps = 8, kTileThreads = kTileWarps * 32;
constexpr int kParts = 4;       // of a sum over k, the consumer warps of pair_kernel
constexpr int kPartColumns = 32;
static_assert(kParts == kConsumers, "sums must have the order of pair_kernel");

struct TileArgs {
  const Item* tiles;
  const int* cut;                   // [2]: number of tiles; blocks of 8 rows in the largest
  const int* row_order;             // sorted place -> row of x and y
  const int* entries;               // [slots, 5]: a_offset, b_offset, rank, a_stride, b_stride
  const float* scaling;             // [slots]
  const __nv_bfloat16 *x, *a_pool;  // [rows, d_in], [pool rows, d_in]
  const __nv_bfloat16* b_pool;      // [pool rows, d_out]
  __nv_bfloat16* y;                 // [rows, d_out]
  __nv_bfloat16* h;                 // [sorted rows, h_stride]
  int d_in, d_out, h_stride, max_rank, most_tiles;
  bool behind;                      // expand: h comes from the kernel before
};

__device__ __forceinline__ Item load_tile(const TileArgs& p, int tile) {
  const int4 v = __ldg(reinterpret_cast<const int4*>(p.tiles) + tile);
  return Item{v.x, v.y, v.z, v.w};
}

// ---------------------------------------------------------------- shrink
// How the warps of a CTA share a tile: MT x 16 rank rows by J x 8 rows each.
template <int RANKS, int ROWS, int BLOCKS, int STAGES>
struct ShrinkShape {
  static constexpr int kMT = RANKS >= 32 ? 2 : 1;
  static constexpr int kRankGroups = RANKS / (kMT * 16), kRowGroups = kTileWarps / kRankGroups;
  static constexpr int kJ = ROWS / 8 / kRowGroups;
  static constexpr int kBlockBytes = (ROWS + RANKS) * kPartColumns * 2, kStage = BLOCKS * kBlockBytes;
  static constexpr int kLd = RANKS + 2;  // floats of a row of sums
  static constexpr int kBytes = STAGES * kStage > ROWS * kLd * 4 ? STAGES * kStage : ROWS * kLd * 4;
  static_assert(kJ * 8 * kRowGroups == ROWS, "rows must share out evenly");
};

// The 16 bytes that a thread copies of each block of 128 k: of some rows of x, of some of A.
template <int RANKS, int ROWS>
struct ShrinkCopies {
  static constexpr int kStep = kTileThreads / 4;
  static constexpr int kX = (ROWS + kStep - 1) / kStep, kA = (RANKS + kStep - 1) / kStep;
  const __nv_bfloat16 *x[kX], *a[kA];  // null: no such row

  __device__ ShrinkCopies(const TileArgs& p, const Item& t, int part, int weight_row, int ranks) {
    const int first = threadIdx.x >> 2, column = part * kPartColumns + (threadIdx.x & 3) * 8;
#pragma unroll
    for (int i = 0; i < kX; ++i) {
      const int n = first + i * kStep;
      x[i] = n < t.num_rows ? p.x + static_cast<int64_t>(__ldg(p.row_order + t.row_begin + n)) * p.d_in + column : nullptr;
    }
#pragma unroll
    for (int i = 0; i < kA; ++i) {
      const int r = first + i * kStep;
      a[i] = r < ranks ? p.a_pool + static_cast<int64_t>(weight_row + r) * p.d_in + column : nullptr;
    }
  }
  __device__ __forceinline__ void issue(uint32_t base, int64_t k) const {
    const uint32_t mine = base + threadIdx.x * 16;
#pragma unroll
    for (int i = 0; i < kX; ++i)
      if (x[i]) COPY_X(mine + i * kStep * 64, x[i] + k, 16);
#pragma unroll
    for (int i = 0; i < kA; ++i)
      if (a[i]) copy_16(mine + (ROWS + i * kStep) * 64, a[i] + k, 16);
  }
};

// One block of 128 k, of which this CTA has its part of 32. See shrink_stage for the two chains.
template <class S, int ROWS>
__device__ __forceinline__ void shrink_block(uint32_t base, int row_blocks, float (&acc)[2][S::kMT][S::kJ][4]) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int rank_group = warp / S::kRowGroups, row_group = warp % S::kRowGroups;
  const uint32_t a = base + (ROWS + rank_group * S::kMT * 16) * 64 + lane * 16, x = base + lane * 16;
  uint4 w[S::kMT * 2];
#pragma unroll
  for (int i = 0; i < S::kMT * 2; ++i) w[i] = lds128(a + i * 512);
#pragma unroll
  for (int j = 0; j < S::kJ; ++j) {
    const int block = row_group + j * S::kRowGroups;
    if (block < row_blocks) {
      const uint4 v = lds128(x + block * 512);
#pragma unroll
      for (int m = 0; m < S::kMT; ++m) {
        mma_bf16(acc[0][m][j], w[m * 2].x, w[m * 2 + 1].x, w[m * 2].y, w[m * 2 + 1].y, v.x, v.y);
        mma_bf16(acc[1][m][j], w[m * 2].z, w[m * 2 + 1].z, w[m * 2].w, w[m * 2 + 1].w, v.z, v.w);
      }
    }
  }
}

// Puts this CTA's part of the sums into `sums` [row][rank], adds the cluster's parts in order for
// every 4th row, and writes h.
template <class S>
__device__ __forceinline__ void finish_tile(const TileArgs& p, const Item& t, int rank, float* sums,
                                            const float (&acc)[2][S::kMT][S::kJ][4]) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  const int rank_group = warp / S::kRowGroups, row_group = warp % S::kRowGroups;
#pragma unroll
  for (int m = 0; m < S::kMT; ++m)
#pragma unroll
    for (int j = 0; j < S::kJ; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int n = (row_group + j * S::kRowGroups) * 8 + q * 2 + (c & 1);
        sums[n * S::kLd + (rank_group * S::kMT + m) * 16 + g + (c >> 1) * 8] = acc[0][m][j][c] + acc[1][m][j][c];
      }
  cluster_sync();
  const float scaling = __ldg(p.scaling + t.slot);
  const int pairs = (rank + 7) / 8 * 4, rows = (t.num_rows - cluster_rank() + kParts - 1) / kParts;
  for (int i = threadIdx.x; i < rows * pairs; i += kTileThreads) {
    const int n = i / pairs * kParts + cluster_rank(), r = i % pairs * 2;
    float lo = 0.f, hi = 0.f;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const float2 v = cluster_load(smem_u32(sums + n * S::kLd + r), part);
      lo += v.x, hi += v.y;
    }
    const __nv_bfloat162 v =
        __floats2bfloat162_rn(r < rank ? lo * scaling : 0.f, r + 1 < rank ? hi * scaling : 0.f);
    *reinterpret_cast<__nv_bfloat162*>(p.h + static_cast<int64_t>(t.row_begin + n) * p.h_stride + r) = v;
  }
  cluster_sync();  // the others have read; the next tile's copies may come
}

template <int RANKS, int ROWS, int BLOCKS, int STAGES>
__device__ void shrink_tile(const TileArgs& p, const Item& t, unsigned char* shared) {
  using S = ShrinkShape<RANKS, ROWS, BLOCKS, STAGES>;
  const int* entry = p.entries + t.slot * 5;
  const int rank = min(__ldg(entry + 2), p.max_rank), part = cluster_rank();
  const ShrinkCopies<RANKS, ROWS> copies(p, t, part, __ldg(entry) + t.expert * __ldg(entry + 3), (rank + 7) / 8 * 8);
  const int blocks = (p.d_in - part * kPartColumns + 127) / 128, row_blocks = (t.num_rows + 7) / 8;
  const int steps = (blocks + BLOCKS - 1) / BLOCKS;
  const uint32_t base = smem_u32(shared);
  auto issue = [&](int step) {
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) {
      const int block = step * BLOCKS + i;
      if (block < blocks) copies.issue(base + step % STAGES * S::kStage + i * S::kBlockBytes, block * 128);
    }
    copies_commit();
  };
  for (int i = 0; i < STAGES - 1; ++i) issue(i);
  float acc[2][S::kMT][S::kJ][4] = {};
  for (int step = 0; step < steps; ++step) {
    copies_wait<STAGES - 2>();
    __syncthreads();
    issue(step + STAGES - 1);
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i)
      if (step * BLOCKS + i < blocks)
        shrink_block<S, ROWS>(base + step % STAGES * S::kStage + i * S::kBlockBytes, row_blocks, acc);
  }
  copies_wait<0>();
  __syncthreads();
  finish_tile<S>(p, t, rank, reinterpret_cast<float*>(shared), acc);
}

template <int RANKS, int ROWS, int BLOCKS, int STAGES, int CTAS>
__global__ void __cluster_dims__(kParts, 1, 1) __launch_bounds__(kTileThreads, CTAS)
    shrink_tiles_kernel(const __grid_constant__ TileArgs p) {
  extern __shared__ __align__(16) unsigned char shrink_raw[];
  let_next_begin();
  int tile = blockIdx.x / kParts;
  Item t = load_tile(p, min(tile, p.most_tiles - 1));  // before it is known how many there are
  for (const int num_tiles = p.cut[0]; tile < num_tiles; t = load_tile(p, min(tile, num_tiles - 1))) {
    shrink_tile<RANKS, ROWS, BLOCKS, STAGES>(p, t, shrink_raw);
    tile += gridDim.x / kParts;
  }
}

// ---------------------------------------------------------------- expand
constexpr int kColumnGroup = kTileWarps * 64;  // a warp has 64 columns, a lane 8 of them

template <int STEPS>
struct ExpandShared {
  static constexpr int kStride = STEPS * 32 + 16;  // bytes of a row of h: rows on distinct banks
  unsigned char h[kTileRows * kStride];
  int rows[kTileRows];
};

// The warp's 64 columns of B as mma operands: see expand_block. Rows past the rank are zero.
template <int STEPS>
struct Columns {
  uint32_t a[STEPS][4][4];

  __device__ __forceinline__ void load(const __nv_bfloat16* b, int64_t d_out, int rank) {
    const int q = threadIdx.x & 3;
    auto row = [&](int k) {
      return k < rank ? __ldg(reinterpret_cast<const uint4*>(b + k * d_out)) : make_uint4(0, 0, 0, 0);
    };
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const int k = s * 16 + q * 2;
      const uint4 w0 = row(k), w1 = row(k + 1), w2 = row(k + 8), w3 = row(k + 9);
      pair(s, 0, w0.x, w1.x, w2.x, w3.x);
      pair(s, 1, w0.y, w1.y, w2.y, w3.y);
      pair(s, 2, w0.z, w1.z, w2.z, w3.z);
      pair(s, 3, w0.w, w1.w, w2.w, w3.w);
    }
  }
  __device__ __forceinline__ void pair(int s, int i, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
    a[s][i][0] = __byte_perm(r0, r1, 0x5410), a[s][i][1] = __byte_perm(r0, r1, 0x7632);
    a[s][i][2] = __byte_perm(r2, r3, 0x5410), a[s][i][3] = __byte_perm(r2, r3, 0x7632);
  }
};

// Sums of 8 rows x 64 columns: a lane has columns 8 * g + 2 * i and the next, of rows 2 * q and the next.
template <int STEPS>
__device__ __forceinline__ void multiply_rows(const Columns<STEPS>& columns, uint32_t h, float (&acc)[4][4]) {
#pragma unroll
  for (int s = 0; s < STEPS; s += 2) {
    uint32_t v[4];
    ldmatrix(v, h + s * 32);
#pragma unroll
    for (int e = 0; e < 2; ++e)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t(&a)[4] = columns.a[s + e][i];
        mma_bf16(acc[i], a[0], a[1], a[2], a[3], v[e * 2], v[e * 2 + 1]);
      }
  }
}

// Some of a CTA's work: rows [begin, end) of a tile, for 512 columns.
struct Piece {
  Item tile;
  int begin, end, column;
};

// The CTA's run of units (512 columns, tile, 8 rows), one piece after the other; equal runs balance.
// Holds next to nothing, for registers are short: pieces are looked up anew.
struct Run {
  int unit, last;

  __device__ explicit Run(const TileArgs& p) {
    const int64_t groups = (p.d_out + kColumnGroup - 1) / kColumnGroup, total = groups * p.cut[0] * p.cut[1];
    unit = static_cast<int>(total * blockIdx.x / gridDim.x);
    last = static_cast<int>(total * (blockIdx.x + 1) / gridDim.x);
  }
  __device__ __forceinline__ Piece piece(const TileArgs& p) const {
    const int tiles = __ldg(p.cut), tile_blocks = __ldg(p.cut + 1), tile = unit / tile_blocks;
    Piece w{load_tile(p, tile % tiles)};
    w.column = tile / tiles * kColumnGroup;
    w.begin = unit % tile_blocks * 8, w.end = min(min(tile_blocks, unit % tile_blocks + last - unit) * 8, w.tile.num_rows);
    return w;
  }
  // Moves on to the first piece from here that has rows, if there is one.
  __device__ __forceinline__ void settle(const TileArgs& p) {
    while (unit < last) {
      const Piece w = piece(p);
      if (w.begin < w.end) return;
      skip(p);
    }
  }
  __device__ __forceinline__ void skip(const TileArgs& p) {
    const int tile_blocks = __ldg(p.cut + 1);
    unit = min(last, (unit / tile_blocks + 1) * tile_blocks);
  }
};

template <int STEPS>
__device__ __forceinline__ void load_h(const TileArgs& p, int begin, int rows, int rank, ExpandShared<STEPS>& sm) {
  const uint32_t base = smem_u32(sm.h);
  const int groups = (rank + 7) / 8;
  for (int i = threadIdx.x; i < rows * STEPS * 2; i += kTileThreads) {
    const int n = i / (STEPS * 2), c = i % (STEPS * 2);  // past the rank: zeros
    const __nv_bfloat16* from = p.h + static_cast<int64_t>(begin + n) * p.h_stride;
    copy_16(base + n * ExpandShared<STEPS>::kStride + c * 16, c < groups ? from + c * 8 : from, c < groups ? 16 : 0);
  }
  copies_commit();
}

// The warp's share of a piece: y is read AHEAD x 8 rows before it is needed. `begin` runs while the
// first reads are on their way, and returns when h is there.
template <int STEPS, int AHEAD, class Begin>
__device__ __forceinline__ void expand_rows(const TileArgs& p, int rows, int column, const Columns<STEPS>& columns,
                                            ExpandShared<STEPS>& sm, Begin begin) {
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  const bool mine = column < p.d_out;
  __nv_bfloat16* y = p.y + column + g * 8;
  uint4 ahead[AHEAD][2];
  auto at = [&](int n) { return reinterpret_cast<uint4*>(y + static_cast<int64_t>(sm.rows[n]) * p.d_out); };
  auto fetch = [&](int n0, uint4(&v)[2]) {
#pragma unroll
    for (int e = 0; e < 2; ++e)
      if (mine && n0 + q * 2 + e < rows) v[e] = __ldcs(at(n0 + q * 2 + e));
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
      float acc[4][4] = {};
      multiply_rows<STEPS>(columns, h + n * ExpandShared<STEPS>::kStride, acc);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        uint4 o = ahead[d][e];
        o.x = add_bf16x2(o.x, acc[0][e], acc[0][e + 2]);
        o.y = add_bf16x2(o.y, acc[1][e], acc[1][e + 2]);
        o.z = add_bf16x2(o.z, acc[2][e], acc[2][e + 2]);
        o.w = add_bf16x2(o.w, acc[3][e], acc[3][e + 2]);
        if (n + q * 2 + e < rows) __stcs(at(n + q * 2 + e), o);
      }
      fetch(n + AHEAD * 8, ahead[d]);
    }
  }
}

template <int STEPS, int AHEAD, int CTAS>
__global__ void __launch_bounds__(kTileThreads, CTAS) expand_tiles_kernel(const __grid_constant__ TileArgs p) {
  extern __shared__ __align__(16) unsigned char expand_raw[];
  auto& sm = *reinterpret_cast<ExpandShared<STEPS>*>(expand_raw);
  Columns<STEPS> columns;
  bool have_columns = false, h_ready = !p.behind;
  Run run(p);
  int row = 0;  // that this thread will tell the others
  auto look_ahead = [&] {
    run.settle(p);
    if (run.unit >= run.last) return;
    const Piece w = run.piece(p);
    if (w.begin + threadIdx.x < w.end) row = __ldg(p.row_order + w.tile.row_begin + w.begin + threadIdx.x);
  };
  for (look_ahead(); run.unit < run.last;) {
    const Piece w = run.piece(p);
    const int column = w.column + (threadIdx.x >> 5) * 64, rows = w.end - w.begin, begin = w.tile.row_begin + w.begin;
    const int* entry = p.entries + w.tile.slot * 5;
    const int rank = min(__ldg(entry + 2), p.max_rank);
    __syncthreads();  // the last piece's rows are done with
    if (threadIdx.x < rows) sm.rows[threadIdx.x] = row;
    if (h_ready) load_h(p, begin, rows, rank, sm);
    if (column < p.d_out && !have_columns) {
      const int64_t weight_row = __ldg(entry + 1) + w.tile.expert * __ldg(entry + 4);
      columns.load(p.b_pool + weight_row * p.d_out + column + (threadIdx.x & 31) / 4 * 8, p.d_out, rank);
    }
    __syncthreads();
    expand_rows<STEPS, AHEAD>(p, rank > 0 ? rows : 0, column, columns, sm, [&] {
      run.skip(p);
      look_ahead();
      if (run.unit < run.last) {
        const Piece next = run.piece(p);
        have_columns = next.tile.slot == w.tile.slot && next.tile.expert == w.tile.expert && next.column == w.column;
      }
      if (!h_ready) wait_for_previous(), load_h(p, begin, rows, rank, sm);
      h_ready = true;
      copies_wait<0>();
      __syncthreads();
    });
  }
  if (!h_ready) wait_for_previous();
}

}  // namespace lora_jax
