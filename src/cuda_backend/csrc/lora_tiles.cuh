// Grouped LoRA on Hopper for adapters with many rows: h = scaling * x A^T, then y += h B, two kernels.
//
// A tile is up to kTileRows rows of one segment, in any order of rows. Both kernels give a row the
// very bits that pair_kernel (lora_gemm.cuh) gives it: the same products in each mma, the same order
// of sums. So which of them serves a segment may follow from the batch, and no result shows it.
//
//   shrink  A cluster of 4 CTAs shares out the rows of a tile, and each CTA copies a quarter of the
//           weights into all four, so that weights leave L2 once a tile. A part of a sum over k must
//           be added in the order of k: so a CTA has whole sums, a warp each of their four parts.
//   expand  A warp keeps its 64 columns of B in registers and streams rows past them: y is read
//           ahead into registers, updated and written back, nothing of it sees shared memory. CTAs
//           take equal runs of (512 columns, tile, 8 rows).
#pragma once
#include "cluster.cuh"
#include "tile_args.cuh"

namespace lora_jax {

constexpr int kCluster = 4;      // CTAs that share a tile's weights
constexpr int kCtaRows = 40;     // of a tile, at most; every kCluster-th row is one CTA's
constexpr int kTileRows = kCluster * kCtaRows, kLeastTileRows = 32;  // of a tile, unless its segment has fewer
constexpr int kParts = 4;        // of a sum over k, a warp each
constexpr int kPassRanks = 64;   // rank rows that a shrink takes at once
constexpr int kWeightBox = 8 * 128 * 2;  // bytes that one copy brings of A
static_assert(kParts == kConsumers, "sums must have the order of pair_kernel");

__device__ __forceinline__ Item load_tile(const TileArgs& p, int tile) {
  const int4 v = __ldg(reinterpret_cast<const int4*>(p.tiles) + tile);
  return Item{v.x, v.y, v.z, v.w};
}

// ---------------------------------------------------------------- shrink
constexpr int kShrinkRowWarps = 3;  // one alone issues about a row copy in 60 cycles; with a 9th warp registers are short
constexpr int kShrinkThreads = (kParts + 1 + kShrinkRowWarps) * 32;
constexpr int kShrinkBlocks = kCtaRows / 8, kShrinkRanks16 = kPassRanks / 16;

// A stage holds weights [block of 128 columns][group of 8 ranks][2][8][64], then rows of x.
template <int BLOCKS, int STAGES>
struct ShrinkShared {
  static constexpr int kStages = STAGES, kColumns = BLOCKS * 128, kRowStride = kColumns * 2 + 16;
  static constexpr int kRowsAt = BLOCKS * (kPassRanks / 8) * kWeightBox;
  static constexpr int kStage = (kRowsAt + kCtaRows * kRowStride + 1023) / 1024 * 1024;
  static constexpr int kLd = kPassRanks + 1;  // floats of a row of sums
  static_assert(kParts * kCtaRows * kLd * 4 <= kStage, "all parts of the sums must fit a stage");
  alignas(1024) unsigned char stages[STAGES][kStage];
  alignas(8) uint64_t full[STAGES], empty[STAGES];
};

// A unit of a cluster: 64 rank rows of a tile. The last CTAs of a cluster may have a row less.
struct ShrinkUnit {
  Item tile;
  int first_rank, ranks, rank;  // of the unit; of the slot
  int weight_row, rows;         // rows of this CTA
};

// Calls f with every unit of this CTA's cluster, in order.
template <class F>
__device__ __forceinline__ void each_unit(const TileArgs& p, F f) {
  const int passes = (p.max_rank + kPassRanks - 1) / kPassRanks, cta = cluster_rank();
  int unit = static_cast<int>(blockIdx.x) / kCluster;
  ShrinkUnit u{load_tile(p, min(unit / passes, p.most_tiles - 1))};  // before it is known how many there are
  for (const int units = p.cut[0] * passes; unit < units; u.tile = load_tile(p, min(unit, units - 1) / passes)) {
    const int* entry = p.entries + u.tile.slot * 5;
    u.rank = min(__ldg(entry + 2), p.max_rank);
    u.first_rank = unit % passes * kPassRanks;
    u.ranks = min(u.rank - u.first_rank, kPassRanks);
    u.weight_row = __ldg(entry) + u.tile.expert * __ldg(entry + 3) + u.first_rank;
    u.rows = (u.tile.num_rows - cta + kCluster - 1) / kCluster;
    if (u.ranks > 0) f(u);
    unit += gridDim.x / kCluster;
  }
}

// Every CTA copies some of the weights, into all of the cluster.
template <class S>
__device__ void copy_weights(const TileArgs& p, S& sm) {
  const int lane = threadIdx.x & 31, cta = cluster_rank();
  Ring<S::kStages> ring;
  each_unit(p, [&](const ShrinkUnit& u) {
    const int groups = (u.ranks + 7) / 8;
    for (int k = 0; k < p.d_in; k += S::kColumns) {
      mbar_wait(&sm.empty[ring.at()], ring.phase() ^ 1);
      const int boxes = (min(S::kColumns, p.d_in - k) + 127) / 128 * groups;
      if (lane == 0) mbar_expect(&sm.full[ring.at()], boxes * kWeightBox);
      __syncwarp();
      const uint32_t dst = smem_u32(sm.stages[ring.at()]);
      for (int i = lane * kCluster + cta; i < boxes; i += 32 * kCluster)
        cluster_box_copy(dst + i * kWeightBox, &p.a_map, u.weight_row + i % groups * 8, k / 64 + i / groups * 2,
                         &sm.full[ring.at()], (1 << kCluster) - 1);
      ring.next();
    }
  });
}

template <class S>
__device__ void copy_rows(const TileArgs& p, S& sm) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) - kParts - 1, n = lane * kShrinkRowWarps + warp;
  const int cta = cluster_rank();
  Ring<S::kStages> ring;
  each_unit(p, [&](const ShrinkUnit& u) {
    const __nv_bfloat16* from = p.x;
    if (n < u.rows) from += static_cast<int64_t>(__ldg(p.row_order + u.tile.row_begin + n * kCluster + cta)) * p.d_in;
    const int mine = (u.rows + kShrinkRowWarps - 1 - warp) / kShrinkRowWarps;
    for (int k = 0; k < p.d_in; k += S::kColumns) {
      mbar_wait(&sm.empty[ring.at()], ring.phase() ^ 1);
      const int bytes = min(S::kColumns, p.d_in - k) * 2;
      if (lane == 0) mbar_expect(&sm.full[ring.at()], mine * bytes);
      __syncwarp();
      const uint32_t to = smem_u32(sm.stages[ring.at()]) + S::kRowsAt + n * S::kRowStride;
      if (n < u.rows) bulk_copy(to, from + k, bytes, &sm.full[ring.at()]);
      ring.next();
    }
  });
}

