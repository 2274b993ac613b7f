// Grouped LoRA on Hopper for adapters with many rows: h = scaling * x A^T, then y += h B, two kernels.
//
// A tile is up to 128 rows of one segment, in any order of rows. Both kernels give a row the very bits
// that pair_kernel (lora_gemm.cuh) gives it: the same products in each mma, the same order of sums. So
// which of them serves a segment may follow from the batch, and no result shows it.
//
//   shrink  A cluster of 4 CTAs works through a tile. Each CTA takes one of the four parts of the sums
//           over k, so that A leaves L2 once a tile: its rows of x go from memory straight to registers,
//           read steps ahead, A through a ring in shared memory. Rows are the first operand of mma, 16
//           at a time, which makes that of A what one load brings. CTAs send each other the parts of
//           their rows, and add them in order.
//   expand  (expand_tiles.cuh) begins meanwhile, in the kernel that serves the items (lora_both.cuh): B
//           and y are on their way when h comes.
//
// A shrink alone is one kernel for items and tiles (lora_both.cuh).
#pragma once
#include "cluster.cuh"
#include "tile_args.cuh"

namespace lora_jax {

constexpr int kCluster = 4;                          // CTAs, and parts of a sum over k
constexpr int kShrinkWarps = 4;                      // that multiply
constexpr int kCopyWarps = 4;                        // that bring A: each box takes its warp a hundred cycles
constexpr int kShrinkThreads = (kShrinkWarps + kCopyWarps) * 32;
constexpr int kWarpBlocks = 2;                       // of 16 rows that a warp shrinks, at most
constexpr int kMostBlocks = kShrinkWarps * kWarpBlocks;
constexpr int kMostRankOfPass = 64;                  // of higher ranks x is read once more
constexpr int kStageSteps = 4;                       // of 128 columns of A in a stage
static_assert(kMostBlocks * 16 == kTileRows, "a tile's rows must fit its cluster");
static_assert(kCluster == kConsumers, "sums must have the order of pair_kernel");

struct ShrinkTile {
  Item tile;
  int module, rank, a_row, blocks;
};

// A stage holds a part of A as [group of 8 ranks][step][8][32].
template <int RANKS, int STAGES>
struct ShrinkShared {
  static constexpr int kStages = STAGES, kGroups = RANKS / 8;  // of a pass
  static constexpr int kGroup = kStageSteps * 512, kStage = kGroups * kGroup;
  alignas(1024) unsigned char stages[STAGES][kStage];
  float4 parts[kCluster][kMostBlocks][4][kGroups * 2];  // of 4 of each 16 rows: see send_parts
  alignas(8) uint64_t full[STAGES], empty[STAGES], parts_full, parts_empty;
};

__device__ __forceinline__ ShrinkTile describe(const TileArgs& p, int module, const Item& tile) {
  const int* entry = p.modules[module].entries + tile.slot * 5;
  const int rank = min(__ldg(entry + 2), p.max_rank);
  return ShrinkTile{tile, module, rank, __ldg(entry) + tile.expert * __ldg(entry + 3), (tile.num_rows + 15) / 16};
}

// Calls f with each tile of this CTA's cluster, of one module after the other.
template <class F>
__device__ __forceinline__ void each_tile(const TileArgs& p, F f) {
#pragma unroll 1
  for (int module = 0; module < p.num_modules; ++module) {
    int at = static_cast<int>(blockIdx.x) / kCluster;
    Item tile = load_tile(p, min(at, p.most_tiles - 1));  // before it is known how many there are
    for (const int tiles = p.cut[0]; at < tiles; tile = load_tile(p, min(at, tiles - 1))) {
      f(describe(p, module, tile));
      at += gridDim.x / kCluster;
    }
  }
}

// How many steps of 128 columns have some of this CTA's part.
__device__ __forceinline__ int part_steps(const TileArgs& p) {
  return max(p.d_in - cluster_rank() * 32 + 127, 0) / 128;
}

template <class S>
__device__ void copy_parts(const TileArgs& p, S& sm) {
  const int lane = threadIdx.x & 31, part = cluster_rank(), steps = part_steps(p);
  const int before = ((threadIdx.x >> 5) - kShrinkWarps) * (S::kGroups / kCopyWarps);  // groups of other warps
  const CUtensorMap* map = &p.a_parts[part / 2];
  Ring<S::kStages> ring;
  each_tile(p, [&](const ShrinkTile& t) {
    for (int first = 0; first < t.rank; first += S::kGroups * 8) {
      const int groups = (min(t.rank - first, S::kGroups * 8) + 7) / 8;
      const int own = min(max(groups - before, 0), S::kGroups / kCopyWarps);
      for (int step = 0; step < steps; step += kStageSteps) {
        mbar_wait(&sm.empty[ring.at()], ring.phase() ^ 1);
        if (lane == 0) mbar_expect(&sm.full[ring.at()], own * S::kGroup);
        __syncwarp();
        if (lane >= before && lane < before + own)
          tile_copy(smem_u32(sm.stages[ring.at()]) + lane * S::kGroup, map, 0, t.a_row + first + lane * 8, step, part,
                    &sm.full[ring.at()]);
        ring.next();
      }
    }
  });
}

// Sums of the two chains, for each group of 8 ranks and block of 16 rows: a lane has rows g and g + 8 of
// ranks 2 * q and the next.
template <class S, int BLOCKS>
using ShrinkSums = float[2][S::kGroups][BLOCKS][4];

// The products of BLOCKS blocks of 16 rows with this CTA's part of all ranks of a pass; those past the
// adapter's rank multiply what lies there, and are not used. Rows are read AHEAD steps before they are
// needed.
template <int BLOCKS, int AHEAD, class S>
__device__ __forceinline__ void multiply_part(const TileArgs& p, S& sm, Ring<S::kStages>& ring,
                                              const uint32_t (&x)[kWarpBlocks][2],
                                              ShrinkSums<S, BLOCKS>& acc) {
  const int lane = threadIdx.x & 31, steps = part_steps(p);
  const auto* from = reinterpret_cast<const uint4*>(p.x);
  const uint32_t nothing = p.max_rank >> 16;  // 0, which the compiler does not know
  uint4 v[AHEAD][BLOCKS][2] = {};  // else registers would be kept for it all along
  auto fetch = [&](int step, uint4(&to)[BLOCKS][2]) {
#pragma unroll
    for (int j = 0; j < BLOCKS; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) load_once(to[j][e], from + (x[j][e] + step * 16), step < steps);
  };
#pragma unroll
  for (int d = 0; d < AHEAD; ++d) fetch(d, v[d]);
  for (int s0 = 0; s0 < steps; s0 += AHEAD) {
#pragma unroll
    for (int d = 0; d < AHEAD; ++d) {
      const int step = s0 + d, in_stage = step % kStageSteps;
      if (step >= steps) break;
      if (in_stage == 0) mbar_wait(&sm.full[ring.at()], ring.phase());
      const uint32_t weights = smem_u32(sm.stages[ring.at()]) + in_stage * 512 + lane * 16;
      uint32_t a[BLOCKS][2][4];  // mma operands: the compiler would copy them for each mma, were they copies
#pragma unroll
      for (int j = 0; j < BLOCKS; ++j) {
        const uint4 &lo = v[d][j][0], &hi = v[d][j][1];
        a[j][0][0] = lo.x ^ nothing, a[j][0][1] = hi.x ^ nothing, a[j][0][2] = lo.y ^ nothing, a[j][0][3] = hi.y ^ nothing;
        a[j][1][0] = lo.z ^ nothing, a[j][1][1] = hi.z ^ nothing, a[j][1][2] = lo.w ^ nothing, a[j][1][3] = hi.w ^ nothing;
      }
      uint32_t last;
#pragma unroll
      for (int n = 0; n < S::kGroups; ++n) {
        if (BLOCKS > 1 && n % 4 == 0) __syncwarp();  // else loads are put so far ahead that registers run out
        const uint4 w = lds128_in_order(weights + n * S::kGroup);
        last = w.w;
#pragma unroll
        for (int j = 0; j < BLOCKS; ++j) {
          mma_bf16(acc[0][n][j], a[j][0][0], a[j][0][1], a[j][0][2], a[j][0][3], w.x, w.y);
          mma_bf16(acc[1][n][j], a[j][1][0], a[j][1][1], a[j][1][2], a[j][1][3], w.z, w.w);
        }
      }
      fetch(step + AHEAD, v[d]);
      if (in_stage == kStageSteps - 1 || step + 1 == steps) {
        __syncwarp();
        if (lane == 0) mbar_arrive(&sm.empty[ring.at()] + (last & nothing));  // once the last weights are here
        ring.next();
      }
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

// CTA c adds up row c of each 4, so all of a lane's sums go to one. A row lies there as float4s of ranks
// 16 * i + 2 * q, the next, and both 8 ranks on.
template <int BLOCKS, class S>
__device__ __forceinline__ void send_parts(S& sm, const ShrinkSums<S, BLOCKS>& acc) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  const uint32_t to = address_in(g & 3, smem_u32(&sm.parts[cluster_rank()][0][g >> 2][q]));
  const uint32_t bar = address_in(g & 3, smem_u32(&sm.parts_full));
#pragma unroll
  for (int j = 0; j < BLOCKS; ++j) {
    const int block = j * kShrinkWarps + warp;
#pragma unroll
    for (int i = 0; i < S::kGroups / 2; ++i)
#pragma unroll
      for (int e = 0; e < 2; ++e) {  // row g, or g + 8
        const auto &a = acc[0][i * 2][j], &b = acc[1][i * 2][j], &a8 = acc[0][i * 2 + 1][j], &b8 = acc[1][i * 2 + 1][j];
        const int c = e * 2;
        cluster_store(to + (((block * 4 + e * 2) * S::kGroups * 2) + i * 4) * 16,
                      make_float4(a[c] + b[c], a[c + 1] + b[c + 1], a8[c] + b8[c], a8[c + 1] + b8[c + 1]), bar);
      }
  }
}

// Adds the parts of this CTA's rows in order and writes their h.
template <class S>
__device__ __forceinline__ void add_parts(const TileArgs& p, S& sm, const ShrinkTile& t, int first_rank) {
  constexpr int kRow = S::kGroups * 2;  // float4s
  const float scaling = __ldg(p.modules[t.module].scaling + t.tile.slot);
  const int end = (t.rank + 7) / 8 * 8;
  wait_for_previous();  // which may fill h
  for (int n = threadIdx.x; n < t.blocks * 4 * kRow; n += kShrinkWarps * 32) {
    const int b = n / (4 * kRow), r = n / kRow % 4, i = n % kRow;
    const int row = b * 16 + r * 4 + cluster_rank(), rank = first_rank + i / 4 * 16 + i % 4 * 2;
    float4 s = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int w = 0; w < kCluster; ++w) {
      const float4 v = sm.parts[w][b][r][i];
      s.x += v.x, s.y += v.y, s.z += v.z, s.w += v.w;
    }
    s.x = rank < t.rank ? s.x * scaling : 0.f, s.y = rank + 1 < t.rank ? s.y * scaling : 0.f;
    s.z = rank + 8 < t.rank ? s.z * scaling : 0.f, s.w = rank + 9 < t.rank ? s.w * scaling : 0.f;
    if (row >= t.tile.num_rows) continue;
    auto* h = reinterpret_cast<uint32_t*>(h_row(p, t.module, t.tile.row_begin + row) + rank);
    if (rank < end) h[0] = bf16x2(s.x, s.y);
    if (rank + 8 < end) h[4] = bf16x2(s.z, s.w);
  }
}

// A warp's share of a pass: BLOCKS blocks of 16 rows.
template <int BLOCKS, int AHEAD, class S>
__device__ __forceinline__ void shrink_blocks(const TileArgs& p, S& sm, Ring<S::kStages>& ring, uint32_t phase,
                                              const uint32_t (&x)[kWarpBlocks][2]) {
  ShrinkSums<S, BLOCKS> acc = {};
  multiply_part<BLOCKS, AHEAD>(p, sm, ring, x, acc);
  mbar_wait(&sm.parts_empty, phase ^ 1);
  send_parts<BLOCKS>(sm, acc);
}

template <class S>
__device__ __forceinline__ void shrink_pass(const TileArgs& p, S& sm, Ring<S::kStages>& ring, const ShrinkTile& t,
                                            uint32_t phase, const uint32_t (&x)[kWarpBlocks][2]) {
  const int warp = threadIdx.x >> 5, mine = (t.blocks - warp + kShrinkWarps - 1) / kShrinkWarps;
  if (threadIdx.x == 0) mbar_expect(&sm.parts_full, kCluster * t.blocks * 4 * S::kGroups * 2 * 16);
  if (mine == 2) shrink_blocks<2, 2>(p, sm, ring, phase, x);
  else if (mine == 1) shrink_blocks<1, 12>(p, sm, ring, phase, x);
  else pass_by(p, sm, ring);
}

template <class S>
__device__ void shrink_tiles(const TileArgs& p, S& sm) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  const int part_column = part_steps(p) > 0 ? cluster_rank() * 32 : 0;
  Ring<S::kStages> ring;
  uint32_t phase = 0;
  each_tile(p, [&](const ShrinkTile& t) {
    uint32_t x[kWarpBlocks][2];  // where the rows' parts begin, in 16 bytes
#pragma unroll
    for (int j = 0; j < kWarpBlocks; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int n = min((j * kShrinkWarps + warp) * 16 + e * 8 + g, t.tile.num_rows - 1);
        x[j][e] = __ldg(p.row_order + t.tile.row_begin + n) * (p.d_in / 8) + part_column / 8 + q;
      }
    for (int first_rank = 0; first_rank < t.rank; first_rank += S::kGroups * 8) {
      shrink_pass(p, sm, ring, t, phase, x);
      mbar_wait(&sm.parts_full, phase);
      add_parts(p, sm, t, first_rank);
      __syncwarp();
      if (lane < kCluster) cluster_arrive(&sm.parts_empty, lane);
      phase ^= 1;
    }
  });
}

// Shrinks the tiles of this CTA's cluster. Warps that multiply have the registers of those that do not.
template <class S>
__device__ __forceinline__ void shrink_cluster(const TileArgs& p, S& sm) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kStages; ++i) {
      mbar_init(&sm.full[i], kCopyWarps);
      mbar_init(&sm.empty[i], kShrinkWarps);
    }
    mbar_init(&sm.parts_full, 1);
    mbar_init(&sm.parts_empty, kShrinkWarps * kCluster);
    fence_barriers();
  }
  cluster_sync();
  if (threadIdx.x < kShrinkWarps * 32) {
    more_registers<224>();
    shrink_tiles(p, sm);
  } else {
    fewer_registers<32>();
    copy_parts(p, sm);
  }
  cluster_sync();  // nobody may end while others still write to its memory
}

template <int RANKS, int STAGES>
__global__ void __launch_bounds__(kShrinkThreads, 2) shrink_tiles_kernel(const __grid_constant__ TileArgs p) {
  extern __shared__ __align__(1024) unsigned char shrink_raw[];
  let_next_begin();
  shrink_cluster(p, *reinterpret_cast<ShrinkShared<RANKS, STAGES>*>(shrink_raw));
  wait_for_previous();
}

}  // namespace lora_jax
