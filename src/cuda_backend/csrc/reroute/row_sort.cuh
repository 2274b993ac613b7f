// Parts of the sort by group: the group of a row, and its rank among the rows of that group.
#pragma once
#include <cuda_runtime_api.h>

#include "adapter_items/row_items.cuh"

namespace lora_jax {

struct RerouteArgs {
  const int* ids;               // [tokens, k]
  const int* num_tokens;        // [1]
  const int* token_to_slot;     // [tokens] of the table, or none: no table
  const int* table;             // [slots, experts]
  const int* token_order;       // [tokens] the order in which they are visited, or none: as they come
  const int* token_to_adapter;  // [tokens], -1: none; or none at all: no items
  int tokens, k, slots, experts, groups, item_rows;
  int* order;          // [rows] out: sorted place -> row
  int* inverse;        // [rows] out: row -> sorted place
  int* sizes;          // [groups] out
  int* row_to_token;   // [rows] out, by sorted place
  int* row_to_expert;  // [rows] out, by sorted place: as the router chose, 0 in no group
  Item* items;         // [rows] out
  int* num_items;      // [1] out
  // Between launches:
  uint16_t* counts;  // see counts_of
  uint32_t* owners;  // [rows] by sorted place
};

constexpr int kBlockRows = kScanThreads;  // that a CTA sorts
constexpr int kRowBits = 11, kRowMask = (1 << kRowBits) - 1;
constexpr int kMostGroups = 16384, kMostRows = 1 << 18, kMostTable = 8192;
constexpr int kClusterGroups = kScanThreads - 1;  // of one launch
constexpr int kMostCutCtas = 16, kCutRows = 2048;  // of a cluster; rows that each cuts at least
constexpr int kSortShared = 232448 - 1024;
constexpr uint32_t kLookUp = 1u << 31, kNoGroup = kLookUp - 1;

struct SortPlan {
  RerouteArgs args;
  int rows, warps, run;          // a warp's run of rows
  int group_bits;                // of a group's number
  bool keep_table;               // in shared memory
  uint32_t k_inverse;            // 2^31 / k, rounded up
};

// Shared memory of a block that sorts. `all` and `shift` are sums over blocks, in slices at first.
struct SortArrays {
  int* warp_sums;
  uint32_t *keys, *sorted;     // [rows]: a row's group and rank; rows by group
  int* experts;                // [rows] as the router chose
  int *table, *all, *shift;    // shift: what makes a place here one of the whole
  uint16_t *starts, *counts;   // [groups + 1], [warps, groups + 1]
};

// Groups and that of the rows in none, rounded up to pairs.
__host__ __device__ inline int even_groups(const SortPlan& p) { return (p.args.groups + 2) / 2 * 2; }
__host__ __device__ inline int sort_slices(const SortPlan& p) {
  const int slices = kScanThreads / (even_groups(p) / 2);
  return slices > 1 ? slices : 1;
}
__host__ __device__ inline int table_size(const SortPlan& p) {
  return p.keep_table ? p.args.slots * p.args.experts : 0;
}
inline int sort_bytes(const SortPlan& p) {
  const int words = 3 * kBlockRows + table_size(p) + 2 * sort_slices(p) * even_groups(p);
  return kScanThreads / 32 * 4 + words * 4 + (1 + p.warps) * even_groups(p) * 2;
}
__device__ __forceinline__ SortArrays sort_arrays(unsigned char* raw, const SortPlan& p) {
  const int sums = sort_slices(p) * even_groups(p);
  SortArrays s;
  s.warp_sums = reinterpret_cast<int*>(raw);
  s.keys = reinterpret_cast<uint32_t*>(s.warp_sums + kScanThreads / 32), s.sorted = s.keys + kBlockRows;
  s.experts = reinterpret_cast<int*>(s.sorted + kBlockRows), s.table = s.experts + kBlockRows;
  s.all = s.table + table_size(p), s.shift = s.all + sums;
  s.starts = reinterpret_cast<uint16_t*>(s.shift + sums), s.counts = s.starts + even_groups(p);
  return s;
}

__device__ __forceinline__ int token_of(const SortPlan& p, int row) {
  return static_cast<int>(static_cast<uint64_t>(row) * p.k_inverse >> 31);
}

// The n-th row that is visited.
__device__ __forceinline__ int visited(const SortPlan& p, int n) {
  if (!p.args.token_order) return n;
  const int t = token_of(p, n);
  return __ldg(p.args.token_order + t) * p.args.k + n - t * p.args.k;
}

// A row's group, or where in the table it stands; `id` is what the router chose, `slot` its token's in the table.
__device__ __forceinline__ uint32_t picked(const SortPlan& p, int row, int live_rows, int id, int slot) {
  const RerouteArgs& a = p.args;
  if (row >= live_rows || id < 0 || id >= a.experts) return kNoGroup;
  return slot >= 0 && slot < a.slots ? kLookUp | (slot * a.experts + id) : id;
}
__device__ __forceinline__ uint32_t pick(const SortPlan& p, int row, int live_rows, int* id) {
  const RerouteArgs& a = p.args;
  *id = __ldg(a.ids + row);
  return picked(p, row, live_rows, *id, a.token_to_slot ? __ldg(a.token_to_slot + token_of(p, row)) : -1);
}
__device__ __forceinline__ int group_of(const SortPlan& p, const int* table, uint32_t picked) {
  const int group = picked & kLookUp ? table[picked & ~kLookUp] : picked;
  return group >= 0 && group < p.args.groups ? group : p.args.groups;
}
__device__ __forceinline__ void fetch_table(const SortPlan& p, int* table) {
#pragma unroll 1
  for (int i = threadIdx.x; i < table_size(p); i += kScanThreads) copy_4(smem_u32(table + i), p.args.table + i);
  copies_commit();
}
__device__ __forceinline__ int live_rows(const SortPlan& p) {
  return min(__ldg(p.args.num_tokens), p.args.tokens) * p.args.k;
}

// f(place in the block) for a warp's rows, 32 at a time; lanes past the end are given `rows`.
template <int UNROLL, class F>
__device__ __forceinline__ void each_row(const SortPlan& p, int rows, F f) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  if (warp >= p.warps) return;
  const int end = min((warp + 1) * p.run, rows);
#pragma unroll UNROLL
  for (int i = warp * p.run; i < end; i += 32) f(i + lane < end ? i + lane : rows);
}

