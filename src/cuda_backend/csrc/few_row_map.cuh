// The row map (reroute.cuh) of so few rows that each can be held against all the others.
//
// All that it needs lies in memory that nobody has read for a layer, a microsecond away. So it is asked for at
// once, by row, and put into the order of visits afterwards; a table costs a second round trip. Cold, 96 rows of
// 64 experts take 2.9 us on an H200, by the sort of more rows 5.8.
#pragma once
#include "row_sort.cuh"

namespace lora_jax {

constexpr int kFewMapBits = 7, kFewMapRows = 1 << kFewMapBits, kFewMapWindows = kFewMapRows / 32;
constexpr int kFewMapGroups = 1024;

// By all threads: writes the items of `rows` sorted places. A warp finds them all, so that none waits for another,
// and writes those that begin in its own window of 32 places.
__device__ __forceinline__ void cut_few_items(const uint32_t* owners, int rows, const RerouteArgs& a) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const uint32_t below = (1u << lane) - 1, above = ~below << 1;
  uint32_t owner[kFewMapWindows], runs[kFewMapWindows];
#pragma unroll
  for (int w = 0; w < kFewMapWindows; ++w) {
    const int i = w * 32 + lane;
    owner[w] = i < rows ? owners[i] : kNobody;
    runs[w] = __ballot_sync(~0u, i < rows && (i == 0 || owner[w] != owners[i - 1]));
  }
  int ends[kFewMapWindows], next = rows;  // where the first run behind a window begins
#pragma unroll
  for (int w = kFewMapWindows - 1; w >= 0; --w) {
    ends[w] = next;
    if (runs[w]) next = w * 32 + __ffs(runs[w]) - 1;
  }
  int begin = 0, count = 0;  // of the last run before a window; items before it
#pragma unroll
  for (int w = 0; w < kFewMapWindows; ++w) {
    const int i = w * 32 + lane;
    const uint32_t behind = runs[w] & above, before = runs[w] & ~above;
    const int first = before ? w * 32 + 31 - __clz(before) : begin;
    const uint32_t heads = __ballot_sync(~0u, owner[w] != kNobody && (i - first) % a.item_rows == 0);
    if (w == warp && (heads >> lane & 1)) {
      const int end = behind ? w * 32 + __ffs(behind) - 1 : ends[w];
      a.items[count + __popc(heads & below)] = Item{static_cast<int>(owner[w] >> 16), static_cast<int>(owner[w] & 0xffff),
                                                    i, min(end - i, a.item_rows)};
    }
    count += __popc(heads);
    if (runs[w]) begin = w * 32 + 31 - __clz(runs[w]);
  }
  if (threadIdx.x == 0) *a.num_items = count;
}

template <bool ITEMS>
__global__ void __launch_bounds__(kFewMapRows) few_row_map_kernel(const SortPlan p) {
  __shared__ uint4 keys[kFewMapRows / 4];   // of rows: group and turn
  __shared__ uint32_t owners[kFewMapRows];  // by sorted place
  __shared__ int turns[kFewMapRows];        // of tokens
  __shared__ int sizes[kFewMapGroups];
  const RerouteArgs& a = p.args;
  const int row = threadIdx.x, known = min(row, p.rows - 1), token = token_of(p, known);
  const int id = __ldg(a.ids + known), live = live_rows(p);
  const int slot = a.token_to_slot ? __ldg(a.token_to_slot + token) : -1;
  const int adapter = ITEMS ? __ldg(a.token_to_adapter + token) : -1;
  const int visited = a.token_order && row < a.tokens ? __ldg(a.token_order + row) : row;  // a token, in its turn
  for (int g = row; g < a.groups; g += kFewMapRows) sizes[g] = 0;
  if (row < a.tokens) turns[visited] = row;
  int group = a.groups;
  if (row < live && id >= 0 && id < a.experts) group = slot >= 0 && slot < a.slots ? __ldg(a.table + slot * a.experts + id) : id;
  const bool grouped = group >= 0 && group < a.groups;
  if (!grouped) group = a.groups;
  __syncthreads();
  const uint32_t key = group << kFewMapBits | (turns[token] * a.k + known - token * a.k);
  reinterpret_cast<uint32_t*>(keys)[row] = row < p.rows ? key : ~0u;
  if (row < p.rows && grouped) atomicAdd(&sizes[group], 1);
  __syncthreads();
  int place = 0;
#pragma unroll 8
  for (int i = 0; i < kFewMapRows / 4; ++i) {
    const uint4 k = keys[i];
    place += (k.x < key) + (k.y < key) + (k.z < key) + (k.w < key);
  }
  for (int g = row; g < a.groups; g += kFewMapRows) a.sizes[g] = sizes[g];
  if (row < p.rows) {
    a.order[place] = row, a.inverse[row] = place;
    a.row_to_token[place] = token, a.row_to_expert[place] = grouped ? id : 0;
    owners[place] = grouped && adapter >= 0 ? owner_of(adapter, id) : kNobody;
  }
  if (!ITEMS) return;
  __syncthreads();
  cut_few_items(owners, p.rows, a);
}

}  // namespace lora_jax
