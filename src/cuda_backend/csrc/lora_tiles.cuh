// Grouped LoRA on Hopper for adapters with many rows: h = scaling * x A^T, then y += h B, two kernels.
//
// A tile is up to kTileRows rows of one segment, in any order of rows. Both kernels give a row the
// very bits that pair_kernel (lora_gemm.cuh) gives it: the same products in each mma, the same order
// of sums. So which of them serves a segment may follow from the batch, and no result shows it.
//
//   shrink  A cluster of 4 CTAs shares out the rows of a tile, and each CTA copies a quarter of the
//           weights into all four, so that weights leave L2 once a tile. A part of a sum over k must
//           be added in the order of k: so a CTA has whole sums, a warp each of their four parts.
//   expand  (expand_tiles.cuh) A warp keeps its 64 columns of B in registers and streams rows past them: y is read
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

}  // namespace lora_jax
