// The shrink alone of so few rows that all of it is on its way from memory at once: a cluster of four CTAs has
// 16 rank rows of an item. See lora_few.cuh for the whole.
//
// The sums have pair_kernel's order: each CTA has the k of one of its warps (k mod 128). All its warps ask for
// their share of those; one adds them up in order, out of shared memory. Then the first CTA adds the four parts.
#pragma once
#include "cluster.cuh"
#include "few_plan.cuh"
#include "lora_gemm.cuh"

namespace lora_jax {

constexpr int kShrinkParts = kConsumers;  // CTAs of a cluster
constexpr int kLoaders = kThreads / 32, kChunkSteps = 4;  // steps of 128 columns that a warp asks for at once
constexpr int kMostTurns = 2, kMostChunks = kMostTurns * kLoaders;
constexpr int kAtOnceRanks = 16, kMostAtOnce = 64;  // of a unit; units at most: all of them run at a time

// What the lanes of a warp multiply in a step: rank rows g and g + 8, batch row g.
struct Step {
  uint4 lo[32], hi[32], x[32];
};
struct AtOnceShared {
  Step chunks[kMostChunks][kChunkSteps];
  alignas(16) float4 parts[kShrinkParts - 1][32];  // of the other CTAs
};
struct AtOnceBarriers {
  alignas(8) uint64_t full[kMostChunks], summed;
};
template <int NS, int STAGE, int RANKS>
struct FewShrinkShared {
  Shared<NS, STAGE, RANKS> items;
  AtOnceBarriers barriers;
};

__host__ __device__ __forceinline__ int at_once_units(const PairArgs& p, int items) {
  return items * p.num_modules * ((p.max_rank + kAtOnceRanks - 1) / kAtOnceRanks);
}
__device__ __forceinline__ bool at_once(const PairArgs& p, int num_items) {
  return at_once_units(p, num_items) <= kMostAtOnce && p.d_in <= kMostChunks * kChunkSteps * 128;
}

// What every warp asks for before it knows how many items there are: that of its cluster, were it at once.
struct AskedUnit {
  int num_items, module, first_rank;
  int4 item;
  int order[kFewRows / 32];
};
__device__ __forceinline__ AskedUnit ask_unit(const PairArgs& p) {
  const int unit = blockIdx.x / kShrinkParts, of_item = at_once_units(p, 1), i = unit / of_item, rest = unit - i * of_item;
  AskedUnit u;
  u.num_items = *p.num_items;
  u.item = __ldg(reinterpret_cast<const int4*>(p.items) + min(i, p.num_rows - 1));
#pragma unroll
  for (int w = 0; w < kFewRows / 32; ++w) {
    const int at = w * 32 + static_cast<int>(threadIdx.x & 31);
    u.order[w] = at < p.num_rows ? __ldg(p.row_order + at) : 0;
  }
  u.module = rest % p.num_modules, u.first_rank = rest / p.num_modules * kAtOnceRanks;
  return u;
}
// The row at a place of the sorted order, by all lanes.
__device__ __forceinline__ int row_at(const AskedUnit& u, int place) {
  int row = 0;
#pragma unroll
  for (int w = 0; w < kFewRows / 32; ++w) {
    const int held = __shfl_sync(~0u, u.order[w], place & 31);
    if (place >> 5 == w) row = held;
  }
  return row;
}
// Has the items here soon that hand_out asks for first, by its warp.
__device__ __forceinline__ void touch_first(const PairArgs& p) {
  const int guess = min(static_cast<int>(threadIdx.x & 31), kCuts - 1);
  const int item = min(static_cast<int>(divide(blockIdx.x, item_units(p, guess))), p.num_rows - 1);
  prefetch_l1(p.items + item);
}

struct Chunk {
  uint4 lo[kChunkSteps], hi[kChunkSteps], x[kChunkSteps];
};
// Sums of a lane: of 16 rank rows by 8 batch rows, in two chains by bit 2 of k.
using AtOnceSums = float[2][4];

__device__ __forceinline__ void add_chunk(const Chunk& c, int steps, AtOnceSums& acc) {
#pragma unroll
  for (int d = 0; d < kChunkSteps; ++d) {
    if (d >= steps) break;
    mma_bf16(acc[0], c.lo[d].x, c.hi[d].x, c.lo[d].y, c.hi[d].y, c.x[d].x, c.x[d].y);
    mma_bf16(acc[1], c.lo[d].z, c.hi[d].z, c.lo[d].w, c.hi[d].w, c.x[d].z, c.x[d].w);
  }
}
__device__ __forceinline__ void take_chunk(AtOnceShared& sm, AtOnceBarriers& bars, int i, Chunk& c) {
  const int lane = threadIdx.x & 31;
  mbar_wait(&bars.full[i], 0);
#pragma unroll
  for (int d = 0; d < kChunkSteps; ++d) {
    const Step& s = sm.chunks[i][d];
    c.lo[d] = lds128(smem_u32(&s.lo[lane])), c.hi[d] = lds128(smem_u32(&s.hi[lane])), c.x[d] = lds128(smem_u32(&s.x[lane]));
  }
}

// By one warp of the cluster's first CTA: adds the parts in order and stores this unit's h.
__device__ __forceinline__ void finish_at_once(const PairArgs& p, AtOnceShared& sm, AtOnceBarriers& bars, const AskedUnit& u,
                                               int rank, float scaling, const float4& own) {
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  if (lane == 0) mbar_expect(&bars.summed, sizeof(sm.parts));
  __syncwarp();
  mbar_wait(&bars.summed, 0);
  float sums[4] = {0.f, 0.f, 0.f, 0.f};
  auto add = [&](float4 v) { sums[0] += v.x, sums[1] += v.y, sums[2] += v.z, sums[3] += v.w; };
  add(own);
#pragma unroll
  for (int i = 0; i < kShrinkParts - 1; ++i) add(sm.parts[i][lane]);
  auto* h = reinterpret_cast<uint32_t*>(p.h + (static_cast<int64_t>(u.module) * p.num_rows + u.item.z) * p.h_stride);
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const int r = u.first_rank + c / 2 * 8 + g, n = q * 2 + c % 2;
    const float v = r < rank ? sums[c] * scaling : 0.f;
    const uint32_t both = bf16x2(v, __shfl_xor_sync(~0u, v, 4));
    if (g % 2 == 0 && n < u.item.w && r < (rank + 7) / 8 * 8) store_word(h + n * (p.h_stride / 2) + r / 2, both);
  }
}

