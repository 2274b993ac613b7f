// Grouped LoRA of few rows: shrink and expand, or the expand alone. The arithmetic, and so the bits, are those
// of pair_kernel (lora_gemm/items.cuh).
//
// The time of a small launch is mostly latency. So every CTA loads all items, by loads that do not depend on
// each other, and its first unit is fixed, not drawn from a counter. One warp fetches h for the
// others, ahead of its use, and polls where it is still missing. Rows of no item become zeros here where y
// held nothing. Few segments are served by lora_gemm/decode_groups.cuh.
#pragma once
#include <climits>

#include "lora_gemm/decode_groups.cuh"
#include "lora_gemm/items.cuh"
#include "device/warp_sums.cuh"

namespace lora_jax {

constexpr int kFewTickets = 4;

struct FewTicket {
  Unit unit;
  int rows[kFewItemRows];
};

template <int NS, int STAGE, int RANKS>
struct FewShared {
  static constexpr int kStages = NS, kStage = STAGE, kSteps = RANKS / 16, kTickets = kFewTickets, kRowWarps = 1;
  static constexpr bool kTellsAsked = true;
  static constexpr bool kBringsH = false;  // row warps: see fetch_h
  using Ticket = FewTicket;
  static constexpr int kHStride = RANKS / 2 + 4;  // words of a row of h, so that lanes meet distinct banks
  static_assert(STAGE % 1024 == 0, "the copy engine's swizzle repeats every 1024 bytes");
  static_assert(RANKS * 256 + kFewItemRows * 272 <= STAGE, "128 columns of everything must fit a stage");
  alignas(1024) unsigned char stages[NS][STAGE];
  FewTables tables;
  FewGroups groups;
  alignas(16) uint32_t h[kFewTickets][kFewItemRows * kHStride];  // of the tickets
  FewTicket tickets[kFewTickets];
  alignas(8) uint64_t full[NS], empty[NS], ticket_full[kFewTickets], ticket_empty[kFewTickets], h_full[kFewTickets];
  uint64_t asked[kFewTickets];  // for almost all of a unit's weights
  uint64_t counted;      // this CTA, in the launch
  bool odd;              // launch
  uint64_t cleared;  // h by all CTAs
  AtOnceBarriers at_once;
};

// ---------------------------------------------------------------- units
template <class S>
__device__ __forceinline__ void publish(S& sm, Ring<kFewTickets>& ring, const Unit& mine, int from) {
  const int lane = threadIdx.x & 31, place = __shfl_sync(~0u, mine.place, from);
  if (__shfl_sync(~0u, static_cast<int>(mine.kind), from) == kEnd) return;
  mbar_wait(&sm.ticket_empty[ring.at()], ring.phase() ^ 1);
  FewTicket& t = sm.tickets[ring.at()];
  if (lane < kFewItemRows) t.rows[lane] = sm.tables.order[min(place + lane, kFewRows - 1)];
  if (lane == from) t.unit = mine;
  __syncwarp();
  if (lane == 0) mbar_arrive(&sm.ticket_full[ring.at()]);
  ring.next();
}

template <class S>
__device__ __forceinline__ Unit unit_of(const PairArgs& p, const S& sm, const FewPlan& plan, const Share& share) {
  const int module = p.num_modules == 1 ? 0 : quotient(share.item, reciprocal(plan.num_items));
  return few_unit<S>(p, share, find_site(p, module, sm.tables.items[share.item - module * plan.num_items]));
}

// Draws blocks one by one, each when almost all of what came before has been asked for: whoever drew further ahead
// would still have some when others end.
template <class S>
__device__ __forceinline__ void hand_out_drawn(const PairArgs& p, S& sm, Ring<kFewTickets>& ring, const FewPlan& plan) {
  const int lane = threadIdx.x & 31;
  mbar_wait(&sm.counted, 0);
  int* draws = &p.state->draws[sm.odd];
  while (true) {
    const Ring<kFewTickets> last = ring.before();
    mbar_wait(&sm.asked[last.at()], last.phase());
    const int drawn = __shfl_sync(~0u, lane == 0 ? atomicAdd(draws, 1) : 0, 0);
    if (drawn >= plan.drawn) return;
    const Unit unit = unit_of(p, sm, plan, plan.drawn_share(drawn));
    publish(sm, ring, unit, 0);
  }
}

// Who has no shrink unit lets the others' weights come first: all wait for h, and B comes meanwhile. Else A and B share
// memory's bandwidth, and it idles when B has filled all stages and h is still to come (64 rows of 34 adapters, Zipf,
// rank 64, on an H200: 24.4 us for 25.0).
__device__ __forceinline__ void wait_for_shrinks(const PairArgs& p, const FewTables& tables, int num_items,
                                                 uint64_t start) {
  float boxes = 0.f;  // of 8 rank rows
  for (int i = threadIdx.x & 31; i < num_items; i += 32)
    for (int m = 0; m < p.num_modules; ++m)
      boxes += divide_up(min(find_site(p, m, tables.items[i]).rank, p.max_rank), 8);
  const float bytes = 16.f * p.d_in * warp_sum(boxes);
  const uint64_t until = start + static_cast<uint64_t>(__fdividef(bytes, kFirstBytes));
  while (now_nanos() < until) __nanosleep(100);
}

// Makes out this CTA's units. The first one of the shrink does not wait for the plan: each lane knows its
// site for one way to cut.
template <class S>
__device__ void hand_out_few(const PairArgs& p, S& sm, FewPlan& plan, const AskedTables& asked) {
  const int lane = threadIdx.x & 31;
  const uint64_t start = now_nanos();
  Ring<kFewTickets> ring;
  Site guessed{};
  if (p.shrink) guessed = find_site(p, 0, asked.guessed);
  keep_tables(sm.tables, asked);
  if (asked.num_items > 0) {
    bool begun = false;
    if (p.shrink) {
      plan.cut_shrink(p, asked.num_items);
      const Share first = plan.shrink_share(0);
      begun = first.item < plan.num_items;
      if (begun) publish(sm, ring, few_unit<S>(p, first, guessed), plan.cut);
    } else {
      plan.cut_no_shrink(p, asked.num_items);
    }
    plan.cut_expand(p, asked);
    if (p.shrink && !begun && plan.drawn > 0) wait_for_shrinks(p, sm.tables, plan.num_items, start);
    const int own = plan.own();
    for (int n = begun ? 1 : 0; n < own; n += 32) {
      const Unit unit = unit_of(p, sm, plan, n + lane < own ? plan.share(n + lane) : kNothing);
      for (int from = 0; from < min(own - n, 32); ++from) publish(sm, ring, unit, from);
    }
    if (plan.drawn > 0) hand_out_drawn(p, sm, ring, plan);
  }
  mbar_wait(&sm.ticket_empty[ring.at()], ring.phase() ^ 1);
  if (lane == 0) {
    sm.tickets[ring.at()].unit.kind = kEnd;
    mbar_arrive(&sm.ticket_full[ring.at()]);
  }
}

// ---------------------------------------------------------------- h
// Fetches the h of each expand unit as soon as its ticket is there, and asks again while some is missing.
template <class S>
__device__ void fetch_h(const PairArgs& p, S& sm) {
  const int lane = threadIdx.x & 31;
  constexpr int kLoads = S::kSteps / 2;  // of 8 ranks of a row, by each lane
  Ring<kFewTickets> taken;
  const uint32_t before = lane == 0 ? count_launch(p) : 0;
  if (p.shrink) clear_h(p);
  const bool odd = is_odd(__shfl_sync(~0u, before, 0));
  if (lane == 0) sm.odd = odd, mbar_arrive(&sm.counted);
  if (p.shrink) await_clear(p, odd, &sm.cleared);
  while (true) {
    const Unit& u = take(sm, taken).unit;
    if (u.kind == kEnd) return;
    if (u.kind == kExpand) {
      const int words = u.num_rows * u.groups;  // of 16 bytes
      const __nv_bfloat16* from = p.h + (static_cast<int64_t>(u.module) * p.num_rows + u.place) * p.h_stride;
      uint4 v[kLoads];
      bool missing;
      do {
        missing = false;
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          const int at = i * 32 + lane, n = at / max(u.groups, 1);
          if (at >= words) continue;
          v[i] = load_words(reinterpret_cast<const uint4*>(from + n * p.h_stride) + at - n * u.groups);
          missing = missing || v[i].x == kMissing || v[i].y == kMissing || v[i].z == kMissing || v[i].w == kMissing;
        }
      } while (__any_sync(~0u, p.shrink && missing));
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int at = i * 32 + lane, n = at / max(u.groups, 1);
        if (at >= words) continue;
        *reinterpret_cast<uint4*>(&sm.h[taken.at()][n * S::kHStride + (at - n * u.groups) * 4]) = v[i];
      }
    }
    __syncwarp();
    if (lane == 0) mbar_arrive(&sm.h_full[taken.at()]);
    let_go(sm, taken);
  }
}

