// Grouped LoRA on Hopper for adapters with many rows: h = scaling * x A^T, then y += h B, two kernels.
//
// A tile is up to 192 rows of one segment, in any order of rows. Both kernels give a row the very bits
// that pair_kernel (lora_gemm.cuh) gives it: the same products in each mma, the same order of sums. So
// which of them serves a segment may follow from the batch, and no result shows it.
//
//   shrink  A cluster of 4 CTAs works through a tile. Each CTA takes one of the four parts of the sums
//           over k, so that A leaves L2 once a tile: its rows of x go from memory straight to registers,
//           read steps ahead, A through a ring in shared memory. CTAs send each other the parts of
//           their rows, and add them in order.
//   expand  (expand_tiles.cuh) begins meanwhile: B and y are on their way when h comes.
#pragma once
#include "cluster.cuh"
#include "tile_args.cuh"

namespace lora_jax {

constexpr int kCluster = 4;                                          // CTAs, and parts of a sum over k
constexpr int kShrinkWarps = 8, kShrinkThreads = (kShrinkWarps + 4) * 32;  // one of the last copies A
constexpr int kWarpBlocks = 3;                                       // of 8 rows that a warp shrinks
constexpr int kMostBlocks = kShrinkWarps * kWarpBlocks;
constexpr int kStageSteps = 8;                                       // of 128 columns of A in a stage
static_assert(kMostBlocks * 8 == kTileRows, "a tile's rows must fit its cluster");
static_assert(kCluster == kConsumers, "sums must have the order of pair_kernel");

// A stage holds a part of A as [group of 8 ranks][step][8][32].
template <int RANKS, int STAGES>
struct ShrinkShared {
  static constexpr int kStages = STAGES, kRanks16 = RANKS / 16;  // of a pass
  static constexpr int kGroup = kStageSteps * 512, kStage = kRanks16 * 2 * kGroup;
  alignas(1024) unsigned char stages[STAGES][kStage];
  float4 parts[kCluster][kMostBlocks][kRanks16 * 8];  // sums of 2 of each 8 rows, 2 ranks
  alignas(8) uint64_t full[STAGES], empty[STAGES], parts_full, parts_empty;
};

struct ShrinkTile {
  Item tile;
  int rank, a_row, blocks;
};

__device__ __forceinline__ ShrinkTile describe(const TileArgs& p, const Item& tile) {
  const int* entry = p.entries + tile.slot * 5;
  const int rank = min(__ldg(entry + 2), p.max_rank);
  return ShrinkTile{tile, rank, __ldg(entry) + tile.expert * __ldg(entry + 3), (tile.num_rows + 7) / 8};
}

// Calls f with each tile of this CTA's cluster.
template <class F>
__device__ __forceinline__ void each_tile(const TileArgs& p, F f) {
  int at = static_cast<int>(blockIdx.x) / kCluster;
  Item tile = load_tile(p, min(at, p.most_tiles - 1));  // before it is known how many there are
  for (const int tiles = p.cut[0]; at < tiles; tile = load_tile(p, min(at, tiles - 1))) {
    f(describe(p, tile));
    at += gridDim.x / kCluster;
  }
}

// How many steps of 128 columns have some of this CTA's part.
__device__ __forceinline__ int part_steps(const TileArgs& p) {
  return max(p.d_in - cluster_rank() * 32 + 127, 0) / 128;
}

template <class S>
__device__ void copy_parts(const TileArgs& p, S& sm) {
  const int lane = threadIdx.x & 31, part = cluster_rank(), steps = part_steps(p);
  const CUtensorMap* map = &p.a_parts[part / 2];
  Ring<S::kStages> ring;
  each_tile(p, [&](const ShrinkTile& t) {
    for (int first = 0; first < t.rank; first += S::kRanks16 * 16) {
      const int groups = (min(t.rank - first, S::kRanks16 * 16) + 7) / 8;
      for (int step = 0; step < steps; step += kStageSteps) {
        mbar_wait(&sm.empty[ring.at()], ring.phase() ^ 1);
        if (lane == 0) mbar_expect(&sm.full[ring.at()], groups * S::kGroup);
        __syncwarp();
        if (lane < groups)
          tile_copy(smem_u32(sm.stages[ring.at()]) + lane * S::kGroup, map, 0, t.a_row + first + lane * 8, step, part,
                    &sm.full[ring.at()]);
        ring.next();
      }
    }
  });
}

// The products of BLOCKS blocks of 8 rows with this CTA's part of all ranks of a pass; those past the
// adapter's rank multiply what lies there, and are not used. Rows are read AHEAD steps before they are
// needed.
template <int BLOCKS, int AHEAD, class S>
__device__ __forceinline__ void multiply_part(const TileArgs& p, S& sm, Ring<S::kStages>& ring,
                                              const __nv_bfloat16* const (&x)[kWarpBlocks],
                                              float (&acc)[2][S::kRanks16][kWarpBlocks][4]) {
  static_assert(kStageSteps % AHEAD == 0, "a stage begins where a round does");
  const int lane = threadIdx.x & 31, steps = part_steps(p);
  uint4 v[AHEAD][BLOCKS] = {};  // else registers would be kept for it all along
#pragma unroll
  for (int d = 0; d < AHEAD; ++d)
#pragma unroll
    for (int j = 0; j < BLOCKS; ++j)
      load_once(v[d][j], x[j] + d * 128, d < steps);
  for (int s0 = 0; s0 < steps; s0 += AHEAD) {
    if (s0 % kStageSteps == 0) mbar_wait(&sm.full[ring.at()], ring.phase());
    const uint32_t weights = smem_u32(sm.stages[ring.at()]) + s0 % kStageSteps * 512 + lane * 16;
#pragma unroll
    for (int d = 0; d < AHEAD; ++d) {
      if (s0 + d >= steps) break;
#pragma unroll
      for (int m = 0; m < S::kRanks16; ++m) {
        const uint32_t at = weights + m * 2 * S::kGroup + d * 512;
        const uint4 lo = lds128(at), hi = lds128(at + S::kGroup);
#pragma unroll
        for (int j = 0; j < BLOCKS; ++j) {
          mma_bf16(acc[0][m][j], lo.x, hi.x, lo.y, hi.y, v[d][j].x, v[d][j].y);
          mma_bf16(acc[1][m][j], lo.z, hi.z, lo.w, hi.w, v[d][j].z, v[d][j].w);
        }
      }
#pragma unroll
      for (int j = 0; j < BLOCKS; ++j)
        load_once(v[d][j], x[j] + (s0 + d + AHEAD) * 128, s0 + d + AHEAD < steps);
    }
    if ((s0 + AHEAD) % kStageSteps == 0 || s0 + AHEAD >= steps) {
      __syncwarp();
      if (lane == 0) mbar_arrive(&sm.empty[ring.at()]);
      ring.next();
    }
  }
}

// What a warp without rows does instead: lets the stages go.
template <class S>
__device__ __forceinline__ void pass_by(const TileArgs& p, S& sm, Ring<S::kStages>& ring) {
  for (int s0 = 0, steps = part_steps(p); s0 < steps; s0 += kStageSteps) {
    mbar_wait(&sm.full[ring.at()], ring.phase());
    if ((threadIdx.x & 31) == 0) mbar_arrive(&sm.empty[ring.at()]);
    ring.next();
  }
}

// Rows 2 * q and the next of each block are CTA q's to add up; so all of a lane's sums go to one CTA.
template <class S>
__device__ __forceinline__ void send_parts(S& sm, int blocks, const float (&acc)[2][S::kRanks16][kWarpBlocks][4]) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  const uint32_t to = address_in(q, smem_u32(&sm.parts[cluster_rank()][warp][g]));
  const uint32_t bar = address_in(q, smem_u32(&sm.parts_full));
#pragma unroll
  for (int j = 0; j < kWarpBlocks; ++j) {
    if (j * kShrinkWarps + warp >= blocks) break;
#pragma unroll
    for (int m = 0; m < S::kRanks16; ++m) {
      const auto &a = acc[0][m][j], &b = acc[1][m][j];
      cluster_store(to + (j * kShrinkWarps * S::kRanks16 + m) * 128,
                    make_float4(a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]), bar);
    }
  }
}

