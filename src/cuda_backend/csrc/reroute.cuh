// The row map: sorts (token, expert) rows by the matrix that each one uses, and cuts the rows of
// adapters into items of work. Stable, no host in the loop, one launch.
//
// A cluster of CTAs takes the rows in equal shares, one CTA where they are few. A warp counts its
// run of rows by group and remembers each row's rank among its equals; scans over warps, CTAs (who
// read each other's totals in shared memory) and groups turn counts into places. Rows are then put
// in order in shared memory, so that what leaves it leaves in runs. Rerouting is a look-up in a
// table that is fetched while the ids are on their way: it adds no launch and no round trip.
//
// Rows of a group that use one adapter stand together if tokens are visited in the order of their
// adapters, which is the same for all layers: it is no key of this sort.
#pragma once
#include <cuda_runtime_api.h>

#include "row_items.cuh"

namespace lora_jax {

struct RerouteArgs {
  const int* ids;            // [tokens, k]
  const int* num_tokens;     // [1], or none: all are real
  const int* token_to_slot;  // [tokens] of the table, or none: no table
  const int* table;          // [slots, experts]
  const int* token_order;    // [tokens] the order in which they are visited, or none: as they come
  const int* token_to_adapter;  // [tokens], -1: none; or none at all: no items
  const int* item_expert;       // [rows], if there are items
  int tokens, k, slots, experts, groups, item_rows;
  int* order;          // [rows] out: sorted place -> row
  int* inverse;        // [rows] out: row -> sorted place; or none, and none of the next three
  int* sizes;          // [groups] out
  int* row_to_token;   // [rows] out, by sorted place
  int* row_to_expert;  // [rows] out, by sorted place: as the router chose, 0 in no group
  Item* items;         // [rows] out
  int* num_items;      // [1] out
};

constexpr int kRowBits = 14, kRowMask = (1 << kRowBits) - 1;  // of a CTA's rows: in 32 bits with the group
constexpr int kMostCtaRows = 1 << kRowBits, kFewCtaRows = 2048, kMostCtas = 16;
constexpr int kMostGroups = 16384;
constexpr int kSortShared = 232448 - 1024;
constexpr uint32_t kLookUp = 1u << 31, kNoGroup = kLookUp - 1;

struct SortPlan {
  RerouteArgs args;
  int rows, cta_rows, warps, run;  // a warp's run of rows
  bool keep_table;                 // in shared memory
  uint32_t k_inverse;              // 2^31 / k, rounded up
};

struct SortArrays {
  int *warp_sums, *item_total, *grouped;
  uint32_t *keys, *sorted;     // [cta_rows]: a row's group and rank; rows by group
  int *sums;                   // [groups + 1] of all CTAs, where `sorted` will be
  int *shift;                  // [groups + 1] what makes a place here one of the whole
  int *table;
  uint16_t *totals, *counts;   // [groups + 1], [warps, groups + 1]