__device__ __forceinline__ void shrink_at_once(const PairArgs& p, AtOnceShared& sm, AtOnceBarriers& bars, const AskedUnit& u) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3, part = cluster_rank();
  const int slot = static_cast<int>(min(static_cast<unsigned>(u.item.x), p.num_slots - 1u));
  const Module& m = p.modules[u.module];
  const int* e = m.entries + slot * 5;
  const int a_offset = __ldg(e), rank = min(__ldg(e + 2), p.max_rank), a_stride = __ldg(e + 3);
  const float scaling = __ldg(m.scaling + slot);
  // Lanes of no row read the last one's: what they sum nobody takes.
  const int row = row_at(u, u.item.z + min(g, u.item.w - 1)), column = part * 32 + q * 8;
  const int steps = (p.d_in - part * 32 + 127) >> 7, chunk = max(1, min(kChunkSteps, (steps + kLoaders - 1) / kLoaders));
  const __nv_bfloat16* x = p.x + static_cast<int64_t>(row) * p.d_in + column;
  Chunk c;
  auto load_x = [&](int first) {
#pragma unroll
    for (int d = 0; d < kChunkSteps; ++d)
      if (d < chunk && first + d < steps) c.x[d] = load_weights(x + (first + d) * 128);
  };
  load_x(warp * chunk);
  if (u.first_rank >= rank) return;  // and so the whole cluster
  cluster_begun();
  const int64_t first_row = a_offset + static_cast<int64_t>(u.item.y) * a_stride;
  const __nv_bfloat16* lo = p.pools[0] + (first_row + min(u.first_rank + g, rank - 1)) * p.d_in + column;
  const __nv_bfloat16* hi = p.pools[0] + (first_row + min(u.first_rank + g + 8, rank - 1)) * p.d_in + column;
  AtOnceSums acc = {};
  const int chunks = (steps + chunk - 1) / chunk;
