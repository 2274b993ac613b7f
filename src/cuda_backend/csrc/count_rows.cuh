// Where a block's rows of a group begin among those of all blocks: a launch before the sort counts them.
#pragma once
#include "row_sort.cuh"

namespace lora_jax {

#ifndef COUNT_BLOCKS
#define COUNT_BLOCKS 4
#endif
// Of a CTA that counts. It leaves its sum and each block's place in it, so that those who sort read a
// few sums and not the counts of all blocks: with the groups of 20 ESFT adapters that took 2 us.
constexpr int kCountBlocks = COUNT_BLOCKS, kCountRows = kCountBlocks * kBlockRows;
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
    picked[j] = row < rows ? pick(p, first + row, live, &expert) : kNoGroup;
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

// Sums what all blocks have counted into all[g], and what those before this one have into shift[g].
__device__ __forceinline__ void sum_blocks(const SortPlan& p, const SortArrays& s) {
  const int groups = even_groups(p), pairs = groups / 2, slices = sort_slices(p), ctas = count_ctas(p);
  const int mine = blockIdx.x / kCountBlocks, stride = (1 + kCountBlocks) * pairs;
#pragma unroll 1
  for (int i = threadIdx.x; i < slices * pairs; i += kScanThreads) {
    const int pair = i % pairs, slice = i / pairs;
    const auto* sums = reinterpret_cast<const uint32_t*>(p.args.counts) + pair;
    // The rows in this CTA's own part that come before.
    const uint32_t own = slice ? 0 : __ldcg(sums + mine * stride + (1 + blockIdx.x % kCountBlocks) * pairs);
    int2 all{0, 0}, before{static_cast<int>(own & 0xffff), static_cast<int>(own >> 16)};
#pragma unroll 1
    for (int c = slice; c < ctas; c += slices * kTogether) {
      uint32_t n[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) n[j] = c + j * slices < ctas ? __ldcg(sums + (c + j * slices) * stride) : 0;
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const int low = n[j] & 0xffff, high = n[j] >> 16;
        all.x += low, all.y += high;
        if (c + j * slices < mine) before.x += low, before.y += high;
      }
    }
    reinterpret_cast<int2*>(s.all)[i] = all, reinterpret_cast<int2*>(s.shift)[i] = before;
  }
  __syncthreads();
#pragma unroll 1
  for (int g = threadIdx.x; g < groups; g += kScanThreads)
#pragma unroll 2
    for (int i = 1; i < slices; ++i) s.all[g] += s.all[i * groups + g], s.shift[g] += s.shift[i * groups + g];
  __syncthreads();
}

// Makes shift[g] what brings a place of this block to its place in the whole.
__device__ __forceinline__ void shift_groups(const SortPlan& p, const SortArrays& s) {
  const int groups = p.args.groups + 1, per = (groups + kScanThreads - 1) / kScanThreads;
  const int begin = min(static_cast<int>(threadIdx.x) * per, groups), end = min(begin + per, groups);
  int all = 0;
#pragma unroll 1
  for (int g = begin; g < end; ++g) {
    const int sum = s.all[g];
    all += sum;
    if (blockIdx.x == 0 && g < p.args.groups) p.args.sizes[g] = sum;
  }
  int start = cta_scan(all, s.cut->warp_sums, 0, plus);
#pragma unroll 1
  for (int g = begin; g < end; ++g) s.shift[g] += start - s.starts[g], start += s.all[g];
}

}  // namespace lora_jax
