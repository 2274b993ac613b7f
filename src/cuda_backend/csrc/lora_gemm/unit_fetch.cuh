// The warp that finds the next units of grouped LoRA ahead of their use. lora_gemm/items.cuh has the overview.
#pragma once
#include "lora_gemm/units.cuh"

namespace lora_jax {

// What is on its way from memory of a share: its item and the item's slot in its module.
struct Site {
  int module;
  Item item;
  int a_offset, b_offset, rank, a_stride, b_stride;
  float scaling;
};
// Items past the last hold anything: what is read by them is not used, but must be there.
__device__ __forceinline__ void load_item(const PairArgs& p, Site& site, int item) {
  const int4 v = __ldg(reinterpret_cast<const int4*>(p.items) + min(item, p.num_rows - 1));
  site.item = Item{static_cast<int>(min(static_cast<unsigned>(v.x), p.num_slots - 1u)), v.y, v.z, v.w};
}
// Leaves of an item the rows of its slice, if it has any.
__device__ __forceinline__ void cut_rows(Item& item, int slice, int rows) {
  item.row_begin += slice * rows;
  item.num_rows = min(item.num_rows - slice * rows, rows);
}
__device__ __forceinline__ void load_slot(const PairArgs& p, Site& site) {
  const Module& m = p.modules[site.module];
  const int* e = m.entries + site.item.slot * 5;
  site.a_offset = __ldg(e), site.b_offset = __ldg(e + 1), site.rank = __ldg(e + 2);
  site.a_stride = __ldg(e + 3), site.b_stride = __ldg(e + 4);
  site.scaling = __ldg(m.scaling + site.item.slot);
}
// Returns what each lane knows of the rows of lane `from`: the place of one of them.
__device__ __forceinline__ int load_row(const PairArgs& p, const Site& site, int from) {
  const int place = __shfl_sync(~0u, site.item.row_begin, from) + static_cast<int>(threadIdx.x & 31);
  return __ldg(p.row_order + min(static_cast<unsigned>(place), p.num_rows - 1u));
}

// Returns the share as a unit without stages; kEnd when the item has no such part (a smaller rank than the
// largest).
__device__ __forceinline__ Unit describe_unit(const PairArgs& p, const Share& s, const Site& site) {
  Unit u{};
  u.item = s.item, u.module = site.module, u.scaling = site.scaling;
  u.rank = min(site.rank, p.max_rank), u.num_rows = site.item.num_rows, u.place = site.item.row_begin;
  u.staged_rows = s.kind == kShrink || p.accumulate ? u.num_rows : 0;
  if (s.kind == kShrink) {
    u.first_rank = s.begin;
    u.weight_row = site.a_offset + site.item.expert * site.a_stride + s.begin;
    u.groups = (min(s.end, u.rank) - s.begin + 7) / 8;
    u.end = p.d_in;
    if (u.num_rows > 0 && s.begin < u.rank) u.kind = kShrink;
  } else if (s.kind == kExpand) {
    u.weight_row = site.b_offset + site.item.expert * site.b_stride;
    u.groups = (u.rank + 7) / 8;
    u.begin = s.begin * kBlock, u.end = min(s.end * kBlock, p.d_out);
    if (u.rank > 0 || !p.accumulate) u.kind = kExpand;
  }
  return u;
}

// Returns the share as a unit. Units of few rows have small stages, which are begun and ended sooner: in the
// shrink where that counts, `soon`, and in the expand where wide boxes fit them, or even if only narrow ones
// do where it counts.
__device__ __forceinline__ Unit make_unit(const PairArgs& p, const Share& s, const Site& site, int stage_bytes, bool soon) {
  Unit u = describe_unit(p, s, site);
  if (u.kind == kEnd) return u;
  const int wide = p.wide[u.kind - kShrink];
  const unsigned least = soon && u.kind == kExpand ? kBlock : 64 << wide;
  const bool small = u.num_rows <= kHeldRows && (soon || u.kind == kExpand) && columns_in(u, kSmallStage) >= least;
  cut_stages(u, small ? min(kSmallStage, stage_bytes) : stage_bytes, wide);
  return u;
}

// What a lane brings of the h of a ticket.
template <class S>
struct HeldH {
  uint32_t words[S::Ticket::kLaneWords];
};
template <class S>
__device__ __forceinline__ HeldH<S> no_h() {
  HeldH<S> h;
#pragma unroll
  for (uint32_t& word : h.words) word = kMissing;
  return h;
}
// Asks for the h of lane `from`'s item, as far as a ticket holds it.
template <class S>
__device__ __forceinline__ HeldH<S> load_held(const PairArgs& p, const Site& site, int from) {
  constexpr int kWords = S::Ticket::kWords;
  const int rows = __shfl_sync(~0u, site.item.num_rows, from), place = __shfl_sync(~0u, site.item.row_begin, from);
  const int64_t first = static_cast<int64_t>(__shfl_sync(~0u, site.module, from)) * p.num_rows + place;
  HeldH<S> h = no_h<S>();
#pragma unroll
  for (int i = 0; i < S::Ticket::kLaneWords; ++i) {
    const int at = i * 32 + static_cast<int>(threadIdx.x & 31), n = at / kWords, word = at % kWords;
    if (rows <= kHeldRows && n < rows && word * 2 < p.h_stride)
      h.words[i] = load_word(reinterpret_cast<const uint32_t*>(p.h + (first + n) * p.h_stride) + word);
  }
  return h;
}

template <class S>
__device__ __forceinline__ void publish(S& sm, Ring<kTickets>& ring, const Unit& mine, int from, int row,
                                        const HeldH<S>& h) {
  const int lane = threadIdx.x & 31;
  if (__shfl_sync(~0u, static_cast<int>(mine.kind), from) == kEnd) return;
  mbar_wait(&sm.ticket_empty[ring.at()], ring.phase() ^ 1);
  auto& t = sm.tickets[ring.at()];
  t.rows[lane] = row;
#pragma unroll
  for (int i = 0; i < S::Ticket::kLaneWords; ++i) t.h[i * 32 + lane] = h.words[i];
  if (lane == from) t.unit = mine;
  __syncwarp();
  if (lane == 0) mbar_arrive(&sm.ticket_full[ring.at()]);
  ring.next();
}

// Publishes the first shrink unit of this CTA, for which all that is on the way from memory is asked
// for by lanes 0 to kCuts - 1, one for each way to cut, while the number of items is on its way too.
// Returns whether there was such a unit.
template <int MOST_ROWS, class S>
__device__ __forceinline__ bool publish_first(const PairArgs& p, S& sm, Ring<kTickets>& ring, const int* count,
                                              int& num_items, int& cut) {
  const int lane = threadIdx.x & 31, guess = min(lane, kCuts - 1), units = item_units(p, guess);
  Site site{};
  Share share{kShrink, static_cast<int>(divide(blockIdx.x, units)), 0, 0, 0};
  num_items = *count;
  load_item(p, site, share.item);
  if (num_items == 0) return false;  // tiles wait for this
  load_slot(p, site);
  int rows[kCuts];
#pragma unroll
  for (int c = 0; c < kCuts; ++c) rows[c] = load_row(p, site, c);
  share.begin = (blockIdx.x - share.item * units) * (8 << guess), share.end = share.begin + (8 << guess);
  cut = choose_cut(p, num_items);
  const bool there = p.shrink && __shfl_sync(~0u, share.item, cut) < num_items;
  if (there) {
    const int all = num_items * p.num_modules * item_units(p, cut);
    cut_rows(site.item, 0, shrink_rows<MOST_ROWS>(p, all));
    const Unit unit = make_unit(p, share, site, S::kStage, few_units(all));
    publish(sm, ring, unit, cut, cut == 0 ? rows[0] : cut == 1 ? rows[1] : rows[2], no_h<S>());
  }
  return there;
}

// Makes out the units of `count` lanes at once, so that they cost the latencies of one. `behind`: h may
// be there already, so tickets bring it. `soon`: see make_unit.
template <class S>
__device__ __forceinline__ void publish_all(const PairArgs& p, S& sm, Ring<kTickets>& ring, const Share& share,
                                            Site& site, int count, bool behind, bool soon) {
  load_slot(p, site);
  int next_row = load_row(p, site, 0);
  HeldH<S> next_h = behind ? load_held<S>(p, site, 0) : no_h<S>();
  const Unit unit = make_unit(p, share, site, S::kStage, soon);
  for (int from = 0; from < count; ++from) {
    const int row = next_row;
    const HeldH<S> h = next_h;
    next_row = load_row(p, site, from + 1);
    if (behind) next_h = load_held<S>(p, site, from + 1);
    publish(sm, ring, unit, from, row, h);
  }
}
template <int MOST_ROWS>
__device__ __forceinline__ Site find_item(const PairArgs& p, const Plan<MOST_ROWS>& plan, const Share& share) {
  Site site{};
  site.module = divide(share.item, plan.num_items);
  load_item(p, site, share.item - site.module * plan.num_items);
  if (share.kind == kShrink) cut_rows(site.item, share.slice, plan.unit_rows);
  return site;
}

// Brings this CTA's share of the tables into L2 while the number of items is on its way, and of h where
// that is given.
__device__ __forceinline__ void prefetch_tables(const PairArgs& p) {
  const int at = blockIdx.x * 128;
  if (at < p.num_rows * 16) prefetch_l2(reinterpret_cast<const char*>(p.items) + at);
  if (at < p.num_rows * 4) prefetch_l2(reinterpret_cast<const char*>(p.row_order) + at);
  for (int i = at; !p.shrink && i < p.num_rows * p.h_stride * 2; i += gridDim.x * 128)
    prefetch_l2(reinterpret_cast<const char*>(p.h) + i);
  for (int m = 0; m < p.num_modules; ++m) {
    if (at < p.num_slots * 20) prefetch_l2(reinterpret_cast<const char*>(p.modules[m].entries) + at);
    if (at < p.num_slots * 4) prefetch_l2(reinterpret_cast<const char*>(p.modules[m].scaling) + at);
  }
}

// The same of what has been drawn where h is given: all that the units want is on its way at once (the expand of
// 1024 rows of rank 64, Zipf over 512, on an H200: 106.5 us, 107.1 one by one). Behind a shrink that is too early.
template <class S>
__device__ __forceinline__ void publish_drawn(const PairArgs& p, S& sm, Ring<kTickets>& ring, const Share& share, Site& site) {
  load_slot(p, site);
  int rows[kDraws];
  HeldH<S> h[kDraws];
#pragma unroll
  for (int i = 0; i < kDraws; ++i) rows[i] = load_row(p, site, i), h[i] = load_held<S>(p, site, i);
  const Unit unit = make_unit(p, share, site, S::kStage, false);
#pragma unroll
  for (int i = 0; i < kDraws; ++i) publish(sm, ring, unit, i, rows[i], h[i]);
}

// Draws units ahead of their use: while two are waiting to be taken, the numbers of the next two are
// on their way.
template <class P, class S>
__device__ __forceinline__ void hand_out_draws(const PairArgs& p, S& sm, Ring<kTickets>& ring, const P& plan, bool odd) {
  const int lane = threadIdx.x & 31;
  // All at once: drawn one by one, the last unit could be another lane's than the one that is asked whether to end.
  auto draw = [&] { return lane == 0 ? atomicAdd(&p.state->draws[odd], kDraws) : 0; };
  int drawn = draw();
  for (int first; (first = __shfl_sync(~0u, drawn, 0)) < plan.draws;) {
    const Share share = plan.drawn_share(lane < kDraws ? first + lane : plan.draws);
    Site site = find_item(p, plan, share);
    drawn = draw();
    if (p.shrink) publish_all(p, sm, ring, share, site, kDraws, true, false);
    else publish_drawn(p, sm, ring, share, site);
  }
}

// The same of a shrink, one by one: a unit is drawn when most of the weights of the one before have been asked for.
// It takes a CTA several microseconds, so whoever drew further ahead would still have units when others end.
template <class P, class S>
__device__ __forceinline__ void hand_out_shrinks(const PairArgs& p, S& sm, Ring<kTickets>& ring, const P& plan, bool odd) {
  const int lane = threadIdx.x & 31;
  while (true) {
    const Ring<kTickets> last = ring.before();
    mbar_wait(&sm.asked[last.at()], last.phase());
    const int drawn = __shfl_sync(~0u, lane == 0 ? atomicAdd(&p.state->draws[odd], 1) : 0, 0);
    if (drawn >= plan.shrink_draws) return;
    const Share share = lane == 0 ? plan.shrink_of(drawn + static_cast<int>(gridDim.x), 0) : kNothing;
    Site site = find_item(p, plan, share);
    publish_all(p, sm, ring, share, site, 1, false, false);
  }
}

template <int MOST_ROWS, class S>
__device__ void hand_out(const PairArgs& p, S& sm) {
  const int lane = threadIdx.x & 31;
  const uint32_t before = lane == 0 ? count_begun(p) : 0;
  if (lane == 0) prefetch_tables(p);
  Ring<kTickets> ring;
  int num_items, cut;
  const bool begun = publish_first<MOST_ROWS>(p, sm, ring, p.num_items, num_items, cut);
  const bool odd = is_odd(__shfl_sync(~0u, before, 0));
  if (lane == 0 && before % gridDim.x == 0) p.state->draws[!odd] = 0;  // for the next launch
  if (num_items > 0) {
    const Plan<MOST_ROWS> plan(p, num_items, cut);
    const int own = plan.own();
    bool waits = p.shrink && p.expand;
    for (int n = begun ? 1 : 0; n < own; n += 32) {
      const Share share = n + lane < own ? plan.own_share(n + lane) : kNothing;
      Site site = find_item(p, plan, share);
      if (waits) await_clear(p, odd, &sm.cleared);  // while the items are on their way
      waits = false;
      publish_all(p, sm, ring, share, site, min(own - n, 32), false, share.kind == kExpand || few_units(plan.units));
    }
    if (waits) await_clear(p, odd, &sm.cleared);
    if (plan.shrink_draws) hand_out_shrinks(p, sm, ring, plan, odd);
    if (plan.draws) hand_out_draws(p, sm, ring, plan, odd);
  }
  mbar_wait(&sm.ticket_empty[ring.at()], ring.phase() ^ 1);
  if (lane == 0) {
    sm.tickets[ring.at()].unit.kind = kEnd;
    mbar_arrive(&sm.ticket_full[ring.at()]);
  }
}

}  // namespace lora_jax
