// Grouped LoRA on Hopper for adapters with many rows: y += (scaling * x A^T) B in one kernel, or the
// shrink alone.
//
// A cluster of 4 CTAs works through a tile of up to 192 rows of one segment. Each CTA takes one of the
// four parts of the sums over k (see lora_gemm.cuh), so that A leaves L2 once a tile: its rows of x
// go from memory straight to registers, A through a ring in shared memory. CTAs send each other the
// parts, add them in order, send each other h, and then each takes a quarter of the columns of y.
// Nothing but rows, y and B passes through memory, and a cluster waits for none but itself.
//
// Rows get the very bits that pair_kernel gives them: the same products in each mma, the same order
// of sums. So which of them serves a segment may follow from the batch, and no result shows it.
#pragma once
#include "cluster.cuh"
#include "expand_tiles.cuh"

namespace lora_jax {

constexpr int kCluster = 4;                                          // CTAs, and parts of a sum over k
constexpr int kPairWarps = 8, kPairThreads = (kPairWarps + 4) * 32;  // one of the last copies A
constexpr int kWarpBlocks = 3;                                       // of 8 rows that a warp shrinks
constexpr int kMostBlocks = kPairWarps * kWarpBlocks;
constexpr int kStageSteps = 8;                                       // of 128 columns of A in a stage
static_assert(kMostBlocks * 8 == kTileRows, "a tile's rows must fit its cluster");
static_assert(kCluster == kConsumers, "sums must have the order of pair_kernel");

// A stage holds a part of A as [group of 8 ranks][step][8][32].
template <int STEPS, int STAGES>
struct PairTilesShared {
  static constexpr int kStages = STAGES, kRanks16 = STEPS < 4 ? STEPS : 4;  // of a pass
  static constexpr int kGroup = kStageSteps * 512, kStage = kRanks16 * 2 * kGroup;
  static constexpr int kStride = STEPS * 32 + 16;  // bytes of a row of h: rows on distinct banks
  alignas(1024) unsigned char stages[STAGES][kStage];
  float4 parts[kCluster][kMostBlocks][kRanks16 * 8];  // sums of 2 of each 8 rows, 2 ranks
  unsigned char h[kTileRows * kStride];
  int rows[2][kTileRows];                             // by turns: a tile's, the next one's
  alignas(8) uint64_t full[STAGES], empty[STAGES], parts_full, h_full;
};

struct PairTile {
  Item tile;
  int rank, passes, a_row, b_row, blocks;
};

template <class S>
__device__ __forceinline__ PairTile describe(const TileArgs& p, const Item& tile) {
  const int* entry = p.entries + tile.slot * 5;
  const int rank = min(__ldg(entry + 2), p.max_rank), ranks = S::kRanks16 * 16;
  return PairTile{tile, rank, (rank + ranks - 1) / ranks, __ldg(entry) + tile.expert * __ldg(entry + 3),
                  __ldg(entry + 1) + tile.expert * __ldg(entry + 4), (tile.num_rows + 7) / 8};
}

// Calls f with each tile of this CTA's cluster.
template <class S, class F>
__device__ __forceinline__ void each_tile(const TileArgs& p, F f) {
  int at = static_cast<int>(blockIdx.x) / kCluster;
  Item tile = load_tile(p, min(at, p.most_tiles - 1));  // before it is known how many there are
  for (const int tiles = p.cut[0]; at < tiles; tile = load_tile(p, min(at, tiles - 1))) {
    f(describe<S>(p, tile));
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
  each_tile<S>(p, [&](const PairTile& t) {
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
    if (j * kPairWarps + warp >= blocks) break;
#pragma unroll
    for (int m = 0; m < S::kRanks16; ++m) {
      const auto &a = acc[0][m][j], &b = acc[1][m][j];
      cluster_store(to + (j * kPairWarps * S::kRanks16 + m) * 128,
                    make_float4(a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]), bar);
    }
  }
}

// Adds the parts of this CTA's rows in order and sends h to all; to memory too, where nothing expands.
template <class S>
__device__ __forceinline__ void add_parts(const TileArgs& p, S& sm, const PairTile& t, int first_rank) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, cta = cluster_rank(), g = lane & 7, m = lane >> 3;
  const float scaling = __ldg(p.scaling + t.tile.slot);
  const int rank = first_rank + m * 16 + g;
  for (int b = warp; b < t.blocks; b += kPairWarps) {
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
    const uint32_t lo = odd ? bf16x2(xy, s.y) : bf16x2(s.x, xy), hi = odd ? bf16x2(zw, s.w) : bf16x2(s.z, zw);
    const uint32_t at = smem_u32(sm.h) + (b * 8 + cta * 2 + odd) * S::kStride + (first_rank + m * 16 + (g & ~1)) * 2;
    if (m < S::kRanks16) {
#pragma unroll
      for (int to = 0; to < kCluster; ++to) {
        const uint32_t there = address_in(to, at), bar = address_in(to, smem_u32(&sm.h_full));
        cluster_store(there, lo, bar);
        cluster_store(there + 16, hi, bar);
      }
      const int row = b * 8 + cta * 2 + odd, column = first_rank + m * 16 + (g & ~1), end = (t.rank + 7) / 8 * 8;
      auto* h = reinterpret_cast<uint32_t*>(p.h + static_cast<int64_t>(t.tile.row_begin + row) * p.h_stride + column);
      if (!p.expand && row < t.tile.num_rows && column < end) *h = lo;
      if (!p.expand && row < t.tile.num_rows && column + 8 < end) h[4] = hi;
    }
  }
}

// This warp's share of the tile's columns, 64 at a time: y is read AHEAD x 8 rows before it is
// needed. `begin` runs while the first reads are on their way, and returns when h is there.
template <int STEPS, int AHEAD, class S, class Begin>
__device__ __forceinline__ void expand_tile(const TileArgs& p, S& sm, const PairTile& t, const int* rows, Begin begin) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3, cta = cluster_rank();
  const int pieces = p.expand ? p.d_out / 64 : 0, end = pieces * (cta + 1) / kCluster, first = pieces * cta / kCluster + warp;
  const int slots = (t.blocks + AHEAD - 1) / AHEAD * AHEAD;  // of blocks, the last ones of none
  int left = max(end - first + kPairWarps - 1, 0) / kPairWarps;
  __nv_bfloat16* y = p.y + first * 64 + g * 8;
  uint4 ahead[AHEAD][2];
  int ahead_block = 0, ahead_left = p.accumulate ? left : 0;
  __nv_bfloat16* ahead_y = y;
  auto fetch = [&](uint4(&v)[2]) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int n = ahead_block * 8 + q * 2 + e;
      const bool wanted = ahead_left > 0 && n < t.tile.num_rows;
      v[e] = make_uint4(0, 0, 0, 0);
      load_stream(v[e], ahead_y + static_cast<int64_t>(rows[wanted ? n : 0]) * p.d_out, wanted);
    }
    if (++ahead_block == slots) ahead_block = 0, --ahead_left, ahead_y += kPairWarps * 64;
  };
  const __nv_bfloat16* b = p.b_pool + static_cast<int64_t>(t.b_row) * p.d_out + first * 64 + g * 8;
  pin(b);
  RankRows<STEPS> weights;
  weights.fetch(left > 0 ? b : p.b_pool, p.d_out, left > 0 ? t.rank : 0);
