// The row map: sorts (token, expert) rows by the matrix that each one uses, and cuts the rows of
// adapters into items of work. Stable, no host in the loop.
//
// A warp counts its run of rows by group and remembers each row's rank among its equals; scans over
// warps and groups turn counts into places. Rows are put in order in shared memory first, so that what
// leaves it leaves in runs. One CTA does all of it for a block of rows. More rows take a launch before,
// in which every block counts, and one after, if there are items. Rerouting is a look-up in a table
// that is fetched while the ids are on their way: it adds no launch and no round trip.
//
// Rows of a group that use one adapter stand together if tokens are visited in the order of their
// adapters, which is the same for all layers: it is no key of this sort.
//
// A block runs once and straight through, so that fetching the instructions is a good part of its time:
// loops are kept rolled where nothing waits for memory, and a kernel holds only what it runs.
#pragma once
#include <cuda_runtime_api.h>

#include "cluster.cuh"
#include "row_items.cuh"

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
  int* found;        // [rows] groups of rows as they are visited
  int* counts;       // [blocks, groups + 1]
  uint32_t* owners;  // [rows] by sorted place
};

constexpr int kRowBits = 11, kAloneRows = 1 << kRowBits, kRowMask = kAloneRows - 1;
constexpr int kBlockRows = kScanThreads;  // where there are several
constexpr int kMostGroups = 16384, kMostRows = 1 << 18, kMostTable = 8192;
constexpr int kMostCutCtas = 16;  // of a cluster
constexpr int kSortShared = 232448 - 1024;
constexpr uint32_t kLookUp = 1u << 31, kNoGroup = kLookUp - 1;

struct SortPlan {
  RerouteArgs args;
  int rows, blocks, warps, run;  // a warp's run of rows
  int group_bits;                // of a group's number
  bool keep_table;               // in shared memory
  uint32_t k_inverse;            // 2^31 / k, rounded up
};

// Shared memory of a block that sorts. `all` and `shift` are sums over blocks, in slices at first.
struct SortArrays {
  CutShared* cut;
  uint32_t *keys, *sorted;     // [rows]: a row's group and rank, later whose it is; rows by group
  int* experts;                // [rows] as the router chose
  int *table, *all, *shift;    // shift: what makes a place here one of the whole
  uint16_t *starts, *counts;   // [groups + 1], [warps, groups + 1]
};