// Makes rows of no item zero in all modules; CTAs share out the places. A lane looks at one gap: most are
// empty.
template <class S>
__device__ void zero_gaps(const PairArgs& p, const S& sm) {
  const int lane = threadIdx.x & 31, ctas = gridDim.x, num_items = *p.num_items;
  for (int first = 0; first <= num_items; first += 32) {
    const int i = min(first + lane, num_items);
    const int4 before = sm.tables.items[max(i - 1, 0)];
    const int begin = i > 0 ? before.z + before.w : 0, end = i < num_items ? sm.tables.items[i].z : p.num_rows;
    for (uint32_t gaps = __ballot_sync(~0u, first + lane <= num_items && begin < end); gaps; gaps &= gaps - 1) {
      const int from = __ffs(gaps) - 1, place = __shfl_sync(~0u, begin, from);
      const int turns = quotient(place + ctas - 1 - static_cast<int>(blockIdx.x), reciprocal(ctas));
      zero_rows(p, turns * ctas + blockIdx.x, __shfl_sync(~0u, end, from), ctas);
    }
  }
}

// ---------------------------------------------------------------- consumers
template <class S>
__device__ __forceinline__ void leave_stage(S& sm, Ring<S::kStages>& ring) {
  __syncwarp();
  if ((threadIdx.x & 31) == 0) mbar_arrive(&sm.empty[ring.at()]);
  ring.next();
}