#pragma unroll
  for (int d = 0; d < AHEAD; ++d) fetch(ahead[d]);
  begin();
  const uint32_t h = smem_u32(sm.h) + (lane & 7) * S::kStride + (lane >> 3) * 16;
  while (left > 0) {
    Columns<STEPS> columns;
    columns.hold(weights);
    columns.pair();
#pragma unroll 1
    for (int i = 0; i < slots; i += AHEAD) {
#pragma unroll
      for (int d = 0; d < AHEAD; ++d) {
        const int block = i + d;
        if (block < t.blocks) {
          update_rows<STEPS>(columns, h + block * 8 * S::kStride, ahead[d]);
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (const int n = block * 8 + q * 2 + e; n < t.tile.num_rows)
              __stcs(reinterpret_cast<uint4*>(y + static_cast<int64_t>(rows[n]) * p.d_out), ahead[d][e]);
        }
        fetch(ahead[d]);
      }
    }
    y += kPairWarps * 64, b += kPairWarps * 64;
    if (--left > 0) weights.fetch(b, p.d_out, t.rank);
  }
}

template <class S>
__device__ __forceinline__ void shrink_pass(const TileArgs& p, S& sm, Ring<S::kStages>& ring, const PairTile& t,
                                            int first_rank, const __nv_bfloat16* const (&x)[kWarpBlocks]) {
  const int warp = threadIdx.x >> 5, mine = (t.blocks - warp + kPairWarps - 1) / kPairWarps;
  if (threadIdx.x == 0) {
    mbar_expect(&sm.parts_full, kCluster * t.blocks * S::kRanks16 * 128);
    mbar_expect(&sm.h_full, t.blocks * 8 * S::kRanks16 * 32);
  }
  float acc[2][S::kRanks16][kWarpBlocks][4] = {};
  if (t.rank == 0) {  // the sums are zeros
  } else if (mine == 3) multiply_part<3, 4>(p, sm, ring, x, acc);
  else if (mine == 2) multiply_part<2, 4>(p, sm, ring, x, acc);
  else if (mine == 1) multiply_part<1, 8>(p, sm, ring, x, acc);
  else pass_by(p, sm, ring);
  send_parts(sm, t.blocks, acc);
}