__host__ __device__ inline int sort_slices(const SortPlan& p) {
  const int slices = kScanThreads / (p.args.groups + 1);
  return p.blocks > 1 ? (slices > 1 ? slices : 1) : 0;
}
__host__ __device__ inline int table_size(const SortPlan& p) {
  return p.keep_table ? p.args.slots * p.args.experts : 0;
}
__host__ __device__ inline int even_groups(const SortPlan& p) { return (p.args.groups + 2) / 2 * 2; }
__host__ __device__ inline int sort_rows(const SortPlan& p) { return p.blocks > 1 ? kBlockRows : kAloneRows; }
inline int sort_bytes(const SortPlan& p) {
  const int words = 3 * sort_rows(p) + table_size(p) + 2 * sort_slices(p) * (p.args.groups + 1);
  return static_cast<int>(sizeof(CutShared)) + words * 4 + (1 + p.warps) * even_groups(p) * 2;
}
__device__ __forceinline__ SortArrays sort_arrays(unsigned char* raw, const SortPlan& p) {
  const int sums = sort_slices(p) * (p.args.groups + 1), rows = sort_rows(p);
  SortArrays s;
  s.cut = reinterpret_cast<CutShared*>(raw);
  s.keys = reinterpret_cast<uint32_t*>(raw + sizeof(CutShared)), s.sorted = s.keys + rows;
  s.experts = reinterpret_cast<int*>(s.sorted + rows), s.table = s.experts + rows;
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

// A group, or where in the table it stands; `id` becomes what the router chose.
__device__ __forceinline__ uint32_t pick(const SortPlan& p, int n, int live_rows, int* id_out) {
  const RerouteArgs& a = p.args;
  const int row = visited(p, n), id = *id_out = __ldg(a.ids + row);
  const int slot = a.token_to_slot ? __ldg(a.token_to_slot + token_of(p, row)) : -1;
  if (row >= live_rows || id < 0 || id >= a.experts) return kNoGroup;
  return slot >= 0 && slot < a.slots ? kLookUp | (slot * a.experts + id) : id;
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

constexpr int kTogether = 16;  // loads on their way

// Sums what all blocks have counted into all[g], and what those before this one have into shift[g].
__device__ __forceinline__ void sum_blocks(const SortPlan& p, const SortArrays& s) {
  const int groups = p.args.groups + 1, slices = sort_slices(p);
#pragma unroll 1
  for (int i = threadIdx.x; i < slices * groups; i += kScanThreads) {
    const int* counts = p.args.counts + i % groups;
    int all = 0, before = 0;
#pragma unroll 1
    for (int b = i / groups; b < p.blocks; b += slices * kTogether) {
      int n[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const int block = b + j * slices;
        n[j] = block < p.blocks ? __ldcg(counts + block * groups) : 0;
      }
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        all += n[j];
        if (b + j * slices < static_cast<int>(blockIdx.x)) before += n[j];
      }
    }
    s.all[i] = all, s.shift[i] = before;
  }
  __syncthreads();
#pragma unroll 1
  for (int g = threadIdx.x; g < groups; g += kScanThreads)
#pragma unroll 2
    for (int i = 1; i < slices; ++i) s.all[g] += s.all[i * groups + g], s.shift[g] += s.shift[i * groups + g];
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

// Where each group begins in the block, and how far from there its place in the whole is.
template <bool ALONE>
__device__ __forceinline__ void place_groups(const SortPlan& p, const SortArrays& s) {
  const int groups = p.args.groups + 1, per = (groups + kScanThreads - 1) / kScanThreads;
  const int begin = min(static_cast<int>(threadIdx.x) * per, groups), end = min(begin + per, groups);
  int mine = 0, all = 0;
#pragma unroll 1
  for (int g = begin; g < end; ++g) {
    const int own = rank_warps(p, s.counts + g), sum = ALONE ? own : s.all[g];
    s.starts[g] = own, mine += own, all += sum;
    if (blockIdx.x == 0 && g < p.args.groups) p.args.sizes[g] = sum;
  }
  int start = cta_scan(mine, s.cut->warp_sums, 0, plus), of_all = 0;
  if (!ALONE) of_all = cta_scan(all, s.cut->warp_sums, 0, plus);
#pragma unroll 1
  for (int g = begin; g < end; ++g) {
    const int own = s.starts[g];
    if (!ALONE) s.shift[g] += of_all - start, of_all += s.all[g];
    s.starts[g] = start, start += own;
  }
}

// Whose a row is, if it is anyone's and in a group.
__device__ __forceinline__ uint32_t owner_of_row(const SortPlan& p, int row, int expert, bool grouped) {
  const int slot = __ldg(p.args.token_to_adapter + token_of(p, row));
  return grouped && slot >= 0 ? owner_of(slot, expert) : kNobody;
}

template <bool ALONE, bool ITEMS>
__device__ __forceinline__ void write_rows(const SortPlan& p, const SortArrays& s, int first, int rows) {
  const RerouteArgs& a = p.args;
  const uint16_t* counts = s.counts + (threadIdx.x >> 5) * (a.groups + 1);
  each_row<1>(p, rows, [&](int i) {
    if (i == rows) return;
    const uint32_t key = s.keys[i], group = key >> kRowBits;
    const int place = s.starts[group] + counts[group] + (key & kRowMask);
    s.sorted[place] = group << kRowBits | i;
    a.inverse[visited(p, first + i)] = ALONE ? place : place + s.shift[group];
  });
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < rows; i += kScanThreads) {
    const uint32_t key = s.sorted[i], group = key >> kRowBits;
    const int row = visited(p, first + (key & kRowMask)), place = ALONE ? i : i + s.shift[group];
    const bool grouped = group < static_cast<uint32_t>(a.groups);
    const int expert = grouped ? s.experts[key & kRowMask] : 0;
    a.order[place] = row;
    a.row_to_token[place] = token_of(p, row);
    a.row_to_expert[place] = expert;
    if (ITEMS) (ALONE ? s.keys : a.owners)[place] = owner_of_row(p, row, expert, grouped);
  }
}

// The launch before, where there are several blocks: the groups of all rows and their number by block.
__global__ void __launch_bounds__(kScanThreads) count_rows_kernel(const SortPlan p) {
  extern __shared__ __align__(16) int count_raw[];
  const int groups = p.args.groups + 1, first = blockIdx.x * kBlockRows, rows = min(kBlockRows, p.rows - first);
  int *counts = count_raw, *table = counts + groups;
  let_next_begin();
  fetch_table(p, table);
  const int live = live_rows(p);
  const int row = threadIdx.x;
  int expert;
  const uint32_t picked = row < rows ? pick(p, first + row, live, &expert) : kNoGroup;
  for (int g = threadIdx.x; g < groups; g += kScanThreads) counts[g] = 0;
  copies_wait<0>();
  __syncthreads();
  if (row < rows) {
    const int group = group_of(p, p.keep_table ? table : p.args.table, picked);
    p.args.found[first + row] = group;
    atomicAdd(&counts[group], 1);
  }
  __syncthreads();
  for (int g = threadIdx.x; g < groups; g += kScanThreads) p.args.counts[blockIdx.x * groups + g] = counts[g];
}

// ALONE: of all rows. ITEMS: with whose they are, and cut if alone.
template <bool ALONE, bool ITEMS>
__global__ void __launch_bounds__(kScanThreads) sort_rows_kernel(const SortPlan p) {
  extern __shared__ __align__(16) unsigned char sort_raw[];
  const SortArrays s = sort_arrays(sort_raw, p);
  const int first = blockIdx.x * kBlockRows, rows = ALONE ? p.rows : min(kBlockRows, p.rows - first);
  const int groups = p.args.groups + 1;
  let_next_begin();
  if (ALONE) {
    fetch_table(p, s.table);
    const int live = live_rows(p);
    each_row<2>(p, rows, [&](int i) {
      if (i < rows) s.keys[i] = pick(p, i, live, s.experts + i);
    });
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < p.warps * ((groups + 1) / 2); i += kScanThreads)
    reinterpret_cast<uint32_t*>(s.counts)[i] = 0;
  if (ALONE) {
    copies_wait<0>();
    __syncthreads();
    each_row<1>(p, rows, [&](int i) {
      if (i < rows) s.keys[i] = group_of(p, p.keep_table ? s.table : p.args.table, s.keys[i]);
    });
  } else {
    each_row<1>(p, rows, [&](int i) {
      if (i < rows) s.experts[i] = __ldg(p.args.ids + visited(p, first + i));
    });
    wait_for_previous();
    each_row<1>(p, rows, [&](int i) {
      if (i < rows) s.keys[i] = __ldcg(p.args.found + first + i);
    });
    sum_blocks(p, s);
  }
  __syncthreads();
  rank_rows(p, s, rows);
  __syncthreads();
  place_groups<ALONE>(p, s);
  __syncthreads();
  write_rows<ALONE, ITEMS>(p, s, first, rows);
  if (!ALONE || !ITEMS) return;
  __syncthreads();
  cut_items(*s.cut, s.keys, rows, 0, p.args.item_rows, p.args.items, [&](int total) {
    if (threadIdx.x == 0) *p.args.num_items = total;
    return 0;
  });
}

struct CutRowsShared {
  CutShared cut;
  int total;
  uint32_t owners[kMostCutRows];
};

// The launch after, by one cluster, where items are cut of several blocks; the end of a CTA's share of
// the sorted places ends an item as well.
__global__ void __launch_bounds__(kScanThreads) cut_rows_kernel(const SortPlan p, int share) {
  extern __shared__ __align__(16) unsigned char cut_raw[];
  auto& sm = *reinterpret_cast<CutRowsShared*>(cut_raw);
  const int cta = blockIdx.x, ctas = gridDim.x, first = min(cta * share, p.rows), rows = min(share, p.rows - first);
  wait_for_previous();
  for (int i = threadIdx.x; i < rows; i += kScanThreads) sm.owners[i] = __ldcg(p.args.owners + first + i);
  __syncthreads();
  cut_items(sm.cut, sm.owners, rows, first, p.args.item_rows, p.args.items, [&](int total) {
    sm.total = total;  // the same of every thread
    cluster_sync();
    int before = 0;
#pragma unroll 4
    for (int c = 0; c < cta; ++c) before += lds32_of(c, smem_u32(&sm.total));
    if (cta == ctas - 1 && threadIdx.x == 0) *p.args.num_items = before + total;
    return before;
  });
  cluster_sync();  // all have read this CTA's total
}

inline bool plan_sort(SortPlan* p) {
  const RerouteArgs& a = p->args;
  p->rows = a.tokens * a.k, p->blocks = p->rows <= kAloneRows ? 1 : (p->rows + kBlockRows - 1) / kBlockRows;
  p->k_inverse = (1u << 31) / a.k + 1, p->group_bits = 1;
  while (a.groups >> p->group_bits) ++p->group_bits;
  const int most = p->blocks > 1 ? kBlockRows / 32 : (p->rows + 31) / 32;
  p->warps = min(most, kScanThreads / 32);
  p->keep_table = a.token_to_slot && a.slots <= kMostTable / a.experts;
  while (p->warps > 1 && sort_bytes(*p) > kSortShared) --p->warps;
  p->run = (most + p->warps - 1) / p->warps * 32;
  return p->rows <= kMostRows && a.groups <= kMostGroups && sort_bytes(*p) <= kSortShared;
}

// `cluster` CTAs are one; with `early` the kernel may begin while the one before it runs.
template <class... Args>
cudaError_t launch_part(void (*kernel)(Args...), int ctas, int bytes, bool cluster, bool early, cudaStream_t stream,
                        const Args&... args) {
  cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (e == cudaSuccess && cluster) e = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (e != cudaSuccess) return e;
  cudaLaunchAttribute attributes[2];
  int count = 0;
  if (early) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = ctas;
    attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1, ++count;
  }
  const cudaLaunchConfig_t config{dim3(ctas),      dim3(kScanThreads), static_cast<size_t>(bytes), stream, attributes,
                                  static_cast<unsigned>(count)};
  return cudaLaunchKernelEx(&config, kernel, args...);
}

