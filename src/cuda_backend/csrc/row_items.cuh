// Cuts sorted rows into items of work: runs of rows that share an adapter and an expert.
#pragma once
#include "cta_sort.cuh"
#include "lora_units.cuh"

namespace lora_jax {

constexpr uint32_t kNobody = ~0u;  // owns rows without an adapter, which are in no item
constexpr int kMostCutRows = 1 << 14, kMostWindows = kMostCutRows / 32;

__device__ __forceinline__ uint32_t owner_of(int slot, int expert) {
  return static_cast<uint32_t>(slot) << 16 | expert;
}

// By windows of 32 places, a warp at a time: where runs begin, where items begin, and then where the
// last run before the window began, and later the number of the window's first item.
struct CutShared {
  uint32_t runs[kMostWindows], heads[kMostWindows];
  int carry[kMostWindows], warp_sums[kScanThreads / 32];
};

template <class F>
__device__ __forceinline__ void each_window(int rows, F f) {
#pragma unroll 1
  for (int w = threadIdx.x >> 5; w * 32 < rows; w += kScanThreads / 32)
    f(w, w * 32 + static_cast<int>(threadIdx.x & 31));
}

// Writes the items of `rows` places, the first one being `first`, whose owners lie in shared memory;
// none has more than item_rows <= 32 rows. `begin(total)` says where the CTA's items start.
template <class Begin>
__device__ __forceinline__ void cut_items(CutShared& sm, const uint32_t* owners, int rows, int first, int item_rows,
                                          Item* items, Begin begin) {
  const int lane = threadIdx.x & 31, windows = (rows + 31) / 32, mine = threadIdx.x;  // window of a thread
  const uint32_t below = (1u << lane) - 1, above = ~below << 1;
  each_window(rows, [&](int w, int i) {
    const uint32_t runs = __ballot_sync(~0u, i < rows && (i == 0 || owners[i] != owners[i - 1]));
    if (lane == 0) sm.runs[w] = runs;
  });
  __syncthreads();
  const uint32_t own = mine < windows ? sm.runs[mine] : 0;
  const int last = cta_scan(own ? mine * 32 + 31 - __clz(own) : -1, sm.warp_sums, -1, later);
  if (mine < windows) sm.carry[mine] = last;
  __syncthreads();
  each_window(rows, [&](int w, int i) {
    const uint32_t runs = sm.runs[w] & ~above;
    const int run = runs ? w * 32 + 31 - __clz(runs) : sm.carry[w];
    const bool head = i < rows && owners[i] != kNobody && (i - run) % item_rows == 0;
    const uint32_t heads = __ballot_sync(~0u, head);
    if (lane == 0) sm.heads[w] = heads;
  });
  __syncthreads();
  int total;
  const int before = cta_scan(mine < windows ? __popc(sm.heads[mine]) : 0, sm.warp_sums, 0, plus, &total);
  const int at = begin(total) + before;
  if (mine < windows) sm.carry[mine] = at;
  __syncthreads();
  each_window(rows, [&](int w, int i) {
    if (!(sm.heads[w] >> lane & 1)) return;
    const uint32_t runs = sm.runs[w] & above, next = w + 1 < windows ? sm.runs[w + 1] : 0;
    const int end = runs ? w * 32 + __ffs(runs) - 1 : next ? w * 32 + 31 + __ffs(next) : rows;
    const int slot = static_cast<int>(owners[i] >> 16), expert = static_cast<int>(owners[i] & 0xffff);
    items[sm.carry[w] + __popc(sm.heads[w] & below)] = Item{slot, expert, first + i, min(end - i, item_rows)};
  });
}

}  // namespace lora_jax
