// Shrink of so few items that all loads are in flight at once: a cluster of four CTAs has 16 rank rows of an
// item, or of one item after the other. lora_gemm/decode.cuh has the overview.
//
// The sums have pair_kernel's order: each CTA has the k of one of its warps (k mod 128). All its warps ask for
// a share of those, as much at a time as shared memory holds; one warp adds up in order what comes. Then the first CTA adds the four parts. A launch takes little but latencies, and a warp alone has
// 4 or more cycles an instruction: so there are as few as may be before the loads and in the sum.
#pragma once
#include "device/arithmetic.cuh"
#include "device/cluster.cuh"
#include "lora_gemm/decode_plan.cuh"
#include "lora_gemm/items.cuh"

namespace lora_jax {

constexpr int kShrinkParts = kConsumers;  // CTAs of a cluster
constexpr int kLoaders = kThreads / 32, kChunkSteps = 4;  // steps of 128 columns of a chunk, which one warp brings
constexpr int kHeldChunks = 2 * kLoaders;  // on their way at a time: all of d_in up to 8192
constexpr int kAtOnceRanks = 16, kMostAtOnce = 64;  // rank rows of a unit; units that all run at a time
constexpr int kAtOnceRounds = 2;  // units of a cluster, at most, where the expand follows and chunks need no turns

// What the lanes of a warp multiply in a step, 8 k each: rank rows g and g + 8, batch row g.
struct Step {
  uint4 low[32], high[32], x[32];
};
struct AtOnceShared {
  Step chunks[kHeldChunks][kChunkSteps];
  alignas(16) float4 parts[kShrinkParts - 1][32];  // of the other CTAs
};
struct AtOnceBarriers {
  alignas(8) uint64_t full[kHeldChunks], empty[kHeldChunks], summed;
};
__device__ __forceinline__ void make_at_once_barriers(AtOnceBarriers& bars) {
  for (uint64_t& bar : bars.full) mbar_init(&bar, 1);
  for (uint64_t& bar : bars.empty) mbar_init(&bar, 1);
  mbar_init(&bars.summed, 1);
  fence_barriers();
}
template <int NS, int STAGE, int RANKS>
struct FewShrinkShared {
  Shared<NS, STAGE, RANKS> items;
  AtOnceBarriers barriers;
};

// A cluster's unit of the shrink.
struct AtOnceUnit {
  int index;  // of its item
  int module, first_rank;
};
__host__ __device__ __forceinline__ int rank_units(const PairArgs& p) { return (p.max_rank + kAtOnceRanks - 1) / kAtOnceRanks; }
__host__ __device__ __forceinline__ int at_once_units(const PairArgs& p, int items) { return items * p.num_modules * rank_units(p); }
// Whether the rows of any batch are two units a cluster at most. Batches that only happen to be, in as many slots, go the way
// of the others: each cluster's second unit would wait for its first, and the expand for both.
__host__ __device__ __forceinline__ bool always_at_once(const PairArgs& p) {
  const int rows = p.num_rows, items = rows / kFewItemRows + p.num_slots;
  return at_once_units(p, rows < items ? rows : items) <= kMostAtOnce * kAtOnceRounds;
}
__device__ __forceinline__ int num_clusters() { return static_cast<int>(gridDim.x) / kShrinkParts; }
__device__ __forceinline__ bool at_once(const PairArgs& p, int num_items) {
  const bool again = p.expand && p.d_in <= kHeldChunks * kChunkSteps * 128 && always_at_once(p);
  return at_once_units(p, num_items) <= min(kMostAtOnce, num_clusters()) * (again ? kAtOnceRounds : 1);
}
__device__ __forceinline__ bool in_unit(const PairArgs& p, int num_items, int round = 0) {
  return round * num_clusters() + static_cast<int>(blockIdx.x) / kShrinkParts < at_once_units(p, num_items);
}
__device__ __forceinline__ AtOnceUnit at_once_unit(const PairArgs& p, int round = 0) {
  const int unit = round * num_clusters() + blockIdx.x / kShrinkParts, of_item = p.num_modules * rank_units(p);
  const int item = quotient(unit, reciprocal(of_item)), rest = unit - item * of_item;
  const int module = quotient(rest, reciprocal(rank_units(p)));
  return AtOnceUnit{item, module, (rest - module * rank_units(p)) * kAtOnceRanks};
}
// Has the items here soon that hand_out asks for first, and the rows' order, by its warp.
__device__ __forceinline__ void touch_first(const PairArgs& p) {
  const int guess = min(static_cast<int>(threadIdx.x & 31), kCuts - 1);
  const int item = min(quotient(blockIdx.x, reciprocal(item_units(p, guess))), p.num_rows - 1);
  prefetch_l1(p.items + item);
  prefetch_l2(p.row_order + min(static_cast<int>(threadIdx.x & 31) * 32, p.num_rows - 1));
}

// Sums of a lane: of 16 rank rows by 8 batch rows, in two chains by bit 2 of k.
using AtOnceSums = float[2][4];
struct Operands {
  uint4 low, high, x;
};
__device__ __forceinline__ Operands read_step(uint32_t at) { return Operands{lds128(at), lds128(at + 512), lds128(at + 1024)}; }
__device__ __forceinline__ void add_step(const Operands& o, AtOnceSums& acc) {
  mma_bf16(acc[0], o.low.x, o.high.x, o.low.y, o.high.y, o.x.x, o.x.y);
  mma_bf16(acc[1], o.low.z, o.high.z, o.low.w, o.high.w, o.x.z, o.x.w);
}
// Chunks of a unit have places in turn. `done`: units before, whose chunks needed no turns if there were any.
struct ChunkTurns {
  int chunks, done;
  static __device__ __forceinline__ int place(int chunk) { return chunk % kHeldChunks; }
  __device__ __forceinline__ void await_full(AtOnceBarriers& bars, int chunk) const {
    mbar_wait(&bars.full[place(chunk)], (chunk / kHeldChunks + done) & 1);
  }
  // For a chunk that is not the first in its place.
  __device__ __forceinline__ void await_empty(AtOnceBarriers& bars, int chunk) const {
    mbar_wait(&bars.empty[place(chunk)], chunk / kHeldChunks - 1 & 1);
  }
  // By the warp that has read a chunk, whose steps are these.
  __device__ __forceinline__ void leave(AtOnceBarriers& bars, int chunk, const Operands (&o)[kChunkSteps], uint32_t nothing) const {
    if (chunk + kHeldChunks >= chunks) return;
    __syncwarp();
    uint32_t seen = 0;
#pragma unroll
    for (const Operands& step : o) seen ^= step.low.x ^ step.high.x ^ step.x.x;
    mbar_arrive_seen(&bars.empty[place(chunk)], (threadIdx.x & 31) == 0, seen, nothing);
  }
};

// Adds the chunks in order. A step is read while three are added, and before the next of them: behind it, what is read
// would wait for registers that the sum leaves late.
__device__ __forceinline__ void add_chunks(const AtOnceShared& sm, AtOnceBarriers& bars, const ChunkTurns& turns,
                                           uint32_t nothing, AtOnceSums& acc) {
  static_assert(kChunkSteps == 4);
  uint32_t at;
  Operands o[kChunkSteps];
  auto read = [&](int d) { o[d] = read_step(at + d * sizeof(Step)); };
  auto begin = [&](int i) {
    turns.await_full(bars, i);
    at = smem_u32(&sm.chunks[turns.place(i)][0].low[threadIdx.x & 31]);
  };
  begin(0);
  read(0), read(1), read(2);
#pragma unroll 1
  for (int i = 1;; ++i) {
    read(3), add_step(o[0], acc);
    turns.leave(bars, i - 1, o, nothing);
    if (i == turns.chunks) break;
    begin(i);
    read(0), add_step(o[1], acc);
    read(1), add_step(o[2], acc);
    read(2), add_step(o[3], acc);
  }
  add_step(o[1], acc), add_step(o[2], acc), add_step(o[3], acc);
}

// By one warp of the cluster's first CTA: adds the parts in order and stores this unit's h.
__device__ __forceinline__ void finish_at_once(const PairArgs& p, AtOnceShared& sm, AtOnceBarriers& bars, const AtOnceUnit& u,
                                               const int4& item, int rank, float scaling, const float4& own, int done,
                                               uint64_t* cleared) {
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3, place = item.z + q * 2;
  auto* h = reinterpret_cast<uint32_t*>(p.h + (static_cast<int64_t>(u.module) * p.num_rows + place) * p.h_stride + u.first_rank + g);
  const int left = item.w - q * 2, written = (rank + 7) / 8 * 8 - u.first_rank;  // rows from this lane's first on; columns
  mbar_wait(&bars.summed, done & 1);
  float sums[4] = {0.f, 0.f, 0.f, 0.f};
  auto add = [&](float4 v) { sums[0] += v.x, sums[1] += v.y, sums[2] += v.z, sums[3] += v.w; };
  add(own);
#pragma unroll
  for (int i = 0; i < kShrinkParts - 1; ++i) add(sm.parts[i][lane]);
  if (p.expand) mbar_wait(cleared, 0);
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const int r = c / 2 * 8 + g;
    const float v = u.first_rank + r < rank ? sums[c] * scaling : 0.f;
    const uint32_t both = bf16x2(v, __shfl_xor_sync(~0u, v, 4));
    if (g % 2 == 0 && c % 2 < left && r < written) store_word(h + c % 2 * (p.h_stride / 2) + c / 2 * 4, both);
  }
}

