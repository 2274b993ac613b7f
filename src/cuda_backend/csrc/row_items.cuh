// Cuts sorted rows into items of work: runs of rows that share an adapter and an expert.
#pragma once
#include "cta_sort.cuh"
#include "lora_units.cuh"

namespace lora_jax {

constexpr uint32_t kNobody = ~0u;  // owns rows without an adapter, which are in no item

__device__ __forceinline__ uint32_t owner_of(int slot, int expert) { return static_cast<uint32_t>(slot) << 16 | expert; }

// Writes the items of `rows` places, the first one being `first`, whose owners lie in shared memory;
// none has more than item_rows rows. `begin(total)` says where the CTA's items start.
template <class Begin>
__device__ __forceinline__ void cut_items(const uint32_t* owners, int rows, int first, int item_rows, int* warp_sums,
                                          Item* items, Begin begin) {
  const int per = (rows + kScanThreads - 1) / kScanThreads;
  const int from = min(static_cast<int>(threadIdx.x) * per, rows), to = min(from + per, rows);
  auto starts = [&](int i) { return i == 0 || owners[i] != owners[i - 1]; };
  int start = -1;  // of the run at hand
  for (int i = from; i < to; ++i)
    if (starts(i)) start = i;
  const int earlier = cta_scan(start, warp_sums, -1, later);
  auto each_item = [&](auto f) {
    int s = earlier;
    for (int i = from; i < to; ++i) {
      if (starts(i)) s = i;
      if (owners[i] != kNobody && (i - s) % item_rows == 0) f(i);
    }
  };
  int count = 0, total;
  each_item([&](int) { ++count; });
  int at = cta_scan(count, warp_sums, 0, plus, &total);
  at += begin(total);
  each_item([&](int i) {
    int n = 1;
    while (n < item_rows && i + n < rows && owners[i + n] == owners[i]) ++n;
    items[at++] = Item{static_cast<int>(owners[i] >> 16), static_cast<int>(owners[i] & 0xffff), first + i, n};
  });
}

}  // namespace lora_jax
