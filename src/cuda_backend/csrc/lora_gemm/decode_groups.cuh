// Expand of so few segments that a CTA has few blocks of the expand's columns, after the shrink of
// lora_gemm/decode_shrink.cuh if the call has one. lora_gemm/decode.cuh has the overview.
//
// Items of one segment are served together, one by each warp of a CTA, since they multiply the same weights:
// 64 rows of one adapter would read them eight times from L2, which takes longer than from memory once. Where a
// segment has few items, a CTA's warps have several blocks of columns at a time.
#pragma once
#include "device/arithmetic.cuh"
#include "lora_gemm/decode_shrink.cuh"

namespace lora_jax {

constexpr int kHWarp = kRowWarp + 1;  // instead of a second row warp: items have few rows
constexpr int kGroupItems = kThreads / 32;    // of a segment, at most
constexpr int kMostOfCta = 28;                // blocks of columns that a CTA has, at most
constexpr int kGroupColumns = 64;             // of a block
constexpr int kWarpTasks = 2;                 // whose rows of y are on their way to a warp at a time

struct FewGroups {
  int count;  // of one module; 0 where they are not what serves the launch
  uint16_t starts[kFewRows + 1];  // first items, and the number of items
};
struct GroupUnit {
  int module, col, blocks, rank;
  int item, items;  // the first one, how many
  const __nv_bfloat16* weights;
};

__device__ __forceinline__ bool is_missing(const uint4& v) {
  return v.x == kMissing || v.y == kMissing || v.z == kMissing || v.w == kMissing;
}
__device__ __forceinline__ int group_blocks(const PairArgs& p, int module = 0) { return p.modules[module].d_out / kGroupColumns; }
// Of a group, of all modules.
__device__ __forceinline__ int all_blocks(const PairArgs& p) {
  int blocks = 0;
  for (int m = 0; m < p.num_modules; ++m) blocks += group_blocks(p, m);
  return blocks;
}
__device__ __forceinline__ int most_groups(const PairArgs& p) {
  return quotient(kMostOfCta * gridDim.x, reciprocal(all_blocks(p)));
}
// Whether so few segments may have so many items: all items of a segment but one are full.
__device__ __forceinline__ bool may_be_groups(const PairArgs& p, int num_items) {
  const int most = most_groups(p);
  return num_items <= most * kGroupItems && num_items * kFewItemRows - p.num_rows <= most * (kFewItemRows - 1);
}

// By the unit warp, whose lanes hold the items: those of a segment are neighbours. More than `most` are none.
__device__ __forceinline__ void find_groups(FewGroups& groups, const AskedTables& asked, int most) {
  const int lane = threadIdx.x & 31, num_items = asked.num_items;
  int count = 0, begin = 0;  // begin: of the segment at the end of the window before
#pragma unroll
  for (int w = 0; w < kFewRows / 32; ++w) {
    if (w * 32 >= num_items) break;
    const int4 item = asked.items[w], last = asked.items[w > 0 ? w - 1 : 0];
    int slot = __shfl_up_sync(~0u, item.x, 1), expert = __shfl_up_sync(~0u, item.y, 1);
    const int last_slot = __shfl_sync(~0u, last.x, 31), last_expert = __shfl_sync(~0u, last.y, 31);
    if (lane == 0) slot = last_slot, expert = last_expert;
    const int i = w * 32 + lane;
    const uint32_t heads = __ballot_sync(~0u, i == 0 || item.x != slot || item.y != expert) & (~0u >> (31 - lane));
    const int start = heads ? w * 32 + 31 - __clz(heads) : begin;
    const bool opens = i < num_items && (i - start) % kGroupItems == 0;
    const uint32_t opening = __ballot_sync(~0u, opens);
    if (opens) groups.starts[count + __popc(opening & ((1u << lane) - 1))] = i;
    count += __popc(opening), begin = __shfl_sync(~0u, start, 31);
  }
  if (lane == 0) groups.count = count <= most ? count : 0, groups.starts[count] = num_items;
}

// Whether there are groups, up to `most`; all warps have the tables then.
template <class S>
__device__ __forceinline__ bool have_groups(S& sm, const AskedTables& asked, int most) {
  if (threadIdx.x >> 5 == kUnitWarp) {
    find_groups(sm.groups, asked, most);
    keep_tables(sm.tables, asked);
  }
  __syncthreads();
  return sm.groups.count > 0;
}

// How the blocks of a launch's groups are shared out.
struct GroupPlan {
  int block_bytes;         // of weights, of all parts
  int groups;              // of each module
  int width;               // blocks of a unit, but for the last one of a group
  int total;               // units
  float by_width;
  // `room`: bytes for the weights of a unit; `parts`: modules of a unit, one or all, which are of one width then.
  __device__ __forceinline__ GroupPlan(const PairArgs& p, int groups, int num_items, int room, int parts = 1)
      : block_bytes((p.max_rank + 15) / 16 * 2048 * parts), groups(groups) {
    const int all = groups * (parts == 1 ? all_blocks(p) : group_blocks(p));
    const int of_cta = quotient(all + gridDim.x - 1, reciprocal(gridDim.x)), by_warps = quotient(kGroupItems * groups, reciprocal(num_items));
    width = max(1, min(min(of_cta, kWarpTasks / parts * by_warps), quotient(room, reciprocal(block_bytes))));
    by_width = reciprocal(width), total = 0;
    for (int m = 0; m < (parts == 1 ? p.num_modules : 1); ++m) total += groups * of_group(p, m);
  }
  // Units of a group.
  __device__ __forceinline__ int of_group(const PairArgs& p, int module) const {
    return quotient(group_blocks(p, module) + width - 1, by_width);
  }
};

// Columns of a group from a unit on, of one module.
template <class S>
__device__ __forceinline__ GroupUnit group_part(const PairArgs& p, const S& sm, const GroupPlan& plan, int group, int first, int module) {
  const uint16_t* starts = sm.groups.starts + group;
  const int4 item = sm.tables.items[starts[0]];
  const int* e = p.modules[module].entries + min(static_cast<unsigned>(item.x), p.num_slots - 1u) * 5;
  const int rank = min(__ldg(e + 2), p.max_rank);
  const int64_t row = __ldg(e + 1) + static_cast<int64_t>(item.y) * __ldg(e + 4);
  const int col = first * kGroupColumns, blocks = min(plan.width, group_blocks(p, module) - first);
  const Module& m = p.modules[module];
  return GroupUnit{module, col, blocks, rank, starts[0], starts[1] - starts[0], m.b_pool + row * m.d_out + col};
}
template <class S>
__device__ __forceinline__ GroupUnit group_unit(const PairArgs& p, const S& sm, const GroupPlan& plan, int unit) {
  int module = 0, of_group = plan.of_group(p, 0);
  while (module + 1 < p.num_modules && unit >= plan.groups * of_group)
    unit -= plan.groups * of_group, of_group = plan.of_group(p, ++module);
  const int group = quotient(unit, reciprocal(of_group));
  return group_part(p, sm, plan, group, (unit - group * of_group) * plan.width, module);
}

// Asks for the blocks' weights, by all threads: each [rank row][64 columns], zeros up to a step of 16 rows, 16
// bytes of a row in the order of the copy engine's swizzle.
__device__ __forceinline__ void fetch_blocks(const PairArgs& p, const GroupUnit& u, const GroupPlan& plan, uint32_t to) {
  const int c = threadIdx.x % 8, rows = (u.rank + 15) / 16 * 16, d_out = p.modules[u.module].d_out;
  const float by_rows = reciprocal(max(rows, 1));
  for (int n = threadIdx.x / 8; n < u.blocks * rows; n += kThreads / 8) {
    const int block = quotient(n, by_rows), r = n - block * rows;
    const bool there = r < u.rank;
    const auto* from = u.weights + static_cast<int64_t>(there ? r : 0) * d_out + block * kGroupColumns + c * 8;
    copy_16(to + block * plan.block_bytes + r * 128 + ((c ^ (r & 7)) << 4), from, there ? 16 : 0);
  }
}

// As clear_h, by the last CTAs: who has a shrink to do should wait for nothing before.
__device__ __forceinline__ void clear_last(const PairArgs& p) {
  const int lane = threadIdx.x & 31, words = p.num_modules * p.num_rows * (p.h_stride / 8);  // of 16 bytes
  const int first = static_cast<int>(gridDim.x - 1 - blockIdx.x) * 32;
  const uint4 missing = make_uint4(kMissing, kMissing, kMissing, kMissing);
  for (int i = first + lane; i < words; i += gridDim.x * 32) reinterpret_cast<uint4*>(p.h)[i] = missing;
  __syncwarp();
  if (lane > 0) return;
  if (first < words) release_count(&p.state->cleared, 2 * gridDim.x - 1);
  else relaxed_count(&p.state->cleared, 2 * gridDim.x - 1);
}

// Brings h of an item to where its warp has room for it, by 16 bytes: so many warps want the same few lines
// that L2 would be busy with finer loads. Each warp asks for its own until it is there: were one to wait for all,
// the others' loads would come after, 0.7 us of a pair on an H200.
template <class S>
__device__ __forceinline__ void bring_h(const PairArgs& p, int module, const int4& item, int rank, uint32_t* to) {
  const int lane = threadIdx.x & 31, groups = (rank + 7) / 8, words = item.w * groups;  // of 16 bytes
  const __nv_bfloat16* from = p.h + (static_cast<int64_t>(module) * p.num_rows + item.z) * p.h_stride;
  bool missing;
  do {
    missing = false;
#pragma unroll
    for (int i = 0; i < S::kSteps / 2; ++i) {
      const int at = i * 32 + lane, n = at / max(groups, 1);
      if (at >= words) continue;
      const uint4 v = load_words(reinterpret_cast<const uint4*>(from + n * p.h_stride) + at - n * groups);
      missing = missing || is_missing(v);
      *reinterpret_cast<uint4*>(to + n * S::kHStride + (at - n * groups) * 4) = v;
    }
  } while (__any_sync(~0u, p.shrink && missing));
  __syncwarp();
}

// acc += h B of 64 columns: as expand_block, of one group of boxes that are 16 rank rows tall.
template <int STEPS>
__device__ __forceinline__ void group_block(uint32_t weights, const uint32_t* h, int rank, float (&acc)[4][4]) {
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  const uint32_t even = weights + q * 256 + ((g ^ (q * 2)) << 4), odd = (even ^ 16) + 128;  // rows q * 2 and the next
#pragma unroll
  for (int s = 0; s < STEPS; ++s) {
    if (s * 16 >= rank) break;
    const uint32_t lo = s * 2048, hi = lo + 1024, h0 = h[s * 8], h1 = s * 16 + 8 < rank ? h[s * 8 + 4] : 0u;
    const uint4 w0 = lds128(even + lo), w1 = lds128(odd + lo), w2 = lds128(even + hi), w3 = lds128(odd + hi);
    auto step = [&](float (&out)[4], uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
      mma_bf16(out, __byte_perm(r0, r1, 0x5410), __byte_perm(r0, r1, 0x7632), __byte_perm(r2, r3, 0x5410),
               __byte_perm(r2, r3, 0x7632), h0, h1);
    };
    step(acc[0], w0.x, w1.x, w2.x, w3.x);
    step(acc[1], w0.y, w1.y, w2.y, w3.y);
    step(acc[2], w0.z, w1.z, w2.z, w3.z);
    step(acc[3], w0.w, w1.w, w2.w, w3.w);
  }
}

// One item and block of columns, by a warp: its rows of y, and where they are.
struct GroupTask {
  int4 item;
  int block;
  __nv_bfloat16* out[2];
  uint4 y[2];
};
// Returns a unit's `task`-th: items of a block follow each other. Asks for y.
template <class S>
__device__ __forceinline__ GroupTask group_task(const PairArgs& p, const S& sm, const GroupUnit& u, int task) {
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  const Module& m = p.modules[u.module];
  GroupTask t;
  t.block = quotient(task, reciprocal(u.items));
  t.item = sm.tables.items[u.item + task - t.block * u.items];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int row = sm.tables.order[t.item.z + min(q * 2 + e, t.item.w - 1)];
    t.out[e] = m.y + static_cast<int64_t>(row) * m.d_out + u.col + t.block * kGroupColumns + g * 8;
    t.y[e] = make_uint4(0, 0, 0, 0);
    load_last(t.y[e], t.out[e], p.accumulate && q * 2 + e < t.item.w);
  }
  return t;
}
template <class S>
__device__ __forceinline__ void add_to_task(GroupTask& t, uint32_t weights, const uint32_t* h, int rank) {
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  float acc[4][4] = {};
  group_block<S::kSteps>(weights, h + min(g, t.item.w - 1) * S::kHStride + q, rank, acc);
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    t.y[e].x = add_bf16x2(t.y[e].x, acc[0][e], acc[0][e + 2]);
    t.y[e].y = add_bf16x2(t.y[e].y, acc[1][e], acc[1][e + 2]);
    t.y[e].z = add_bf16x2(t.y[e].z, acc[2][e], acc[2][e + 2]);
    t.y[e].w = add_bf16x2(t.y[e].w, acc[3][e], acc[3][e + 2]);
  }
}
__device__ __forceinline__ void store_task(const GroupTask& t) {
  const int q = threadIdx.x & 3;
#pragma unroll
  for (int e = 0; e < 2; ++e) store_last(t.out[e], t.y[e], q * 2 + e < t.item.w);
}