// This lane's part of x and of rank rows g and g + 8, of the CTA's first chunk; null where there is no such row.
struct AtOnceSource {
  const __nv_bfloat16 *x, *low, *high;
};
// Asks for a chunk of the CTA's k. Of what is not there come zeros: sums stay as they are.
__device__ __forceinline__ void ask_chunk(AtOnceShared& sm, const AtOnceSource& from, const __nv_bfloat16* any, int steps, int chunk) {
  const uint32_t to = smem_u32(&sm.chunks[ChunkTurns::place(chunk)][0].low[threadIdx.x & 31]);
#pragma unroll
  for (int d = 0; d < kChunkSteps; ++d) {
    const int step = chunk * kChunkSteps + d;
    auto copy = [&](uint32_t place, const __nv_bfloat16* row) {
      const bool there = row && step < steps;
      copy_16(place, there ? row + step * 128 : any, there ? 16 : 0);
    };
    copy(to + d * sizeof(Step), from.low);
    copy(to + d * sizeof(Step) + 512, from.high);
    copy(to + d * sizeof(Step) + 1024, from.x);
  }
  copies_commit();
}
// Brings this warp's chunks, two at a time. Those that wait for a place are for all warps but the first, which adds
// chunks up: it would wait for itself. A warp tells of its chunks in order, and of all but one before it waits.
__device__ __forceinline__ void bring_chunks(AtOnceShared& sm, AtOnceBarriers& bars, const AtOnceSource& from,
                                             const __nv_bfloat16* any, int steps, const ChunkTurns& turns) {
  const int warp = threadIdx.x >> 5, held = min(turns.chunks, kHeldChunks);
  auto tell = [&](int chunk) {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) mbar_arrive(&bars.full[turns.place(chunk)]);
  };
  int before = warp, last = warp + kLoaders;
  if (before >= held) return;
  ask_chunk(sm, from, any, steps, before);
  if (last >= held) {
    copies_wait<0>();
    return tell(before);
  }
  ask_chunk(sm, from, any, steps, last);
  for (int i = kHeldChunks + warp - 1; warp > 0 && i < turns.chunks; i += kLoaders - 1) {
    copies_wait<1>();
    tell(before);
    before = last, last = i;
    turns.await_empty(bars, i);
    ask_chunk(sm, from, any, steps, i);
  }
  copies_wait<1>();
  tell(before);
  copies_wait<0>();
  tell(last);
}