// As shrink_stage, with as many loads at once as registers hold: so few warps wait for each of them.
template <int GROUPS>
__device__ __forceinline__ void few_shrink_stage(const Unit& u, uint32_t base, int columns, Sums<GROUPS, 1>& acc) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = row_of_quad(lane >> 2), q = lane & 3;
  constexpr int kSteps = 8 / GROUPS;
  const uint32_t mine = base + (warp >> 1) * 1024 + g * 128 + ((((warp & 1) * 4 + q) ^ g) << 4);
  const uint32_t group = 1024 << u.wide, half = (1 << u.wide >> 1) - 1;  // of a box: bytes, steps of 128 columns less 1
  const uint32_t row = base + rows_at(u) + (g < u.num_rows ? g : 0) * row_stride(u.width) + warp * 64 + q * 16;
  const int steps = (columns - warp * 32 + 127) >> 7;
#pragma unroll 1
  for (int first = 0; first < steps; first += kSteps) {
    uint4 x[kSteps], w[kSteps][GROUPS];
#pragma unroll
    for (int d = 0; d < kSteps; ++d) {
      const int s = min(first + d, steps - 1);
      x[d] = lds128(row + s * 256);
#pragma unroll
      for (int i = 0; i < GROUPS; ++i)  // those past the end read the first: their sums are not used
        w[d][i] = lds128(mine + ((s * 2 >> u.wide) * u.groups + (i < u.groups ? i : 0)) * group + (s & half) * 2048);
    }
#pragma unroll
    for (int d = 0; d < kSteps; ++d) {
      if (first + d >= steps) break;
#pragma unroll
      for (int i = 0; i < GROUPS; i += 2) {
        const uint4 &lo = w[d][i], &hi = w[d][i + 1 < GROUPS ? i + 1 : i];
        mma_bf16(acc[0][i / 2][0], lo.x, hi.x, lo.y, hi.y, x[d].x, x[d].y);
        mma_bf16(acc[1][i / 2][0], lo.z, hi.z, lo.w, hi.w, x[d].z, x[d].w);
      }
    }
  }
}