// Adds the parts of this CTA's rows in order and writes their h.
template <class S>
__device__ __forceinline__ void add_parts(const TileArgs& p, S& sm, const ShrinkTile& t, int first_rank) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane & 7, m = lane >> 3;
  const float scaling = __ldg(p.scaling + t.tile.slot);
  const int rank = first_rank + m * 16 + g, end = (t.rank + 7) / 8 * 8;
  wait_for_previous();  // which may fill h
  for (int b = warp; b < t.blocks; b += kShrinkWarps) {
    float4 s = make_float4(0.f, 0.f, 0.f, 0.f);
    if (m < S::kRanks16) {
#pragma unroll
      for (int w = 0; w < kCluster; ++w) {
        const float4 v = sm.parts[w][b][lane];
        s.x += v.x, s.y += v.y, s.z += v.z, s.w += v.w;
      }
    }
    s.x = rank < t.rank ? s.x * scaling : 0.f, s.y = rank < t.rank ? s.y * scaling : 0.f;
    s.z = rank + 8 < t.rank ? s.z * scaling : 0.f, s.w = rank + 8 < t.rank ? s.w * scaling : 0.f;
    const bool odd = g & 1;  // this lane packs two ranks of row 2 * cta, or of the next
    const float xy = __shfl_xor_sync(~0u, odd ? s.x : s.y, 1), zw = __shfl_xor_sync(~0u, odd ? s.z : s.w, 1);
    const int row = b * 8 + cluster_rank() * 2 + odd, column = first_rank + m * 16 + (g & ~1);
    if (m >= S::kRanks16 || row >= t.tile.num_rows) continue;
    auto* h = reinterpret_cast<uint32_t*>(p.h + static_cast<int64_t>(t.tile.row_begin + row) * p.h_stride + column);
    if (column < end) h[0] = odd ? bf16x2(xy, s.y) : bf16x2(s.x, xy);
    if (column + 8 < end) h[4] = odd ? bf16x2(zw, s.w) : bf16x2(s.z, zw);
  }
}

