// Cuts sorted rows into work items: runs of rows that share an adapter and an expert.
#pragma once
#include "device/cta_sort.cuh"
#include "lora_gemm/units.cuh"

namespace lora_jax {

constexpr uint32_t kNobody = ~0u;  // owns rows without an adapter, which are in no item
constexpr int kMostCutRows = 1 << 14, kMostWindows = kMostCutRows / 32;

__device__ __forceinline__ uint32_t owner_of(int slot, int expert) {
  return static_cast<uint32_t>(slot) << 16 | expert;
}

// By windows of 32 places: where runs begin, where items begin. By warps, which have as many windows each: the
// last place of its windows where a run begins, and how many items do.
struct CutShared {
  uint32_t runs[kMostWindows], heads[kMostWindows];
  int last[kScanThreads / 32], counts[kScanThreads / 32];
  int warp_sums[kScanThreads / 32];
};

template <class F>
__device__ __forceinline__ void each_window(int rows, F f) {
  const int windows = (rows + 31) / 32, warps = kScanThreads / 32, warp = threadIdx.x >> 5;
  const int own = (windows + warps - 1) / warps, end = min((warp + 1) * own, windows);
#pragma unroll 1
  for (int w = warp * own; w < end; ++w) f(w, w * 32 + static_cast<int>(threadIdx.x & 31));
}

// Writes the items of `rows` places, the first one being `first`, whose owners lie in shared memory;
// none has more than item_rows <= 32 rows. `begin(total)` says where the CTA's items start.
template <class Begin>
__device__ __forceinline__ void cut_items(CutShared& sm, const uint32_t* owners, int rows, int first, int item_rows,
                                          Item* items, Begin begin) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, windows = (rows + 31) / 32;
  const uint32_t below = (1u << lane) - 1, above = ~below << 1;
  auto last_of = [](int w, uint32_t runs) { return w * 32 + 31 - __clz(runs); };
  int run = -1;
  each_window(rows, [&](int w, int i) {
    const uint32_t runs = __ballot_sync(~0u, i < rows && (i == 0 || owners[i] != owners[i - 1]));
    if (lane == 0) sm.runs[w] = runs;
    if (runs) run = last_of(w, runs);
  });
  if (lane == 0) sm.last[warp] = run;
  __syncthreads();
  int total, count = 0;
  run = scan_warps(sm.last, -1, later, &total);
  each_window(rows, [&](int w, int i) {
    const uint32_t runs = sm.runs[w], mine = runs & ~above;
    const bool head = i < rows && owners[i] != kNobody && (i - (mine ? last_of(w, mine) : run)) % item_rows == 0;
    const uint32_t heads = __ballot_sync(~0u, head);
    if (lane == 0) sm.heads[w] = heads;
    if (runs) run = last_of(w, runs);
    count += __popc(heads);
  });
  if (lane == 0) sm.counts[warp] = count;
  __syncthreads();
  const int before = scan_warps(sm.counts, 0, plus, &total);
  int at = begin(total) + before;
  each_window(rows, [&](int w, int i) {
    const uint32_t heads = sm.heads[w], runs = sm.runs[w] & above, next = w + 1 < windows ? sm.runs[w + 1] : 0;
    if (heads >> lane & 1) {
      const int end = runs ? w * 32 + __ffs(runs) - 1 : next ? w * 32 + 31 + __ffs(next) : rows;
      const int slot = static_cast<int>(owners[i] >> 16), expert = static_cast<int>(owners[i] & 0xffff);
      items[at + __popc(heads & below)] = Item{slot, expert, first + i, min(end - i, item_rows)};
    }
    at += __popc(heads);
  });
}

}  // namespace lora_jax
