// The row map: a stable sort of (token, expert) rows by the matrix that each one uses. Cuts the rows of
// adapters into work items. The host is not involved.
//
// A warp counts its run of rows by group and remembers each row's rank among its equals; scans over
// warps and groups turn counts into places. Rows are put in order in shared memory first, so that what
// leaves it leaves in runs. That is one launch of up to 128 rows (reroute/row_short.cuh) or of up to 16,384, by a
// cluster (reroute/row_cluster.cuh). More rows take a launch before, in which every block counts, and one after, if
// there are items. Rerouting is a look-up in a table that is fetched while the ids are on their way: it adds
// no launch and no round trip.
//
// Rows of a group that use one adapter stand together if tokens are visited in the order of their
// adapters, which is the same for all layers: it is no key of this sort.
//
// A block runs once and straight through, so that fetching the instructions is a good part of its time:
// loops are kept rolled where nothing waits for memory, and a kernel holds only what it runs.
#pragma once
#include "device/cluster.cuh"
#include "reroute/count_rows.cuh"
#include "reroute/row_cluster.cuh"
#include "reroute/row_short.cuh"

namespace lora_jax {

// Where each group begins in the block, and how far from there its place in the whole is.
__device__ __forceinline__ void place_groups(const SortPlan& p, const SortArrays& s) {
  const int groups = p.args.groups + 1, per = (groups + kScanThreads - 1) / kScanThreads;
  const int begin = min(static_cast<int>(threadIdx.x) * per, groups), end = min(begin + per, groups);
  const int slices = sort_slices(p), stride = even_groups(p);
  // One scan for both: a block's rows take the low bits, those of all blocks the others.
  constexpr int kBits = kRowBits;
  static_assert(kBlockRows < 1 << kBits && kMostRows << kBits > 0, "both fit a number");
  int sum = 0;
#pragma unroll 1
  for (int g = begin; g < end; ++g) {
    const int own = rank_warps(p, s.counts + g);
    int all = s.all[g];
#pragma unroll 4
    for (int i = 1; i < slices; ++i) all += s.all[i * stride + g], s.shift[g] += s.shift[i * stride + g];
    s.all[g] = all;
    s.starts[g] = own, sum += all << kBits | own;
    if (blockIdx.x == 0 && g < p.args.groups) p.args.sizes[g] = all;
  }
  const int before = cta_scan(sum, s.warp_sums, 0, plus);
  int start = before & ((1 << kBits) - 1), of_all = before >> kBits;
#pragma unroll 1
  for (int g = begin; g < end; ++g) {
    const int own = s.starts[g];
    s.shift[g] += of_all - start, of_all += s.all[g];
    s.starts[g] = start, start += own;
  }
}

template <bool ITEMS>
__device__ __forceinline__ void write_rows(const SortPlan& p, const SortArrays& s, int first, int rows) {
  const RerouteArgs& a = p.args;
  const uint16_t* counts = s.counts + (threadIdx.x >> 5) * (a.groups + 1);
  each_row<1>(p, rows, [&](int i) {
    if (i == rows) return;
    const uint32_t key = s.keys[i], group = key >> kRowBits;
    const int place = s.starts[group] + counts[group] + (key & kRowMask);
    s.sorted[place] = group << kRowBits | i;
    a.inverse[visited(p, first + i)] = place + s.shift[group];
  });
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < rows; i += kScanThreads) {
    const uint32_t key = s.sorted[i], group = key >> kRowBits;
    const int row = visited(p, first + (key & kRowMask)), place = i + s.shift[group];
    const bool grouped = group < static_cast<uint32_t>(a.groups);
    const int expert = grouped ? s.experts[key & kRowMask] : 0;
    a.order[place] = row;
    a.row_to_token[place] = token_of(p, row);
    a.row_to_expert[place] = expert;
    if (ITEMS) a.owners[place] = owner_of_row(p, row, expert, grouped);
  }
}