template <int GROUPS, class S>
__device__ __forceinline__ void few_shrink_unit(const PairArgs& p, S& sm, Ring<S::kStages>& ring, const Unit& u) {
  Sums<GROUPS, 1> acc = {};
  for (int k = 0; k < p.d_in; k += u.width) {
    mbar_wait(&sm.full[ring.at()], ring.phase());
    few_shrink_stage<GROUPS>(u, smem_u32(sm.stages[ring.at()]), min(u.width, p.d_in - k), acc);
    if (k + u.width < p.d_in) leave_stage(sm, ring);
  }
  consumer_sync();  // all warps have read the last stage
  finish_shrink<GROUPS, 1>(p, u, reinterpret_cast<float*>(sm.stages[ring.at()]), &sm.empty[ring.at()], &sm.cleared, acc);
  ring.next();
}

template <class S>
__device__ __forceinline__ void few_expand_unit(const PairArgs& p, S& sm, Ring<S::kStages>& ring, const FewTicket& t,
                                                const Ring<kFewTickets>& taken) {
  const Unit& u = t.unit;
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  mbar_wait(&sm.h_full[taken.at()], taken.phase());
  const uint32_t* from = sm.h[taken.at()] + (g < u.num_rows ? g : 0) * S::kHStride + q;
  Factors<S::kSteps, 1> h;
#pragma unroll
  for (int s = 0; s < S::kSteps; ++s) {
    h[s][0][0] = s * 2 < u.groups ? from[s * 8] : 0u;
    h[s][0][1] = s * 2 + 1 < u.groups ? from[s * 8 + 4] : 0u;
  }
  for (int c = u.begin; c < u.end; c += u.width) {
    mbar_wait(&sm.full[ring.at()], ring.phase());
    expand_stage<S::kSteps, 1>(p, t, smem_u32(sm.stages[ring.at()]), u.width, c, min(u.width, u.end - c), 0, 1, h);
    leave_stage(sm, ring);
  }
}

template <class S>
__device__ void consume_few(const PairArgs& p, S& sm) {
  Ring<S::kStages> ring;
  Ring<kFewTickets> taken;
  while (true) {
    const FewTicket& t = take(sm, taken);
    const Unit& u = t.unit;
    if (u.kind == kEnd) return;
    if (u.kind == kExpand) few_expand_unit(p, sm, ring, t, taken);
    else if (u.groups == 1) few_shrink_unit<1>(p, sm, ring, u);
    else few_shrink_unit<2>(p, sm, ring, u);
    let_go(sm, taken);
  }
}

// ---------------------------------------------------------------- a CTA
template <class S>
__device__ __forceinline__ void make_few_barriers(const PairArgs& p, S& sm) {
  const int warp = threadIdx.x >> 5;
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kStages; ++i) {
      mbar_init(&sm.full[i], 2);  // weights and rows
      mbar_init(&sm.empty[i], kConsumers);
    }
    for (int i = 0; i < kFewTickets; ++i) {
      mbar_init(&sm.ticket_full[i], 1);
      mbar_init(&sm.ticket_empty[i], kConsumers + 3);
      mbar_init(&sm.h_full[i], 1);
      mbar_init(&sm.asked[i], 1);
    }
    mbar_init(&sm.counted, 1);
    mbar_init(&sm.cleared, 1);
    if (p.shrink) make_at_once_barriers(sm.at_once);
    fence_barriers();
  } else if (warp == kWeightWarp && threadIdx.x % 32 < 2) {
    if (p.shrink) prefetch_map(&p.maps[0][threadIdx.x % 32]);
    prefetch_map(&p.maps[1][threadIdx.x % 32]);
  } else if (warp == kRowWarp) {
    prefetch_slots(p);
  }
  __syncthreads();
}

