// Turns row_to_slot (and row_to_expert) into work items for pair_kernel, in one CTA and without the host.
//
// A stable radix sort by slot puts the rows of an adapter together. A segment also ends where the expert
// changes. So rows that are sorted by expert (row_map) give one segment per adapter and expert; any other order
// is correct too and gives smaller segments. Rows without an adapter are last and in no item. The items do not
// depend on a module's ranks or widths, so one call serves every module.
#pragma once
#include "adapter_items/row_items.cuh"

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
  CutShared cut;
};

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
  for (int i = threadIdx.x; i < p.rows; i += kScanThreads) {
    const int row = keys[i] & 0xffff, slot = keys[i] >> 16;
    p.row_order[i] = row;
    other[i] = slot < p.slots ? owner_of(slot, __ldg(p.row_to_expert + row)) : kNobody;
  }
  __syncthreads();
  cut_items(sm.cut, other, p.rows, 0, p.item_rows, p.items, [&](int total) {
    if (threadIdx.x == 0) *p.num_items = total;
    return 0;
  });
}

}  // namespace lora_jax
