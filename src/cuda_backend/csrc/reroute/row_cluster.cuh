// The row map of up to kClusterRows rows in one launch: a cluster of CTAs, each of which sorts a block of rows.
//
// A row stays in its thread's registers from the ids to its place. What CTAs have to know of each other, how
// many rows of a group each has and whose the rows are that end up in another's share of the places, goes
// through shared memory.
#pragma once
#include "device/cluster.cuh"
#include "reroute/row_sort.cuh"

namespace lora_jax {

constexpr int kClusterBits = 11, kClusterBlock = 1 << kClusterBits;  // rows of a CTA, at most
constexpr int kClusterRows = 8 * kClusterBlock, kThreadRows = kClusterBlock / kScanThreads;

struct ClusterShared {
  CutShared cut;
  int total;                     // items of this CTA
  int own[kScanThreads];         // rows of a group here
  int starts[kScanThreads];      // where those begin here
  int shift[kScanThreads];       // and how far from there they do in the whole
  uint32_t owners[kClusterBlock];   // by sorted place, of this CTA's share
  int rows[kClusterBlock], experts[kClusterBlock], places[kClusterBlock];  // by place in the block
};
// The warps' counts and the table lie behind.
inline int cluster_bytes(const SortPlan& p) {
  return static_cast<int>(sizeof(ClusterShared)) + table_size(p) * 4 + p.warps * even_groups(p) * 2;
}

struct ThreadRow {
  int row, expert, slot, rank, place;
  uint32_t group;
};

// Gives a thread's rows their groups, and ranks among their equals in the warp.
__device__ __forceinline__ void rank_own(const SortPlan& p, const int* table, uint16_t* counts, int held,
                                         ThreadRow (&own)[kThreadRows]) {
#pragma unroll
  for (int j = 0; j < kThreadRows; ++j) {
    const bool live = j < held;
    const uint32_t group = own[j].group = live ? group_of(p, table, own[j].group) : 0;
    const unsigned peers = same_lanes(live, group, p.group_bits);
    const int before = __popc(peers & ((1u << (threadIdx.x & 31)) - 1)), earlier = live ? counts[group] : 0;
    __syncwarp();
    own[j].rank = earlier + before;
    if (live && before == 0) counts[group] = earlier + __popc(peers);
    __syncwarp();
  }
}

// Finds where a thread's group begins in this block and in the whole. Returns how many rows it has.
__device__ __forceinline__ int place_group(const SortPlan& p, ClusterShared& sm, uint16_t* counts) {
  const int g = threadIdx.x, cta = blockIdx.x, ctas = gridDim.x;
  const int own = g <= p.args.groups ? rank_warps(p, counts + g) : 0;
  int all = own, before = 0;
  if (ctas > 1) {
    sm.own[g] = own;
    cluster_sync();
#pragma unroll 4
    for (int c = 0; c < ctas; ++c) {
      const int n = lds32_of(c, smem_u32(&sm.own[g]));
      all += c != cta ? n : 0, before += c < cta ? n : 0;
    }
  }
  static_assert(kClusterGroups < kScanThreads, "a thread is for rows in no group");
  // One scan for both: a block's rows take the low bits, those of all blocks the others.
  constexpr int kBits = kClusterBits + 1;
  static_assert(kClusterRows << kBits > 0, "both fit a number");
  const int at = cta_scan(all << kBits | own, sm.cut.warp_sums, 0, plus), here = at & ((1 << kBits) - 1);
  sm.starts[g] = here, sm.shift[g] = (at >> kBits) + before - here;
  return all;
}

template <bool ITEMS>
__global__ void __launch_bounds__(kScanThreads, 1) cluster_rows_kernel(const SortPlan p) {
  extern __shared__ __align__(16) unsigned char cluster_raw[];
  auto& sm = *reinterpret_cast<ClusterShared*>(cluster_raw);
  const RerouteArgs& a = p.args;
  int* table = reinterpret_cast<int*>(cluster_raw + sizeof(ClusterShared));
  auto* all_counts = reinterpret_cast<uint16_t*>(table + table_size(p));
  const int cta = blockIdx.x, ctas = gridDim.x, first = cta * kClusterBlock, rows = min(kClusterBlock, p.rows - first);
  const int warp = threadIdx.x >> 5, mine = warp * p.run + static_cast<int>(threadIdx.x & 31);
  const int left = min(p.run, rows - warp * p.run) - static_cast<int>(threadIdx.x & 31);  // from its first row on
  const int held = warp < p.warps ? (left + 31) / 32 : 0;
  uint16_t* counts = all_counts + min(warp, p.warps - 1) * (a.groups + 1);
  fetch_table(p, table);
  const int live = live_rows(p);
  ThreadRow own[kThreadRows];
#pragma unroll
  for (int j = 0; j < kThreadRows; ++j) own[j].row = visited(p, first + min(mine + j * 32, rows - 1));
#pragma unroll
  for (int j = 0; j < kThreadRows; ++j) {
    own[j].group = pick(p, own[j].row, live, &own[j].expert);
    own[j].slot = ITEMS ? __ldg(a.token_to_adapter + token_of(p, own[j].row)) : -1;
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < p.warps * even_groups(p) / 2; i += kScanThreads)
    reinterpret_cast<uint32_t*>(all_counts)[i] = 0;
  copies_wait<0>();
  __syncthreads();
  rank_own(p, p.keep_table ? table : a.table, counts, held, own);
  __syncthreads();
  const int size = place_group(p, sm, all_counts);
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kThreadRows; ++j) {
    if (j >= held) break;
    const int group = own[j].group, here = sm.starts[group] + counts[group] + own[j].rank;
    const int place = own[j].place = here + sm.shift[group];
    const bool grouped = group < a.groups;
    sm.rows[here] = own[j].row, sm.places[here] = place, sm.experts[here] = grouped ? own[j].expert : 0;
    if (ITEMS) {
      const uint32_t owner = grouped && own[j].slot >= 0 ? owner_of(own[j].slot, own[j].expert) : kNobody;
      if (ctas == 1) sm.owners[place] = owner;
      else sts32_in(place / kClusterBlock, smem_u32(&sm.owners[place % kClusterBlock]), owner);
    }
  }
  if (ITEMS && ctas > 1) cluster_sync();  // before anything is stored for good, which it would wait for
  else __syncthreads();
  if (ITEMS) {
    cut_items(sm.cut, sm.owners, rows, first, a.item_rows, a.items, [&](int total) {
      int before = 0;
      if (ctas > 1) {
        sm.total = total;  // the same of every thread
        cluster_sync();
#pragma unroll 4
        for (int c = 0; c < cta; ++c) before += lds32_of(c, smem_u32(&sm.total));
      }
      if (cta == ctas - 1 && threadIdx.x == 0) *a.num_items = before + total;
      return before;
    });
  }
#pragma unroll
  for (int j = 0; j < kThreadRows; ++j)
    if (j < held) a.inverse[own[j].row] = own[j].place;
  if (cta == 0 && static_cast<int>(threadIdx.x) < a.groups) a.sizes[threadIdx.x] = size;
#pragma unroll 1
  for (int i = threadIdx.x; i < rows; i += kScanThreads) {
    const int row = sm.rows[i], place = sm.places[i];
    a.order[place] = row;
    a.row_to_token[place] = token_of(p, row);
    a.row_to_expert[place] = sm.experts[i];
  }
  if (ctas > 1) cluster_sync();  // all have read what this CTA has
}

}  // namespace lora_jax