// What a unit waits for before it can ask for weights, by one load of each lane: of two, one behind a branch that
// the other decides, the second would be asked for when the first is there.
struct AtOnceSite {
  int4 item;
  int word;  // of lanes 0 to 4 the slot's entry, of lane 5 its scaling, of lanes 8 to 15 a row each
  __device__ __forceinline__ int shown(int lane) const { return __shfl_sync(~0u, word, lane); }
};
__device__ __forceinline__ AtOnceSite ask_at_once(const PairArgs& p, const AtOnceUnit& u, const int4& item) {
  const int slot = static_cast<int>(min(static_cast<unsigned>(item.x), p.num_slots - 1u)), lane = threadIdx.x & 31;
  const Module& m = p.modules[u.module];
  // Lanes of no row have the last one's, and what they sum nobody takes.
  const int* from = p.row_order + item.z + min(lane & 7, item.w - 1);
  if (lane < 5) from = m.entries + slot * 5 + lane;
  if (lane == 5) from = reinterpret_cast<const int*>(m.scaling + slot);
  return AtOnceSite{item, load_now(from)};
}

// Returns whether the unit had rank rows. `done`: units of this cluster before that had some; `cleared`: of h, where
// others read it in this launch.
__device__ __forceinline__ bool shrink_at_once(const PairArgs& p, AtOnceShared& sm, AtOnceBarriers& bars, const AtOnceUnit& u,
                                               const AtOnceSite& site, int done = 0, uint64_t* cleared = nullptr) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3, part = cluster_rank();
  const int rank = min(site.shown(2), p.max_rank);
  if (u.first_rank >= rank) return false;  // and so the whole cluster
  cluster_begun();
  const int steps = (p.d_in - part * 32 + 127) >> 7;
  const ChunkTurns turns{(steps + kChunkSteps - 1) / kChunkSteps, done};
  const int a_row = site.shown(0) + site.item.y * site.shown(3) + u.first_rank, row = site.shown(8 + g), left = rank - u.first_rank;
  const int column = part * 32 + q * 8;
  auto weights = [&](int r) { return r < left ? p.pools[0] + static_cast<int64_t>(a_row + r) * p.d_in + column : nullptr; };
  const AtOnceSource from{g < site.item.w ? p.x + static_cast<int64_t>(row) * p.d_in + column : nullptr, weights(g), weights(g + 8)};
  const float scaling = __int_as_float(site.shown(5));
  bring_chunks(sm, bars, from, p.x, steps, turns);
  AtOnceSums acc = {};
  if (warp == 0) {
    if (part == 0 && lane == 0) mbar_expect(&bars.summed, sizeof(sm.parts));
    if (turns.chunks > 0) add_chunks(sm, bars, turns, static_cast<uint32_t>(p.max_rank) >> 16, acc);
  }
  cluster_all_begun();  // who has arrived must wait before it ends; and the first CTA has used the parts before
  if (warp > 0) return true;
  const float4 own = make_float4(acc[0][0] + acc[1][0], acc[0][1] + acc[1][1], acc[0][2] + acc[1][2], acc[0][3] + acc[1][3]);
  if (part == 0) finish_at_once(p, sm, bars, u, site.item, rank, scaling, own, done, cleared);
  else cluster_store(address_in(0, smem_u32(&sm.parts[part - 1][lane])), own, address_in(0, smem_u32(&bars.summed)));
  return true;
}