// Which of 8 rows lane group g reads: so that neighbours meet distinct banks.
__device__ __forceinline__ int spread(int g) { return g >> 1 | (g & 1) << 2; }

// One stage of this warp's part, 32 of every 128 columns. See shrink_stage for the two chains.
template <class S>
__device__ __forceinline__ void shrink_columns(const ShrinkUnit& u, uint32_t base, int columns,
                                               float (&acc)[2][kShrinkRanks16][kShrinkBlocks][4]) {
  const int part = threadIdx.x >> 5, lane = threadIdx.x & 31, g = spread(lane >> 2), q = lane & 3;
  const int groups = (u.ranks + 7) / 8;
  const uint32_t weights = base + (part >> 1) * 1024 + g * 128 + ((((part & 1) * 4 + q) ^ g) << 4);
  const uint32_t x = base + S::kRowsAt + g * S::kRowStride + q * 16;
#pragma unroll 1
  for (int k = part * 32; k < columns; k += 32 * kParts) {
    uint4 v[kShrinkBlocks];  // rows past the end are not used
#pragma unroll
    for (int j = 0; j < kShrinkBlocks; ++j) v[j] = lds128(x + j * 8 * S::kRowStride + k * 2);
#pragma unroll
    for (int m = 0; m < kShrinkRanks16; ++m) {
      if (m * 2 >= groups) break;
      const uint32_t at = weights + ((k >> 7) * groups + m * 2) * kWeightBox;
      const uint4 lo = lds128(at), hi = lds128(m * 2 + 1 < groups ? at + kWeightBox : at);
#pragma unroll
      for (int j = 0; j < kShrinkBlocks; ++j) {
        mma_bf16(acc[0][m][j], lo.x, hi.x, lo.y, hi.y, v[j].x, v[j].y);
        mma_bf16(acc[1][m][j], lo.z, hi.z, lo.w, hi.w, v[j].z, v[j].w);
      }
    }
  }
}