  __device__ SortArrays(unsigned char* raw, const SortPlan& p) {
    const int groups = p.args.groups + 1;
    int* at = reinterpret_cast<int*>(raw);
    warp_sums = at, item_total = at + 32, grouped = at + 33, at += 36;
    keys = reinterpret_cast<uint32_t*>(at), at += p.cta_rows;
    sums = at, sorted = reinterpret_cast<uint32_t*>(at), at += max(p.cta_rows, groups);
    shift = at, at += groups;
    table = at, at += p.keep_table ? p.args.slots * p.args.experts : 0;
    totals = reinterpret_cast<uint16_t*>(at), counts = totals + (groups + 1) / 2 * 2;
  }
};

inline int sort_bytes(const SortPlan& p) {
  const int groups = p.args.groups + 1, table = p.keep_table ? p.args.slots * p.args.experts : 0;
  const int words = 36 + p.cta_rows + (p.cta_rows > groups ? p.cta_rows : groups) + groups + table;
  return words * 4 + (groups + 1) / 2 * 4 + (p.warps * groups + 1) / 2 * 4;
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

// A group, or where in the table it stands.
__device__ __forceinline__ uint32_t pick(const SortPlan& p, int n, int live_rows) {
  const RerouteArgs& a = p.args;
  const int row = visited(p, n), id = __ldg(a.ids + row);
  const int slot = a.token_to_slot ? __ldg(a.token_to_slot + token_of(p, row)) : -1;
  if (row >= live_rows || id < 0 || id >= a.experts) return kNoGroup;
  return slot >= 0 && slot < a.slots ? kLookUp | (slot * a.experts + id) : id;
}

// f(place in the CTA) for a warp's rows, 32 at a time; lanes past the end are given `rows`.
template <class F>
__device__ __forceinline__ void each_row(const SortPlan& p, int rows, F f) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  if (warp >= p.warps) return;
  const int end = min((warp + 1) * p.run, rows);
#pragma unroll 4
  for (int i = warp * p.run; i < end; i += 32) f(i + lane < end ? i + lane : rows);
}

__device__ __forceinline__ void rank_rows(const SortPlan& p, const SortArrays& s, int rows) {
  const int lane = threadIdx.x & 31, groups = p.args.groups;
  const int* table = p.keep_table ? s.table : p.args.table;
  uint16_t* counts = s.counts + (threadIdx.x >> 5) * (groups + 1);
  each_row(p, rows, [&](int i) {
    if (i == rows) return;
    const uint32_t key = s.keys[i];
    const int group = key & kLookUp ? table[key & ~kLookUp] : key;
    s.keys[i] = group >= 0 && group < groups ? group : groups;
  });
  each_row(p, rows, [&](int i) {
    const bool live = i < rows;
    const uint32_t group = live ? s.keys[i] : kNoGroup;
    const unsigned peers = __match_any_sync(~0u, group);
    const int before = __popc(peers & ((1u << lane) - 1)), earlier = live ? counts[group] : 0;
    __syncwarp();
    if (live) s.keys[i] = group << kRowBits | (earlier + before);
    if (live && before == 0) counts[group] = earlier + __popc(peers);
    __syncwarp();
  });
}

// Turns counts into places: of a warp's first row of each group in the CTA, and from there in the whole.
__device__ __forceinline__ void place_groups(const SortPlan& p, const SortArrays& s) {
  const int groups = p.args.groups + 1, per = (groups + kScanThreads - 1) / kScanThreads;
  const int begin = min(static_cast<int>(threadIdx.x) * per, groups), end = min(begin + per, groups);
  const int cta = blockIdx.x, ctas = gridDim.x;
  int mine = 0, all = 0;
  for (int g = begin; g < end; ++g) {
    int n = 0;
    for (int w = 0; w < p.warps; ++w) {
      const int own = s.counts[w * groups + g];
      s.counts[w * groups + g] = n, n += own;
    }
    s.totals[g] = n, mine += n;
  }
  if (ctas > 1) cluster_sync();
  for (int g = begin; g < end; ++g) {
    int sum = 0, before = 0;
    if (ctas == 1) sum = s.totals[g];
#pragma unroll 8
    for (int c = 0; c < (ctas > 1 ? ctas : 0); ++c) {
      const int n = lds16_of(c, smem_u32(s.totals + g));
      sum += n, before += c < cta ? n : 0;
    }
    s.sums[g] = sum, s.shift[g] = before, all += sum;
    if (cta == 0 && g < p.args.groups && p.args.inverse) p.args.sizes[g] = sum;
  }
  int place = cta_scan(mine, s.warp_sums, 0, plus), of_all = cta_scan(all, s.warp_sums, 0, plus);
  for (int g = begin; g < end; ++g) {
    if (g == p.args.groups) *s.grouped = of_all;
    s.shift[g] += of_all - place;
    for (int w = 0; w < p.warps; ++w) s.counts[w * groups + g] += place;
    place += s.totals[g], of_all += s.sums[g];
  }
}

__device__ __forceinline__ void write_rows(const SortPlan& p, const SortArrays& s, int first, int rows) {
  const RerouteArgs& a = p.args;
  const uint16_t* counts = s.counts + (threadIdx.x >> 5) * (a.groups + 1);
  each_row(p, rows, [&](int i) {
    if (i == rows) return;
    const uint32_t key = s.keys[i], group = key >> kRowBits;
    const int place = counts[group] + (key & kRowMask);
    s.sorted[place] = group << kRowBits | i;
    if (a.inverse) a.inverse[visited(p, first + i)] = place + s.shift[group];
  });
  __syncthreads();
  for (int i = threadIdx.x; i < rows; i += kScanThreads) {
    const uint32_t key = s.sorted[i], group = key >> kRowBits;
    const int row = visited(p, first + (key & kRowMask)), place = i + s.shift[group];
    a.order[place] = row;
    if (!a.inverse) continue;
    a.row_to_token[place] = token_of(p, row);
    a.row_to_expert[place] = group < static_cast<uint32_t>(a.groups) ? __ldg(a.ids + row) : 0;
  }
}

// Items of this CTA's share of the sorted places; a share's border also ends an item.
__device__ __forceinline__ void write_items(const SortPlan& p, const SortArrays& s, int first, int rows) {
  const RerouteArgs& a = p.args;
  for (int i = threadIdx.x; i < rows; i += kScanThreads) {
    const int row = __ldcg(a.order + first + i), slot = __ldg(a.token_to_adapter + token_of(p, row));
    s.keys[i] = first + i < *s.grouped && slot >= 0 ? owner_of(slot, __ldg(a.item_expert + row)) : kNobody;
  }
  __syncthreads();
  cut_items(s.keys, rows, first, a.item_rows, s.warp_sums, a.items, [&](int total) {
    const int cta = blockIdx.x, ctas = gridDim.x;
    int before = 0;
    if (ctas > 1) {
      *s.item_total = total;  // the same of every thread
      cluster_sync();
      for (int c = 0; c < cta; ++c) before += lds32_of(c, smem_u32(s.item_total));
    }
    if (cta == ctas - 1 && threadIdx.x == 0) *a.num_items = before + total;
    return before;
  });
}

__global__ void __launch_bounds__(kScanThreads) sort_rows_kernel(const SortPlan p) {
  extern __shared__ __align__(16) unsigned char sort_raw[];
  const SortArrays s(sort_raw, p);
  const int first = min(static_cast<int>(blockIdx.x) * p.cta_rows, p.rows), rows = min(p.cta_rows, p.rows - first);
  if (p.keep_table)
    for (int i = threadIdx.x; i < p.args.slots * p.args.experts; i += kScanThreads)
      copy_4(smem_u32(s.table + i), p.args.table + i);
  copies_commit();
  const int live_rows = p.args.num_tokens ? min(__ldg(p.args.num_tokens), p.args.tokens) * p.args.k : p.rows;
  each_row(p, rows, [&](int i) {
    if (i < rows) s.keys[i] = pick(p, first + i, live_rows);
  });
  for (int i = threadIdx.x; i < (p.warps * (p.args.groups + 1) + 1) / 2; i += kScanThreads)
    reinterpret_cast<uint32_t*>(s.counts)[i] = 0;
  copies_wait<0>();
  __syncthreads();
  rank_rows(p, s, rows);
  __syncthreads();
  place_groups(p, s);
  __syncthreads();
  write_rows(p, s, first, rows);
  if (gridDim.x > 1) cluster_sync();  // all have read what others hold, and written their places
  else __syncthreads();
  if (p.args.token_to_adapter) {
    write_items(p, s, first, rows);
    if (gridDim.x > 1) cluster_sync();
  }
}

// How the rows are shared out; false if they are more than a cluster can hold.
inline bool plan_sort(SortPlan* p) {
  const int groups = p->args.groups + 1, table = p->args.token_to_slot ? p->args.slots * p->args.experts : 0;
  p->rows = p->args.tokens * p->args.k;
  int ctas = 1;
  while (ctas < kMostCtas && ctas * kFewCtaRows < p->rows) ctas *= 2;
  p->cta_rows = (p->rows + ctas * 32 - 1) / (ctas * 32) * 32;
  p->k_inverse = (1u << 31) / p->args.k + 1;
  p->warps = min(p->cta_rows / 32, kScanThreads / 32);
  while (p->warps > 1 && sort_bytes(*p) > kSortShared) --p->warps;
  p->keep_table = table > 0 && sort_bytes(*p) + table * 4 <= kSortShared && table <= 8 * kScanThreads;
  p->run = (p->cta_rows / 32 + p->warps - 1) / p->warps * 32;
  return p->cta_rows <= kMostCtaRows && groups <= kMostGroups + 1 && sort_bytes(*p) <= kSortShared;
}

// Brings rows of linear maps together by adapter, up to kMostGroups of them: the items of dense modules.
inline RerouteArgs adapter_rows(const int* row_to_slot, const int* row_to_expert, int rows, int slots, int item_rows,
                                int* order, Item* items, int* num_items) {
  RerouteArgs args{};
  args.ids = args.token_to_adapter = row_to_slot, args.item_expert = row_to_expert;
  args.tokens = rows, args.k = 1, args.experts = args.groups = slots, args.item_rows = item_rows;
  args.order = order, args.items = items, args.num_items = num_items;
  return args;
}

inline cudaError_t launch_reroute(const RerouteArgs& args, cudaStream_t stream) {
  SortPlan plan{args};
  if (!plan_sort(&plan)) return cudaErrorInvalidValue;
  const auto kernel = sort_rows_kernel;
  cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSortShared);
  if (e == cudaSuccess) e = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (e != cudaSuccess) return e;
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  const unsigned ctas = (plan.rows + plan.cta_rows - 1) / plan.cta_rows;
  unsigned size = 1;
  while (size < ctas) size *= 2;
  cluster.val.clusterDim.x = size, cluster.val.clusterDim.y = 1, cluster.val.clusterDim.z = 1;
  const size_t bytes = sort_bytes(plan);
  cudaLaunchConfig_t config{dim3{size, 1, 1}, dim3{kScanThreads, 1, 1}, bytes, stream, &cluster, 1};
  return cudaLaunchKernelEx(&config, kernel, plan);
}

}  // namespace lora_jax