// ITEMS: with whose the rows are. The sums over the blocks are on their way while a block ranks its rows.
template <bool ITEMS>
__global__ void __launch_bounds__(kScanThreads) sort_rows_kernel(const SortPlan p) {
  extern __shared__ __align__(16) unsigned char sort_raw[];
  const SortArrays s = sort_arrays(sort_raw, p);
  const int first = blockIdx.x * kBlockRows, rows = min(kBlockRows, p.rows - first);
  let_next_begin();
  fetch_table(p, s.table);
  const int live = live_rows(p);
  each_row<2>(p, rows, [&](int i) {
    if (i < rows) s.keys[i] = pick(p, visited(p, first + i), live, s.experts + i);
  });
#pragma unroll 1
  for (int i = threadIdx.x; i < p.warps * ((p.args.groups + 2) / 2); i += kScanThreads)
    reinterpret_cast<uint32_t*>(s.counts)[i] = 0;
  copies_wait<0>();
  __syncthreads();
  each_row<1>(p, rows, [&](int i) {
    if (i < rows) s.keys[i] = group_of(p, p.keep_table ? s.table : p.args.table, s.keys[i]);
  });
  wait_for_previous();
  const BlockSums sums = load_sums(p, threadIdx.x);
  __syncthreads();
  rank_rows(p, s, rows);
  if (static_cast<int>(threadIdx.x) < sort_slices(p) * (even_groups(p) / 2)) store_sums(s, sums, threadIdx.x);
  sum_late(p, s);
  __syncthreads();
  place_groups(p, s);
  __syncthreads();
  write_rows<ITEMS>(p, s, first, rows);
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

// Whether a cluster sorts the rows, in one launch.
inline bool in_cluster(const RerouteArgs& a) { return a.tokens * a.k <= kClusterRows && a.groups <= kClusterGroups; }

inline bool plan_sort(SortPlan* p) {
  const RerouteArgs& a = p->args;
  p->rows = a.tokens * a.k;
  p->k_inverse = (1u << 31) / a.k + 1, p->group_bits = 1;
  while (a.groups >> p->group_bits) ++p->group_bits;
  const int block = in_cluster(a) ? min(p->rows, kClusterBlock) : kBlockRows, windows = (block + 31) / 32;
  p->warps = min(windows, kScanThreads / 32);
  p->keep_table = a.token_to_slot && a.slots <= kMostTable / a.experts;
  auto bytes = [&] { return in_cluster(a) ? cluster_bytes(*p) : sort_bytes(*p); };
  while (p->warps > 1 && bytes() > kSortShared) --p->warps;
  p->run = (windows + p->warps - 1) / p->warps * 32;
  return p->rows <= kMostRows && a.groups <= kMostGroups && bytes() <= kSortShared;
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

inline cudaError_t launch_cluster(const SortPlan& p, cudaStream_t stream) {
  const int ctas = (p.rows + kClusterBlock - 1) / kClusterBlock;
  const auto kernel = p.args.token_to_adapter ? cluster_rows_kernel<true> : cluster_rows_kernel<false>;
  return launch_part(kernel, ctas, cluster_bytes(p), ctas > 1, false, stream, p);
}

// One launch, of a CTA or a cluster, or three, the last one only for items.
inline cudaError_t launch_reroute(const RerouteArgs& args, cudaStream_t stream) {
  SortPlan p{args};
  if (!plan_sort(&p)) return cudaErrorInvalidValue;
  const bool items = args.token_to_adapter;
  if (p.rows <= kShortRows && args.groups <= kClusterGroups) {
    const auto kernel = items ? short_rows_kernel<true> : short_rows_kernel<false>;
    kernel<<<1, kShortRows, sizeof(ShortShared), stream>>>(p);
    return cudaGetLastError();
  }
  if (in_cluster(args)) return launch_cluster(p, stream);
  const int counting = (kCountWords * even_groups(p) + table_size(p)) * 4, blocks = (p.rows + kBlockRows - 1) / kBlockRows;
  cudaError_t e = launch_part(count_rows_kernel, count_ctas(p), counting, false, false, stream, p);
  if (e == cudaSuccess)
    e = launch_part(items ? sort_rows_kernel<true> : sort_rows_kernel<false>, blocks, sort_bytes(p), false, true, stream, p);
  if (e != cudaSuccess || !items) return e;
  int ctas = 1;
  while (ctas < kMostCutCtas && ctas * kCutRows < p.rows) ctas *= 2;
  const int share = (p.rows + ctas * 32 - 1) / (ctas * 32) * 32;
  return launch_part(cut_rows_kernel, ctas, static_cast<int>(sizeof(CutRowsShared)), true, true, stream, p, share);
}

}  // namespace lora_jax