// Adds the parts in order and writes this CTA's rows of h; `sums` is the unit's last stage.
template <class S>
__device__ __forceinline__ void finish_unit(const TileArgs& p, const ShrinkUnit& u, float* sums,
                                            const float (&acc)[2][kShrinkRanks16][kShrinkBlocks][4]) {
  const int part = threadIdx.x >> 5, lane = threadIdx.x & 31, g = spread(lane >> 2), q = lane & 3;
  consumer_barrier(kParts * 32);  // all have read the last stage
#pragma unroll
  for (int m = 0; m < kShrinkRanks16; ++m)
#pragma unroll
    for (int j = 0; j < kShrinkBlocks; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        sums[(part * kCtaRows + j * 8 + spread(q * 2 + (c & 1))) * S::kLd + m * 16 + g + (c >> 1) * 8] =
            acc[0][m][j][c] + acc[1][m][j][c];
  consumer_barrier(kParts * 32);
  const float scaling = __ldg(p.scaling + u.tile.slot);
  const int pairs = (u.ranks + 7) / 8 * 4;
  for (int i = threadIdx.x; i < u.rows * pairs; i += kParts * 32) {
    const int n = i / pairs, r = i % pairs * 2;
    float lo = 0.f, hi = 0.f;
#pragma unroll
    for (int w = 0; w < kParts; ++w) {
      lo += sums[(w * kCtaRows + n) * S::kLd + r];
      hi += sums[(w * kCtaRows + n) * S::kLd + r + 1];
    }
    __nv_bfloat16* h = p.h + static_cast<int64_t>(u.tile.row_begin + n * kCluster + cluster_rank()) * p.h_stride;
    *reinterpret_cast<__nv_bfloat162*>(h + u.first_rank + r) =
        __floats2bfloat162_rn(r < u.ranks ? lo * scaling : 0.f, r + 1 < u.ranks ? hi * scaling : 0.f);
  }
  fence_copies();  // which write here next
}

template <class S>
__device__ void multiply(const TileArgs& p, S& sm) {
  const int lane = threadIdx.x & 31;
  Ring<S::kStages> ring;
  auto release = [&] {
    __syncwarp();
    if (lane < kCluster) cluster_arrive(&sm.empty[ring.at()], lane);
    ring.next();
  };
  each_unit(p, [&](const ShrinkUnit& u) {
    float acc[2][kShrinkRanks16][kShrinkBlocks][4] = {};
    for (int k = 0; k < p.d_in; k += S::kColumns) {
      mbar_wait(&sm.full[ring.at()], ring.phase());
      shrink_columns<S>(u, smem_u32(sm.stages[ring.at()]), min(S::kColumns, p.d_in - k), acc);
      if (k + S::kColumns < p.d_in) release();
    }
    finish_unit<S>(p, u, reinterpret_cast<float*>(sm.stages[ring.at()]), acc);
    release();
  });
}

template <class S>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kShrinkThreads, 1)
    shrink_tiles_kernel(const __grid_constant__ TileArgs p) {
  extern __shared__ __align__(1024) unsigned char shrink_raw[];
  auto& sm = *reinterpret_cast<S*>(shrink_raw);
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kStages; ++i) {
      mbar_init(&sm.full[i], 1 + kShrinkRowWarps);
      mbar_init(&sm.empty[i], kParts * kCluster);
    }
    fence_barriers();
  }
  let_next_begin();
  cluster_sync();
  const int warp = threadIdx.x >> 5;
  if (warp < kParts) multiply(p, sm);
  else if (warp == kParts) copy_weights(p, sm);
  else copy_rows(p, sm);
  cluster_sync();  // nobody may end while others still write to its memory
}

