// The shrink of so few rows and adapters that all of it is on its way from memory at once: a cluster of
// four CTAs has 16 rank rows of an item. See lora_few.cuh for the whole.
//
// The sums have pair_kernel's order: each CTA has the k of one of its warps (k mod 128), and adds them in
// order though its warps have asked for all of them together: a warp hands the sums on to the next one. The
// first CTA then adds the four parts.
#pragma once
#include "cluster.cuh"
#include "few_plan.cuh"
#include "lora_gemm.cuh"

namespace lora_jax {

constexpr int kRelayParts = kConsumers;  // CTAs of a cluster
#ifndef HALVES
#define HALVES 2
#endif
constexpr int kHalves = HALVES, kRelayWarps = kThreads / 32 / kHalves;  // of 8 rank rows or 16: each has its warps
constexpr int kRelaySteps = 4 * kHalves;  // of 128 columns that a warp asks for at once
constexpr int kRelayRanks = 16, kMostRelays = 64;  // of a unit; units at most: all of them run at a time

struct RelayShared {
  alignas(16) float4 sums[kHalves][kRelayWarps][2][32];      // for the next warp, by chain and lane
  alignas(16) float4 parts[kHalves][kRelayParts - 1][32];    // of the other CTAs
  alignas(8) uint64_t handed[kHalves][kRelayWarps], full[kHalves];
};

__host__ __device__ __forceinline__ int relay_units(const PairArgs& p, int items) {
  return items * p.num_modules * ((p.max_rank + kRelayRanks - 1) / kRelayRanks);
}
__device__ __forceinline__ bool at_once(const PairArgs& p, int num_items) { return relay_units(p, num_items) <= kMostRelays; }
// Has the items here soon that hand_out asks for first, by its warp.
__device__ __forceinline__ void touch_first(const PairArgs& p) {
  const int guess = min(static_cast<int>(threadIdx.x & 31), kCuts - 1);
  uint4 unused;
  load_near(unused, p.items + min(static_cast<int>(blockIdx.x) / item_units(p, guess), p.num_rows - 1), true);
}
__device__ __forceinline__ void warm_slots(const PairArgs& p) {
  const int m = threadIdx.x, at = blockIdx.x * 128;
  if (m < p.num_modules) {
    if (at < p.num_slots * 20) prefetch_l2(reinterpret_cast<const char*>(p.modules[m].entries) + at);
    if (at < p.num_slots * 4) prefetch_l2(reinterpret_cast<const char*>(p.modules[m].scaling) + at);
  }
}
// A cluster's unit: rank rows [first_rank, first_rank + 16) of an item of a module.
struct RelayUnit {
  int module, first_rank;
  int4 item;
};
__device__ __forceinline__ RelayUnit relay_unit(const PairArgs& p) {
  const int unit = blockIdx.x / kRelayParts, by_module = unit / p.num_modules, of_item = relay_units(p, 1) / p.num_modules;
  const int i = by_module / of_item;
  const int4 item = __ldg(reinterpret_cast<const int4*>(p.items) + min(i, p.num_rows - 1));
  return RelayUnit{unit - by_module * p.num_modules, (by_module - i * of_item) * kRelayRanks, item};
}

// Sums of a lane: of 16 rank rows by 8 batch rows, in two chains by bit 2 of k.
using RelaySums = float[2][4];

// Asks for this warp's steps from column `first` on, and adds them to what the warp before hands on.
struct RelayLoads {
  const __nv_bfloat16 *lo, *hi, *x;  // of this lane: rank rows g and g + 8, batch row g
};
__device__ __forceinline__ void relay_steps(const RelayLoads& from, int first, int count, uint64_t* ready, int phase,
                                            const float4 (*sums)[32], RelaySums& acc) {
  uint4 lo[kRelaySteps], hi[kRelaySteps], x[kRelaySteps];
#pragma unroll
  for (int d = 0; d < kRelaySteps; ++d) {
    if (d >= count) break;
    const int at = (first + d) * 128;
    lo[d] = load_weights(from.lo + at), hi[d] = kHalves > 1 ? lo[d] : load_weights(from.hi + at), x[d] = load_weights(from.x + at);
  }
  if (ready) {
    mbar_wait(ready, phase);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float4 s = sums[c][threadIdx.x & 31];
      acc[c][0] = s.x, acc[c][1] = s.y, acc[c][2] = s.z, acc[c][3] = s.w;
    }
  }
#pragma unroll
  for (int d = 0; d < kRelaySteps; ++d) {
    if (d >= count) break;
    mma_bf16(acc[0], lo[d].x, hi[d].x, lo[d].y, hi[d].y, x[d].x, x[d].y);
    mma_bf16(acc[1], lo[d].z, hi[d].z, lo[d].w, hi[d].w, x[d].z, x[d].w);
  }
}