template <class S>
__device__ __forceinline__ void shrink_pass(const TileArgs& p, S& sm, Ring<S::kStages>& ring, const ShrinkTile& t,
                                            uint32_t phase, const __nv_bfloat16* const (&x)[kWarpBlocks]) {
  const int warp = threadIdx.x >> 5, mine = (t.blocks - warp + kShrinkWarps - 1) / kShrinkWarps;
  if (threadIdx.x == 0) mbar_expect(&sm.parts_full, kCluster * t.blocks * S::kRanks16 * 128);
  float acc[2][S::kRanks16][kWarpBlocks][4] = {};
  if (mine == 3) multiply_part<3, 4>(p, sm, ring, x, acc);
  else if (mine == 2) multiply_part<2, 4>(p, sm, ring, x, acc);
  else if (mine == 1) multiply_part<1, 8>(p, sm, ring, x, acc);
  else pass_by(p, sm, ring);
  mbar_wait(&sm.parts_empty, phase ^ 1);
  send_parts(sm, t.blocks, acc);
}

template <class S>
__device__ void shrink_tiles(const TileArgs& p, S& sm) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  const int part_column = part_steps(p) > 0 ? cluster_rank() * 32 : 0;
  Ring<S::kStages> ring;
  uint32_t phase = 0;
  each_tile(p, [&](const ShrinkTile& t) {
    const __nv_bfloat16* x[kWarpBlocks];
#pragma unroll
    for (int j = 0; j < kWarpBlocks; ++j) {
      const int n = min((j * kShrinkWarps + warp) * 8 + g, t.tile.num_rows - 1);
      x[j] = p.x + static_cast<int64_t>(__ldg(p.row_order + t.tile.row_begin + n)) * p.d_in + part_column + q * 8;
    }
    for (int first_rank = 0; first_rank < t.rank; first_rank += S::kRanks16 * 16) {
      shrink_pass(p, sm, ring, t, phase, x);
      mbar_wait(&sm.parts_full, phase);
      add_parts(p, sm, t, first_rank);
      __syncwarp();
      if (lane < kCluster) cluster_arrive(&sm.parts_empty, lane);
      phase ^= 1;
    }
  });
}

template <int RANKS, int STAGES>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kShrinkThreads, 1)
    shrink_tiles_kernel(const __grid_constant__ TileArgs p) {
  using S = ShrinkShared<RANKS, STAGES>;
  extern __shared__ __align__(1024) unsigned char shrink_raw[];
  auto& sm = *reinterpret_cast<S*>(shrink_raw);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      mbar_init(&sm.full[i], 1);
      mbar_init(&sm.empty[i], kShrinkWarps);
    }
    mbar_init(&sm.parts_full, 1);
    mbar_init(&sm.parts_empty, kShrinkWarps * kCluster);
    fence_barriers();
  }
  let_next_begin();
  cluster_sync();
  if (threadIdx.x < kShrinkWarps * 32) {
    more_registers<232>();
    shrink_tiles(p, sm);
  } else {
    fewer_registers<40>();
    if (threadIdx.x < (kShrinkWarps + 1) * 32) copy_parts(p, sm);
  }
  cluster_sync();  // nobody may end while others still write to its memory
  wait_for_previous();
}

}  // namespace lora_jax