// ---------------------------------------------------------------- expand
constexpr int kTileWarps = 8, kTileThreads = kTileWarps * 32;
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

  // Only reads; `settle` waits for what comes and pairs neighbouring rows.
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
        a[s][0][i] = w.x, a[s][1][i] = w.y, a[s][2][i] = w.z, a[s][3][i] = w.w;
      }
  }
  __device__ __forceinline__ void settle() {
#pragma unroll
    for (int s = 0; s < STEPS; ++s)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t(&r)[4] = a[s][i];
        const uint32_t even = r[0], odd = r[1], even8 = r[2], odd8 = r[3];
        r[0] = __byte_perm(even, odd, 0x5410), r[1] = __byte_perm(even, odd, 0x7632);
        r[2] = __byte_perm(even8, odd8, 0x5410), r[3] = __byte_perm(even8, odd8, 0x7632);
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
__device__ __forceinline__ void load_h(const TileArgs& p, int begin, int rows, int rank, ExpandShared<STEPS>& sm) {
  const uint32_t base = smem_u32(sm.h);
  const int groups = (rank + 7) / 8;
#pragma unroll 1
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
      update_rows<STEPS>(columns, h + n * ExpandShared<STEPS>::kStride, ahead[d]);
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (n + q * 2 + e < rows) __stcs(at(n + q * 2 + e), ahead[d][e]);
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
    if (run.left == 0) return;
    const Piece w = run.piece(p);
    if (w.begin + threadIdx.x < w.end) row = __ldg(p.row_order + w.tile.row_begin + w.begin + threadIdx.x);
  };
  for (look_ahead(); run.left > 0;) {
    const Piece w = run.piece(p);
    const int column = run.column + (threadIdx.x >> 5) * 64, rows = w.end - w.begin, begin = w.tile.row_begin + w.begin;
    const int* entry = p.entries + w.tile.slot * 5;
    const int rank = min(__ldg(entry + 2), p.max_rank);
    if (rows <= 0 || rank == 0) {  // smaller than the largest tile
      run.skip(p);
      look_ahead();
      have_columns = false;
      continue;
    }
    __syncthreads();  // the last piece's rows are done with
    if (threadIdx.x < rows) sm.rows[threadIdx.x] = row;
    if (h_ready) load_h(p, begin, rows, rank, sm);
    const bool fresh = column < p.d_out && !have_columns;
    if (fresh) {
      const int64_t weight_row = __ldg(entry + 1) + w.tile.expert * __ldg(entry + 4);
      columns.fetch(p.b_pool + weight_row * p.d_out + column + (threadIdx.x & 31) / 4 * 8, p.d_out, rank);
    }
    __syncthreads();
    expand_rows<STEPS, AHEAD>(p, rows, column, columns, sm, [&] {
      if (fresh) columns.settle();
      const int columns_before = run.column;
      run.skip(p);
      look_ahead();
      if (run.left > 0) {
        const Item next = load_tile(p, run.tile);
        have_columns = next.slot == w.tile.slot && next.expert == w.tile.expert && run.column == columns_before;
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