// By the last warp of the cluster's first CTA: adds the parts in order and stores this unit's h.
__device__ __forceinline__ void finish_relay(const PairArgs& p, RelayShared& sm, const RelayUnit& u, int half, int rank, float scaling,
                                             float4 own) {
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  if (lane == 0) mbar_expect(&sm.full[half], sizeof(sm.parts[half]));
  __syncwarp();
  mbar_wait(&sm.full[half], 0);
  NOTE(5);
  float sums[4] = {0.f, 0.f, 0.f, 0.f};
  auto add = [&](float4 v) { sums[0] += v.x, sums[1] += v.y, sums[2] += v.z, sums[3] += v.w; };
  add(own);
#pragma unroll
  for (int i = 0; i < kRelayParts - 1; ++i) add(sm.parts[half][i][lane]);
  auto* h = reinterpret_cast<uint32_t*>(p.h + (static_cast<int64_t>(u.module) * p.num_rows + u.item.z) * p.h_stride);
#pragma unroll
  for (int c = 0; c < 4 / kHalves; ++c) {
    const int r = u.first_rank + (half + c / 2) * 8 + g, n = q * 2 + c % 2;
    const float v = r < rank ? sums[c] * scaling : 0.f;
    const uint32_t both = bf16x2(v, __shfl_xor_sync(~0u, v, 4));
    if (g % 2 == 0 && n < u.item.w && r < (rank + 7) / 8 * 8) store_word(h + n * (p.h_stride / 2) + r / 2, both);
  }
  NOTE(6);
}

__device__ __forceinline__ void shrink_at_once(const PairArgs& p, RelayShared& sm, const RelayUnit& u) {
  const int half = threadIdx.x / 32 / kRelayWarps, warp = threadIdx.x / 32 % kRelayWarps;
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3, part = cluster_rank();
  const int slot = static_cast<int>(min(static_cast<unsigned>(u.item.x), p.num_slots - 1u));
  const Module& m = p.modules[u.module];
  const int* e = m.entries + slot * 5;
  const int a_offset = __ldg(e), rank = min(__ldg(e + 2), p.max_rank), a_stride = __ldg(e + 3);
  const int row = __ldg(p.row_order + u.item.z + min(g, u.item.w - 1));
  const float scaling = __ldg(m.scaling + slot);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kHalves * kRelayWarps; ++i) mbar_init(&sm.handed[0][i], 1);
    for (uint64_t& bar : sm.full) mbar_init(&bar, 1);
    fence_barriers();
  }
  __syncthreads();
  if (u.first_rank >= rank) return;  // and so the whole cluster
  cluster_begun();
  // Lanes of no row read the last one's: what they sum nobody takes.
  const int64_t first_row = a_offset + static_cast<int64_t>(u.item.y) * a_stride;
  auto weights = [&](int r) { return p.pools[0] + (first_row + min(u.first_rank + r, rank - 1)) * p.d_in + part * 32 + q * 8; };
  NOTE(2);
  const RelayLoads from{weights(half * 8 + g), weights(g + 8), p.x + static_cast<int64_t>(row) * p.d_in + part * 32 + q * 8};
  const int steps = (p.d_in - part * 32 + 127) >> 7, chunk = min(kRelaySteps, (steps + kRelayWarps - 1) / kRelayWarps);
  const int before = (warp + kRelayWarps - 1) % kRelayWarps;
  RelaySums acc = {};
  for (int first = warp * chunk, turn = 0; turn == 0 || (first - warp * chunk) < steps; first += kRelayWarps * chunk, ++turn) {
    const bool begins = warp == 0 && turn == 0;
    relay_steps(from, first, min(chunk, steps - first), begins ? nullptr : &sm.handed[half][before], warp ? turn & 1 : (turn - 1) & 1,
                sm.sums[half][before], acc);
#pragma unroll
    for (int c = 0; c < 2; ++c) sm.sums[half][warp][c][lane] = make_float4(acc[c][0], acc[c][1], acc[c][2], acc[c][3]);
    __syncwarp();
    if (lane == 0) mbar_arrive(&sm.handed[half][warp]);
  }
  NOTE(4);
  cluster_all_begun();  // who has arrived must wait before it ends
  if (warp < kRelayWarps - 1) return;
  const float4 own = make_float4(acc[0][0] + acc[1][0], acc[0][1] + acc[1][1], acc[0][2] + acc[1][2], acc[0][3] + acc[1][3]);
  if (part == 0) return finish_relay(p, sm, u, half, rank, scaling, own);
  cluster_store(address_in(0, smem_u32(&sm.parts[half][part - 1][lane])), own, address_in(0, smem_u32(&sm.full[half])));
}

// The shrink alone: at once, or by pair_kernel's units.
template <int NS, int STAGE, int RANKS>
__global__ void __launch_bounds__(kThreads, 2) few_shrink_kernel(const __grid_constant__ PairArgs p) {
  extern __shared__ __align__(1024) unsigned char few_shrink_raw[];
  auto& sm = *reinterpret_cast<Shared<NS, STAGE, RANKS>*>(few_shrink_raw);
  NOTE(0);
  const RelayUnit u = relay_unit(p);
  const int num_items = *p.num_items;
  if (threadIdx.x >> 5 == kUnitWarp) touch_first(p);
  make_barriers(p, sm);
  if (!at_once(p, num_items)) return serve_items<false>(p, sm);
  if (static_cast<int>(blockIdx.x) < relay_units(p, num_items) * kRelayParts)
    shrink_at_once(p, *reinterpret_cast<RelayShared*>(sm.stages), u);
}

}  // namespace lora_jax
