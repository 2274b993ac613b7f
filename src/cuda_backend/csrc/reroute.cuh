// Sorts (token, expert) rows by the matrix that each one uses: stable, no host in the loop.
//
// Blocks of 2048 rows look their experts up and sort themselves in shared memory. Up to one block
// that is all; beyond it a second launch adds what stands before each block's share of a group.
// Rerouting is one load more per row, in a launch that a base-only layer has as well.
#pragma once
#include <cuda_runtime_api.h>

#include "cta_sort.cuh"

namespace lora_jax {

struct RerouteArgs {
  const int* ids;            // [tokens, k]
  const int* token_to_slot;  // [tokens] or none: no table
  const int* table;          // [slots, experts]
  const int* num_tokens;     // [1]
  int tokens, k, slots, experts, groups;
  int* order;                // [rows] out: sorted place -> row
  int* inverse;              // [rows] out: row -> sorted place
  int* sizes;                // [groups] out
  int* counts;               // [blocks, groups + 1] between the launches; the last group is none
  uint32_t* sorted;          // [rows] between the launches: group << kBlockBits | row of the block
};

constexpr int kBlockBits = 11, kBlockRows = 1 << kBlockBits;
constexpr int kMostGroups = 16384;

struct RerouteShared {
  uint32_t keys[2][kBlockRows];
  SortShared sort;
  int counts[1];  // groups + 1
};

__device__ __forceinline__ int group_of(const RerouteArgs& p, int row, int live_rows) {
  const int id = row < live_rows ? p.ids[row] : -1;
  if (id < 0 || id >= p.experts) return p.groups;
  int group = id;
  if (p.token_to_slot) {
    const int slot = __ldg(p.token_to_slot + row / p.k);
    if (slot >= 0 && slot < p.slots) group = __ldg(p.table + static_cast<int64_t>(slot) * p.experts + id);
  }
  return group >= 0 && group < p.groups ? group : p.groups;
}

__global__ void __launch_bounds__(kScanThreads) sort_block_kernel(const RerouteArgs p) {
  extern __shared__ __align__(16) unsigned char reroute_raw[];
  auto& sm = *reinterpret_cast<RerouteShared*>(reroute_raw);
  const int first = blockIdx.x * kBlockRows, rows = min(kBlockRows, p.tokens * p.k - first);
  const int live_rows = min(*p.num_tokens, p.tokens) * p.k;
  for (int g = threadIdx.x; g <= p.groups; g += kScanThreads) sm.counts[g] = 0;
  __syncthreads();
  uint32_t *keys = sm.keys[0], *other = sm.keys[1];
  for (int i = threadIdx.x; i < rows; i += kScanThreads) {
    const int group = group_of(p, first + i, live_rows);
    keys[i] = static_cast<uint32_t>(group) << kBlockBits | i;
    atomicAdd(&sm.counts[group], 1);
  }
  __syncthreads();
  for (int bit = 0; p.groups >> bit; bit += kRadixBits) {
    radix_pass(sm.sort, keys, other, rows, kBlockBits + bit);
    uint32_t* sorted = other;
    other = keys, keys = sorted;
  }
  const bool alone = gridDim.x == 1;
  for (int i = threadIdx.x; i < rows; i += kScanThreads) {
    if (alone) {
      const int row = keys[i] & (kBlockRows - 1);
      p.order[i] = row, p.inverse[row] = i;
    } else {
      p.sorted[first + i] = keys[i];
    }
  }
  int* counts = alone ? p.sizes : p.counts + static_cast<int64_t>(blockIdx.x) * (p.groups + 1);
  for (int g = threadIdx.x; g < p.groups + (alone ? 0 : 1); g += kScanThreads) counts[g] = sm.counts[g];
}

// Each block finds where its share of every group begins, and moves its rows there.
__global__ void __launch_bounds__(kScanThreads) place_blocks_kernel(const RerouteArgs p) {
  extern __shared__ __align__(16) int place_raw[];
  __shared__ int warp_sums[kScanThreads / 32];
  const int groups = p.groups + 1, block = blockIdx.x, per = (groups + kScanThreads - 1) / kScanThreads;
  int *total = place_raw, *own = total + groups, *shift = own + groups;
  for (int g = threadIdx.x; g < groups; g += kScanThreads) {
    int before = 0, all = 0;
    for (int b = 0; b < static_cast<int>(gridDim.x); ++b) {
      const int n = p.counts[static_cast<int64_t>(b) * groups + g];
      all += n;
      if (b < block) before += n;
      if (b == block) own[g] = n;
    }
    total[g] = all, shift[g] = before;
    if (block == 0 && g < p.groups) p.sizes[g] = all;
  }
  __syncthreads();
  const int begin = min(static_cast<int>(threadIdx.x) * per, groups), end = min(begin + per, groups);
  int all = 0, mine = 0;
  for (int g = begin; g < end; ++g) all += total[g], mine += own[g];
  all = cta_scan(all, warp_sums, 0, plus), mine = cta_scan(mine, warp_sums, 0, plus);
  for (int g = begin; g < end; ++g) {
    shift[g] += all - mine;
    all += total[g], mine += own[g];
  }
  __syncthreads();
  const int first = block * kBlockRows, rows = min(kBlockRows, p.tokens * p.k - first);
  for (int i = threadIdx.x; i < rows; i += kScanThreads) {
    const uint32_t key = p.sorted[first + i];
    const int row = first + (key & (kBlockRows - 1)), place = i + shift[key >> kBlockBits];
    p.order[place] = row, p.inverse[row] = place;
  }
}

// One launch, and a second one for more than a block of rows.
inline cudaError_t launch_reroute(const RerouteArgs& args, cudaStream_t stream) {
  const int rows = args.tokens * args.k, blocks = (rows + kBlockRows - 1) / kBlockRows, groups = args.groups + 1;
  const int sorting = static_cast<int>(sizeof(RerouteShared)) + groups * 4, placing = groups * 12;
  cudaError_t e = cudaFuncSetAttribute(sort_block_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sorting);
  if (e != cudaSuccess) return e;
  sort_block_kernel<<<blocks, kScanThreads, sorting, stream>>>(args);
  if (blocks == 1) return cudaGetLastError();
  e = cudaFuncSetAttribute(place_blocks_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, placing);
  if (e != cudaSuccess) return e;
  place_blocks_kernel<<<blocks, kScanThreads, placing, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace lora_jax