// One launch for a block of rows; three for more, the last one only for items.
inline cudaError_t launch_reroute(const RerouteArgs& args, cudaStream_t stream) {
  SortPlan p{args};
  if (!plan_sort(&p)) return cudaErrorInvalidValue;
  const int counting = (args.groups + 1 + table_size(p)) * 4;
  const bool items = args.token_to_adapter;
  if (p.blocks == 1)
    return launch_part(items ? sort_rows_kernel<true, true> : sort_rows_kernel<true, false>, 1, sort_bytes(p), false,
                       false, stream, p);
  cudaError_t e = launch_part(count_rows_kernel, p.blocks, counting, false, false, stream, p);
  p.keep_table = false;
  if (e == cudaSuccess)
    e = launch_part(items ? sort_rows_kernel<false, true> : sort_rows_kernel<false, false>, p.blocks, sort_bytes(p),
                    false, true, stream, p);
  if (e != cudaSuccess || !items) return e;
  int ctas = 1;
  while (ctas < kMostCutCtas && ctas * kAloneRows < p.rows) ctas *= 2;
  const int share = (p.rows + ctas * 32 - 1) / (ctas * 32) * 32;
  return launch_part(cut_rows_kernel, ctas, static_cast<int>(sizeof(CutRowsShared)), true, true, stream, p, share);
}

}  // namespace lora_jax