#pragma unroll 1
  for (int i = warp; i < chunks; i += kLoaders) {
    const int first = i * chunk;
    if (i != warp) load_x(first);
#pragma unroll
    for (int d = 0; d < kChunkSteps; ++d)
      if (d < chunk && first + d < steps) c.lo[d] = load_weights(lo + (first + d) * 128), c.hi[d] = load_weights(hi + (first + d) * 128);
    if (i == 0) {
      add_chunk(c, min(chunk, steps), acc);
      continue;
    }
#pragma unroll
    for (int d = 0; d < kChunkSteps; ++d) {
      Step& s = sm.chunks[i][d];
      if (d < chunk && first + d < steps)
        sts128(smem_u32(&s.lo[lane]), c.lo[d]), sts128(smem_u32(&s.hi[lane]), c.hi[d]), sts128(smem_u32(&s.x[lane]), c.x[d]);
    }
    __syncwarp();
    if (lane == 0) mbar_arrive(&bars.full[i]);
  }
  if (warp == 0) {
    Chunk other;
    if (chunks > 1) take_chunk(sm, bars, 1, c);
#pragma unroll 1
    for (int i = 1; i < chunks; i += 2) {
      if (i + 1 < chunks) take_chunk(sm, bars, i + 1, other);
      add_chunk(c, min(chunk, steps - i * chunk), acc);
      if (i + 1 == chunks) break;
      if (i + 2 < chunks) take_chunk(sm, bars, i + 2, c);
      add_chunk(other, min(chunk, steps - (i + 1) * chunk), acc);
    }
  }
  cluster_all_begun();  // who has arrived must wait before it ends
  if (warp > 0) return;
  const float4 own = make_float4(acc[0][0] + acc[1][0], acc[0][1] + acc[1][1], acc[0][2] + acc[1][2], acc[0][3] + acc[1][3]);
  if (part == 0) return finish_at_once(p, sm, bars, u, rank, scaling, own);
  cluster_store(address_in(0, smem_u32(&sm.parts[part - 1][lane])), own, address_in(0, smem_u32(&bars.summed)));
}

// The shrink alone: at once, or by pair_kernel's units.
template <int NS, int STAGE, int RANKS>
__global__ void __launch_bounds__(kThreads, 2) few_shrink_kernel(const __grid_constant__ PairArgs p) {
  extern __shared__ __align__(1024) unsigned char few_shrink_raw[];
  using S = FewShrinkShared<NS, STAGE, RANKS>;
  static_assert(sizeof(AtOnceShared) <= sizeof(Shared<NS, STAGE, RANKS>::stages), "at once or by units: not both");
  auto& sm = *reinterpret_cast<S*>(few_shrink_raw);
  const AskedUnit u = ask_unit(p);
  if (threadIdx.x >> 5 == kUnitWarp) touch_first(p);
  if (threadIdx.x == 96) {
    for (uint64_t& bar : sm.barriers.full) mbar_init(&bar, 1);
    mbar_init(&sm.barriers.summed, 1);
    fence_barriers();
  }
  make_barriers(p, sm.items);
  if (!at_once(p, u.num_items)) return serve_items<false>(p, sm.items);
  if (static_cast<int>(blockIdx.x) < at_once_units(p, u.num_items) * kShrinkParts)
    shrink_at_once(p, *reinterpret_cast<AtOnceShared*>(sm.items.stages), sm.barriers, u);
}

}  // namespace lora_jax