template <int STEPS, int AHEAD, class S>
__device__ void work_tiles(const TileArgs& p, S& sm) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  Ring<S::kStages> ring;
  uint32_t phase = 0, turn = 0;
  const int part_column = part_steps(p) > 0 ? cluster_rank() * 32 : 0;
  auto receive = [&](const PairTile& t, int first_rank) {
    mbar_wait(&sm.parts_full, phase);
    add_parts(p, sm, t, first_rank);
    mbar_wait(&sm.h_full, phase);
    phase ^= 1;
  };
  each_tile<S>(p, [&](const PairTile& t) {
    if (t.rank == 0 && (p.accumulate || !p.expand)) return;
    const __nv_bfloat16* x[kWarpBlocks];
    int* rows = sm.rows[turn];
    turn ^= 1;
#pragma unroll
    for (int j = 0; j < kWarpBlocks; ++j) {
      const int n = (j * kPairWarps + warp) * 8 + g, row = __ldg(p.row_order + t.tile.row_begin + min(n, t.tile.num_rows - 1));
      x[j] = p.x + static_cast<int64_t>(row) * p.d_in + part_column + q * 8;
      if (q == 0) rows[n] = row;
    }
    int first_rank = 0;
    while (true) {
      shrink_pass(p, sm, ring, t, first_rank, x);
      if (STEPS == S::kRanks16 || first_rank + S::kRanks16 * 16 >= t.rank) break;
      receive(t, first_rank);
      first_rank += S::kRanks16 * 16;
    }
    consumer_barrier(kPairWarps * 32);  // rows are there
    expand_tile<STEPS, AHEAD>(p, sm, t, rows, [&] { receive(t, first_rank); });
  });
}

template <int STEPS, int AHEAD, int STAGES>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kPairThreads, 1)
    pair_tiles_kernel(const __grid_constant__ TileArgs p) {
  using S = PairTilesShared<STEPS, STAGES>;
  extern __shared__ __align__(1024) unsigned char pair_raw[];
  auto& sm = *reinterpret_cast<S*>(pair_raw);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      mbar_init(&sm.full[i], 1);
      mbar_init(&sm.empty[i], kPairWarps);
    }
    mbar_init(&sm.parts_full, 1);
    mbar_init(&sm.h_full, 1);
    fence_barriers();
  }
  let_next_begin();
  cluster_sync();
  if (threadIdx.x < kPairWarps * 32) {
    more_registers<232>();
    work_tiles<STEPS, AHEAD>(p, sm);
  } else {
    fewer_registers<40>();
    if (threadIdx.x < (kPairWarps + 1) * 32) copy_parts(p, sm);
  }
  wait_for_previous();
}

}  // namespace lora_jax