// All units of this cluster, of which the first and its site are given. `between` is called once, by all threads,
// behind the first: one of its warps may tell there what `cleared` waits for.
template <class Between>
__device__ __forceinline__ void shrink_all_at_once(const PairArgs& p, AtOnceShared& sm, AtOnceBarriers& bars, int num_items,
                                                   AtOnceUnit unit, AtOnceSite site, uint64_t* cleared, Between between) {
  int done = 0;
  if (in_unit(p, num_items)) done += shrink_at_once(p, sm, bars, unit, site, done, cleared) ? 1 : 0;
  between();
#pragma unroll 1
  for (int round = 1; in_unit(p, num_items, round); ++round) {
    __syncthreads();  // all chunks have been read
    unit = at_once_unit(p, round);
    site = ask_at_once(p, unit, __ldg(reinterpret_cast<const int4*>(p.items) + unit.index));
    done += shrink_at_once(p, sm, bars, unit, site, done, cleared) ? 1 : 0;
  }
}

// The shrink alone: at once, or by pair_kernel's units.
template <int NS, int STAGE, int RANKS>
__global__ void __launch_bounds__(kThreads, 2) few_shrink_kernel(const __grid_constant__ PairArgs p) {
  extern __shared__ __align__(1024) unsigned char few_shrink_raw[];
  using S = FewShrinkShared<NS, STAGE, RANKS>;
  static_assert(sizeof(AtOnceShared) <= sizeof(Shared<NS, STAGE, RANKS>::stages), "at once or by units: not both");
  auto& sm = *reinterpret_cast<S*>(few_shrink_raw);
  const AtOnceUnit u = at_once_unit(p);
  const int num_items = *p.num_items;
  const int4 item = __ldg(reinterpret_cast<const int4*>(p.items) + min(u.index, p.num_rows - 1));
  if (threadIdx.x >> 5 == kUnitWarp) touch_first(p);
  if (threadIdx.x >> 5 == kRowWarp) prefetch_slots(p);
  if (threadIdx.x == kThreads - 32) make_at_once_barriers(sm.barriers);
  make_barriers(p, sm.items);
  if (!at_once(p, num_items)) return serve_items<false>(p, sm.items);
  if (!in_unit(p, num_items)) return;
  shrink_at_once(p, *reinterpret_cast<AtOnceShared*>(sm.items.stages), sm.barriers, u, ask_at_once(p, u, item));
}

}  // namespace lora_jax