// Leaves the group and the rank of each row in its key, and the warps' counts.
__device__ __forceinline__ void rank_rows(const SortPlan& p, const SortArrays& s, int rows) {
  const int lane = threadIdx.x & 31;
  uint16_t* counts = s.counts + (threadIdx.x >> 5) * (p.args.groups + 1);
  each_row<1>(p, rows, [&](int i) {
    const bool live = i < rows;
    const uint32_t group = live ? s.keys[i] : 0;
    const unsigned peers = same_lanes(live, group, p.group_bits);
    const int before = __popc(peers & ((1u << lane) - 1)), earlier = live ? counts[group] : 0;
    __syncwarp();
    if (live) s.keys[i] = group << kRowBits | (earlier + before);
    if (live && before == 0) counts[group] = earlier + __popc(peers);
    __syncwarp();
  });
}

// Turns the warps' counts of a group into the ranks of their first rows; returns their sum.
__device__ __forceinline__ int rank_warps(const SortPlan& p, uint16_t* counts) {
  const int groups = p.args.groups + 1;
  int sum = 0;
#pragma unroll 1
  for (int w = 0; w < p.warps; w += 8) {
    int n[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) n[i] = w + i < p.warps ? counts[(w + i) * groups] : 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (w + i < p.warps) counts[(w + i) * groups] = sum;
      sum += n[i];
    }
  }
  return sum;
}

// Whose a row is, if it is anyone's and in a group.
__device__ __forceinline__ uint32_t owner_of_row(const SortPlan& p, int row, int expert, bool grouped) {
  const int slot = __ldg(p.args.token_to_adapter + token_of(p, row));
  return grouped && slot >= 0 ? owner_of(slot, expert) : kNobody;
}

}  // namespace lora_jax
