// Finds where each block's rows of a group begin: a launch before the sort counts the rows of all blocks.
#pragma once
#include "reroute/row_sort.cuh"

namespace lora_jax {

// Of a CTA that counts. It leaves its sum and each block's place in it, so that those who sort read few
// sums and not the counts of all blocks, which took 2 us with the groups of 20 ESFT adapters. More
// blocks are slower to count, fewer to sum: 9.5 us for 16,384 tokens by 2, 10.9 by 1, 10.0 by 4.
constexpr int kCountBlocks = 2, kCountRows = kCountBlocks * kBlockRows;
constexpr int kCountWords = (kCountBlocks + 1) / 2;  // two blocks share a word of counts
constexpr int kCountLoads = kCountRows / kScanThreads;

// uint16 [1 + kCountBlocks, even_groups] of a CTA: all its rows of a group, and those before each block.
__host__ __device__ inline int count_ctas(const SortPlan& p) { return (p.rows + kCountRows - 1) / kCountRows; }
__device__ __forceinline__ uint16_t* counts_of(const SortPlan& p, int cta, int part) {
  return p.args.counts + (cta * (1 + kCountBlocks) + part) * even_groups(p);
}

__global__ void __launch_bounds__(kScanThreads) count_rows_kernel(const SortPlan p) {
  extern __shared__ __align__(16) int count_raw[];
  const int groups = even_groups(p), first = blockIdx.x * kCountRows, rows = min(kCountRows, p.rows - first);
  int *counts = count_raw, *table = counts + kCountWords * groups;  // counts: [kCountWords, groups]
  let_next_begin();
  fetch_table(p, table);
  const int live = live_rows(p);
  uint32_t picked[kCountLoads];
#pragma unroll
  for (int j = 0; j < kCountLoads; ++j) {
    const int row = j * kScanThreads + threadIdx.x;
    int expert;
    picked[j] = row < rows ? pick(p, visited(p, first + row), live, &expert) : kNoGroup;
  }
#pragma unroll 1
  for (int g = threadIdx.x; g < kCountWords * groups; g += kScanThreads) counts[g] = 0;
  copies_wait<0>();
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kCountLoads; ++j) {
    const int row = j * kScanThreads + threadIdx.x, block = row / kBlockRows;
    if (row < rows) {
      const int group = group_of(p, p.keep_table ? table : p.args.table, picked[j]);
      atomicAdd(&counts[block / 2 * groups + group], 1 << block % 2 * 16);
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int g = threadIdx.x; g < groups; g += kScanThreads) {
    int sum = 0;
#pragma unroll
    for (int block = 0; block < kCountBlocks; ++block) {
      counts_of(p, blockIdx.x, 1 + block)[g] = sum;
      sum += counts[block / 2 * groups + g] >> block % 2 * 16 & 0xffff;
    }
    counts_of(p, blockIdx.x, 0)[g] = sum;
  }
}

constexpr int kTogether = 8;  // loads on their way

// One thread's share of the sums over blocks: a pair of groups, in every so many counting CTAs.
struct BlockSums {
  const uint32_t* sums;
  int first, step, ctas, stride;
  uint32_t own, early[kTogether];
};

// Starts to load what the others have counted; wait_for_previous comes before.
__device__ __forceinline__ BlockSums load_sums(const SortPlan& p, int i) {
  const int pairs = even_groups(p) / 2, slice = i / pairs;
  BlockSums b;
  b.sums = reinterpret_cast<const uint32_t*>(p.args.counts) + i % pairs;
  b.first = slice, b.step = sort_slices(p), b.stride = (1 + kCountBlocks) * pairs;
  b.ctas = slice < b.step ? count_ctas(p) : 0;
  // The rows in this CTA's own part that come before; no more than one slice may have them.
  const int mine = blockIdx.x / kCountBlocks, part = 1 + blockIdx.x % kCountBlocks;
  b.own = slice ? 0 : __ldcg(b.sums + mine * b.stride + part * pairs);
#pragma unroll
  for (int j = 0; j < kTogether; ++j) {
    const int c = b.first + j * b.step;
    b.early[j] = c < b.ctas ? __ldcg(b.sums + c * b.stride) : 0;
  }
  return b;
}
// Leaves in all[i] what all blocks have counted, and in shift[i] what those before this one have.
__device__ __forceinline__ void store_sums(const SortArrays& s, const BlockSums& b, int i) {
  int2 all{0, 0}, before{static_cast<int>(b.own & 0xffff), static_cast<int>(b.own >> 16)};
  auto add = [&](int c, uint32_t n) {
    const int low = n & 0xffff, high = n >> 16;
    all.x += low, all.y += high;
    if (c < static_cast<int>(blockIdx.x) / kCountBlocks) before.x += low, before.y += high;
  };
#pragma unroll
  for (int j = 0; j < kTogether; ++j) add(b.first + j * b.step, b.early[j]);
#pragma unroll 4
  for (int c = b.first + kTogether * b.step; c < b.ctas; c += b.step) add(c, __ldcg(b.sums + c * b.stride));
  reinterpret_cast<int2*>(s.all)[i] = all, reinterpret_cast<int2*>(s.shift)[i] = before;
}
// The rest of the groups, where there are more pairs than threads.
__device__ __forceinline__ void sum_late(const SortPlan& p, const SortArrays& s) {
#pragma unroll 1
  for (int i = kScanThreads + threadIdx.x; i < even_groups(p) / 2; i += kScanThreads)
    store_sums(s, load_sums(p, i), i);
}

}  // namespace lora_jax