template <int NS, int STAGE, int RANKS>
__global__ void __launch_bounds__(kThreads, 2) few_kernel(const __grid_constant__ PairArgs p) {
  extern __shared__ __align__(1024) unsigned char few_raw[];
  auto& sm = *reinterpret_cast<FewShared<NS, STAGE, RANKS>*>(few_raw);
  const int warp = threadIdx.x >> 5;
  AskedTables asked{};
  FewPlan plan(p);
  if (warp == kUnitWarp) asked = ask_tables(p);
  const int num_items = *p.num_items;
  const AtOnceUnit unit = at_once_unit(p);
  int4 item{};
  if (p.shrink) item = __ldg(reinterpret_cast<const int4*>(p.items) + min(unit.index, p.num_rows - 1));
  make_few_barriers(p, sm);
  const bool ahead = p.shrink && at_once(p, num_items);
  AtOnceSite site{};
  if (ahead && in_unit(p, num_items)) site = ask_at_once(p, unit, item);
  if ((!p.shrink || ahead) && may_be_groups(p, num_items) && have_groups(sm, asked, most_groups(p))) {
    serve_groups(p, sm, num_items, unit, site);
    if (!p.accumulate && warp == kHWarp) zero_gaps(p, sm);
    return;
  }
  if (warp < kConsumers) {
    consume_few(p, sm);
  } else if (warp == kUnitWarp) {
    hand_out_few(p, sm, plan, asked);
  } else if (warp == kWeightWarp) {
    produce_weights(p, sm);
  } else if (warp == kRowWarp) {
    produce_rows(p, sm);
  } else {
    fetch_h(p, sm);
    if (!p.accumulate) zero_gaps(p, sm);
  }
}

// The shrink of a kernel all of whose rows are expanded by groups, however many; returns the number of items. Ranks to
// 64. More than one unit of the shrink a cluster takes a d_in of up to 8192: see shrink_all_at_once.
template <class S>
__device__ __forceinline__ int shrink_always(const PairArgs& p, S& sm) {
  const int warp = threadIdx.x >> 5;
  AskedTables asked{};
  if (warp == kUnitWarp) asked = ask_tables(p);
  const int num_items = *p.num_items;
  const AtOnceUnit unit = at_once_unit(p);
  const int4 item = __ldg(reinterpret_cast<const int4*>(p.items) + min(unit.index, p.num_rows - 1));
  if (threadIdx.x == 0) mbar_init(&sm.cleared, 1), make_at_once_barriers(sm.at_once);
  if (warp == kRowWarp) prefetch_slots(p);
  __syncthreads();
  AtOnceSite site{};
  if (in_unit(p, num_items)) site = ask_at_once(p, unit, item);
  if (have_groups(sm, asked, INT_MAX)) shrink_for_groups(p, sm, num_items, unit, site);
  return num_items;
}

// Maps of one x whose widths differ, as q, k and v: each has its pool and width in its module.
template <int NS, int STAGE, int RANKS>
__global__ void __launch_bounds__(kThreads, 2) joined_kernel(const __grid_constant__ PairArgs p) {
  extern __shared__ __align__(1024) unsigned char joined_raw[];
  auto& sm = *reinterpret_cast<FewShared<NS, STAGE, RANKS>*>(joined_raw);
  const int num_items = shrink_always(p, sm);
  if (num_items > 0) expand_groups(p, sm, num_items);
}

}  // namespace lora_jax
