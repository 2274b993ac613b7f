// Turns row_to_slot (and row_to_expert) into work items for pair_kernel: one CTA, no host in the loop.
//
// A stable radix sort by slot puts the rows of an adapter together; a segment also ends where the
// expert changes, so rows that come in sorted by expert (row_map) give one segment per adapter and
// expert, and any other order is right too, in smaller segments. Rows without an adapter go last
// and into no item. Nothing here knows a module's ranks or rows: one call serves every module.
#pragma once
#include "cta_sort.cuh"
#include "lora_gemm.cuh"

namespace lora_jax {

constexpr int kMetadataRows = 8192;   // at most: their numbers take 13 bits of a key, slots 16
constexpr int kMetadataSlots = 65535;

struct MetadataArgs {
  const int* row_to_slot;    // [rows]; outside 0..slots: none
  const int* row_to_expert;  // [rows]
  int rows, slots;
  int item_rows;             // of an item, at most kMaxRows
  int* row_order;            // [rows] out: rows by slot
  Item* items;               // [rows] out
  int* num_items;            // [1] out
};

struct MetadataShared {
  uint32_t keys[2][kMetadataRows];  // slot << 16 | row
  SortShared sort;
};

// Cuts the sorted rows into items; `first` is room for one flag a row.
__device__ __forceinline__ void write_items(const MetadataArgs& p, MetadataShared& sm, const uint32_t* keys,
                                            uint32_t* first) {
  const int tid = threadIdx.x, per = (p.rows + kScanThreads - 1) / kScanThreads;
  const int begin = min(tid * per, p.rows), end = min(begin + per, p.rows);
  auto slot = [&](int i) { return static_cast<int>(keys[i] >> 16); };
  auto expert = [&](int i) { return __ldg(p.row_to_expert + (keys[i] & 0xffff)); };
  int start = -1;  // of the segment at hand
  for (int i = begin; i < end; ++i) {
    first[i] = i == 0 || slot(i) != slot(i - 1) || expert(i) != expert(i - 1);
    if (first[i]) start = i;
  }
  const int earlier = cta_scan(start, sm.sort.warp_sums, -1, later);  // and the flags are in place
  int count = 0, total;
  auto each_item = [&](auto f) {
    int s = earlier;
    for (int i = begin; i < end; ++i) {
      if (first[i]) s = i;
      if (slot(i) < p.slots && (i - s) % p.item_rows == 0) f(i);
    }
  };
  each_item([&](int) { ++count; });
  int at = cta_scan(count, sm.sort.warp_sums, 0, plus, &total);
  each_item([&](int i) {
    int n = 1;
    while (n < p.item_rows && i + n < p.rows && !first[i + n]) ++n;
    p.items[at++] = Item{slot(i), expert(i), i, n};
  });
  if (tid == 0) *p.num_items = total;
}

__global__ void __launch_bounds__(kScanThreads) metadata_kernel(const MetadataArgs p) {
  extern __shared__ __align__(16) unsigned char metadata_raw[];
  auto& sm = *reinterpret_cast<MetadataShared*>(metadata_raw);
  uint32_t *keys = sm.keys[0], *other = sm.keys[1];
  for (int i = threadIdx.x; i < p.rows; i += kScanThreads) {
    const int slot = p.row_to_slot[i];
    keys[i] = static_cast<uint32_t>(slot >= 0 && slot < p.slots ? slot : p.slots) << 16 | i;
  }
  __syncthreads();
  for (int bit = 0; p.slots >> bit; bit += kRadixBits) {
    radix_pass(sm.sort, keys, other, p.rows, 16 + bit);
    uint32_t* sorted = other;
    other = keys, keys = sorted;
  }
  for (int i = threadIdx.x; i < p.rows; i += kScanThreads) p.row_order[i] = keys[i] & 0xffff;
  write_items(p, sm, keys, other);
}

}  // namespace lora_jax
