// The row map of at most kShortRows rows, as in a batch of single tokens: one thread per row. A row's place is
// the number of rows before it.
//
// What such a map takes is latency: of memory, so that ids, order and adapters are asked for at once, and of
// fetching the instructions: 2.4 us with items on an H200, by the cluster's kernel 5.0.
#pragma once
#include "reroute/row_sort.cuh"

namespace lora_jax {

constexpr int kShortRows = 128, kShortWarps = kShortRows / 32;

struct ShortShared {
  alignas(16) uint32_t keys[kShortRows];           // a row's group and visit
  int ids[kShortRows], tokens[kShortRows], adapters[kShortRows];  // as they come
  int rows[kShortRows], experts[kShortRows];       // by place
  uint32_t owners[kShortRows];
  uint32_t runs[kShortWarps], heads[kShortWarps];  // see cut_items
  int sizes[kClusterGroups];
};

// Writes the items of the rows, whose owners are there.
__device__ __forceinline__ void cut_short(const SortPlan& p, ShortShared& sm) {
  const int n = threadIdx.x, lane = n & 31, warp = n >> 5, item_rows = p.args.item_rows;
  const uint32_t below = (1u << lane) - 1, above = ~below << 1, owner = n < p.rows ? sm.owners[n] : kNobody;
  const uint32_t runs = __ballot_sync(~0u, n < p.rows && (n == 0 || owner != sm.owners[n - 1]));
  if (lane == 0) sm.runs[warp] = runs;
  __syncthreads();
  int run = 0, end = p.rows;  // where the row's run begins, and ends
#pragma unroll
  for (int w = 0; w < kShortWarps; ++w) {
    const uint32_t before = w < warp ? sm.runs[w] : w == warp ? runs & ~above : 0;
    if (before) run = w * 32 + 31 - __clz(before);
  }
#pragma unroll
  for (int w = kShortWarps - 1; w >= 0; --w) {
    const uint32_t behind = w > warp ? sm.runs[w] : w == warp ? runs & above : 0;
    if (behind) end = w * 32 + __ffs(behind) - 1;
  }
  const bool head = owner != kNobody && (n - run) % item_rows == 0;
  const uint32_t heads = __ballot_sync(~0u, head);
  if (lane == 0) sm.heads[warp] = heads;
  __syncthreads();
  int at = 0, total = 0;
#pragma unroll
  for (int w = 0; w < kShortWarps; ++w) {
    at += w < warp ? __popc(sm.heads[w]) : w == warp ? __popc(heads & below) : 0;
    total += __popc(sm.heads[w]);
  }
  const int slot = static_cast<int>(owner >> 16), expert = static_cast<int>(owner & 0xffff);
  if (head) p.args.items[at] = Item{slot, expert, n, min(end - n, item_rows)};
  if (n == 0) *p.args.num_items = total;
}

template <bool ITEMS>
__global__ void __launch_bounds__(kShortRows) short_rows_kernel(const SortPlan p) {
  extern __shared__ __align__(16) unsigned char short_raw[];
  auto& sm = *reinterpret_cast<ShortShared*>(short_raw);
  const RerouteArgs& a = p.args;
  const int n = threadIdx.x, token = min(n, a.tokens - 1);
  const int live_end = live_rows(p);
  sm.ids[n] = __ldg(a.ids + min(n, p.rows - 1));
  sm.tokens[n] = a.token_order ? __ldg(a.token_order + token) : token;
  if (ITEMS) sm.adapters[n] = __ldg(a.token_to_adapter + token);
#pragma unroll 1
  for (int g = n; g < a.groups; g += kShortRows) sm.sizes[g] = 0;
  __syncthreads();
  const bool live = n < p.rows;
  const int nth = min(n, p.rows - 1), visit = token_of(p, nth), own = sm.tokens[visit];
  const int row = own * a.k + nth - visit * a.k;
  const int id = sm.ids[row], slot = a.token_to_slot ? __ldg(a.token_to_slot + own) : -1;
  const int group = group_of(p, a.table, picked(p, row, live_end, id, slot));
  const bool grouped = group < a.groups;
  const uint32_t key = sm.keys[n] = live ? group * kShortRows + n : ~0u;
  if (live && grouped) atomicAdd(&sm.sizes[group], 1);
  __syncthreads();
  int place = 0;
#pragma unroll 4
  for (int i = 0; i < kShortRows / 4; ++i) {
    const uint4 k = reinterpret_cast<const uint4*>(sm.keys)[i];
    place += (k.x < key) + (k.y < key) + (k.z < key) + (k.w < key);
  }
  if (live) {
    sm.rows[place] = row, sm.experts[place] = grouped ? id : 0;
    if (ITEMS) sm.owners[place] = grouped && sm.adapters[own] >= 0 ? owner_of(sm.adapters[own], id) : kNobody;
    a.inverse[row] = place;
  }
  __syncthreads();
  if (live) a.order[n] = sm.rows[n], a.row_to_token[n] = token_of(p, sm.rows[n]), a.row_to_expert[n] = sm.experts[n];
#pragma unroll 1
  for (int g = n; g < a.groups; g += kShortRows) a.sizes[g] = sm.sizes[g];
  if (ITEMS) cut_short(p, sm);
}

}  // namespace lora_jax