template <class S>
__device__ void expand_groups(const PairArgs& p, S& sm, int num_items) {
  constexpr int kHWords = kFewItemRows * S::kHStride, kRoom = (S::kStages * S::kStage - kGroupItems * kHWords * 4) / 2;
  static_assert(S::kSteps * 2048 <= kRoom, "two blocks and h must fit");
  const GroupPlan plan(p, sm.groups.count, num_items, kRoom);
  const int warp = threadIdx.x >> 5, buffer = plan.width * plan.block_bytes;
  const uint32_t weights = smem_u32(sm.stages);
  uint32_t* h = reinterpret_cast<uint32_t*>(&sm.stages[0][0] + 2 * kRoom / 16 * 16) + warp * kHWords;
  int unit = gridDim.x - 1 - blockIdx.x, at = 0;  // the first CTAs have a shrink behind them
  if (unit >= plan.total) return;
  GroupUnit next = group_unit(p, sm, plan, unit);
  fetch_blocks(p, next, plan, weights);
  copies_commit();
  for (; unit < plan.total; unit += gridDim.x, at ^= 1) {
    const GroupUnit u = next;
    const int tasks = u.rank > 0 || !p.accumulate ? u.items * u.blocks : 0;
    const bool more = unit + static_cast<int>(gridDim.x) < plan.total;
    GroupTask some[kWarpTasks];
    auto ask = [&](int first) {
#pragma unroll
      for (int i = 0; i < kWarpTasks; ++i)
        if (first + i * kGroupItems < tasks) some[i] = group_task(p, sm, u, first + i * kGroupItems);
    };
    ask(warp);
    if (more) {
      next = group_unit(p, sm, plan, unit + gridDim.x);
      fetch_blocks(p, next, plan, weights + (at ^ 1) * buffer);
      copies_commit();
    }
    if (warp < tasks) bring_h<S>(p, u.module, some[0].item, u.rank, h);
    if (more) copies_wait<1>();
    else copies_wait<0>();
    __syncthreads();
    for (int first = warp; first < tasks; first += kWarpTasks * kGroupItems) {
      if (first > warp) ask(first);
#pragma unroll
      for (int i = 0; i < kWarpTasks; ++i) {
        if (first + i * kGroupItems >= tasks) break;
        GroupTask& task = some[i];
        if ((i > 0 || first > warp) && u.items > 1) {
          __syncwarp();
          bring_h<S>(p, u.module, task.item, u.rank, h);
        }
        add_to_task<S>(task, weights + at * buffer + task.block * plan.block_bytes, h, u.rank);
        store_task(task);
      }
    }
    __syncthreads();  // the blocks that come next but one may overwrite these
  }
}

// `unit` and `site` are those of this cluster's first unit.
template <class S>
__device__ void shrink_for_groups(const PairArgs& p, S& sm, int num_items, const AtOnceUnit& unit, const AtOnceSite& site) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  uint32_t before = 0;
  if (warp == kHWarp) {
    before = lane == 0 ? count_launch(p) : 0;
    clear_last(p);
  }
  auto& shared = *reinterpret_cast<AtOnceShared*>(sm.stages);
  shrink_all_at_once(p, shared, sm.at_once, num_items, unit, site, &sm.cleared, [&] {
    if (warp == kHWarp) await_clear(p, is_odd(__shfl_sync(~0u, before, 0)), &sm.cleared);
  });
  __syncthreads();  // all of h is cleared, and what the shrink used is free
}
// Both phases, or the expand alone.
template <class S>
__device__ void serve_groups(const PairArgs& p, S& sm, int num_items, const AtOnceUnit& unit, const AtOnceSite& site) {
  if (p.shrink) shrink_for_groups(p, sm, num_items, unit, site);
  expand_groups(p, sm, num_items);
}

}  // namespace lora_jax
