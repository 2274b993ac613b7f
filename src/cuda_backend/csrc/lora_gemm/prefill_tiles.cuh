// Takes the segments with many rows out of the items and cuts them into tiles: one CTA, once a step.
//
// No result depends on which segments these are (see lora_gemm/prefill_shrink.cuh), so the choice may depend on
// the batch: tiles are faster only if they have enough rows together.
#pragma once
#include <climits>

#include "device/cta_sort.cuh"
#include "lora_gemm/prefill_shrink.cuh"

namespace lora_jax {

struct RowTilesArgs {
  const Item* items;     // by segment, as metadata_kernel leaves them
  const int* num_items;
  const int* row_order;  // [rows]
  int rows;              // of the batch
  int least_rows;        // of a segment that becomes tiles, where there are too many for all to
  int least_total;       // rows of all such segments together, with fewer there are no tiles; nor where
                         // more than a quarter of all rows stays in items: those would wait for tiles
  int clusters, apart;   // that can run at a time; so that no two share an SM
  int most_tiles;        // that there is room for
  Item* small;           // [rows] out: the items that stay
  int* num_small;        // [1] out
  TileRecord* tiles;     // [most_tiles] out
  int* cut;              // [4] out, see TileArgs
};

// Of a tile of the expand, unless that makes many more tiles than clusters.
constexpr int kSmallTileRows = kTileRows / 2;
constexpr int kHeightStep = 16, kHeights = kTileRows / kHeightStep;  // of tiles of the shrink

struct RowTilesShared {
  int warp_sums[kScanThreads / 32];
  int total;             // rows of segments that may become tiles
  int small_tiles;       // made of them, were tiles small
  int all_tiles;         // made of all segments, were tiles small
  int by_height[kHeights];  // tiles of the shrink, did they have 16 rows, 32, and so on
  int segments[];        // [items]: rows of each segment
};

// Calls f with the pieces of at most `most` rows, as equal as multiples of 8 rows can be.
template <class F>
__device__ __forceinline__ void cut_evenly(const Item& whole, int most, F f) {
  const int rows = whole.num_rows, even = divide_up(divide_up(rows, divide_up(rows, most)), 8) * 8;
  for (int n = 0; n < rows; n += even) f(Item{whole.slot, whole.expert, whole.row_begin + n, min(even, rows - n)});
}

// Of tiles of the shrink, by what was fastest on an H200. Shared memory is what binds: a step of a tile moves
// as much as it has rows and ranks. Two tiles on an SM share it; what does not run at once comes behind.
__device__ __forceinline__ int choose_height(const RowTilesArgs& p, const int (&tiles)[kHeights]) {
  int best = kTileRows, least = INT_MAX;
  for (int h = kHeights; h > 0; --h) {
    const int rows = h * kHeightStep, count = tiles[h - 1];
    if (count > p.most_tiles) break;
    const int turns = count <= p.apart ? 10 : count <= p.clusters ? 20 : 20 * count / p.clusters + 6;
    const int cost = (rows + kMostRankOfPass) * turns;
    if (cost < least) least = cost, best = rows;
  }
  return best;
}

// By a warp: writes the rows of the shrink's tile.
__device__ __forceinline__ void list_rows(const RowTilesArgs& p, TileRecord& t) {
  auto row = [&](int n) { return static_cast<uint32_t>(p.row_order[t.shrink.row_begin + min(n, t.shrink.num_rows - 1)]); };
  for (int n = threadIdx.x & 31; n < kListedRows; n += 32) t.rows[n] = row(n) | row(n + kListedRows) << 16;
}

__global__ void __launch_bounds__(kScanThreads) row_tiles_kernel(const RowTilesArgs p) {
  extern __shared__ __align__(16) unsigned char row_tiles_raw[];
  auto& sm = *reinterpret_cast<RowTilesShared*>(row_tiles_raw);
  const int num_items = *p.num_items, tid = threadIdx.x, per = (num_items + kScanThreads - 1) / kScanThreads;
  const int begin = min(tid * per, num_items), end = min(begin + per, num_items);
  auto item = [&](int i) { return load_item(p.items + i); };
  auto begins = [&](int i, const Item& it) {
    if (i == 0) return true;
    const Item before = item(i - 1);
    const bool next = before.row_begin + before.num_rows == it.row_begin;  // rows of nobody may lie between
    return !next || before.slot != it.slot || before.expert != it.expert;
  };
  int count = 0, segments;
  for (int i = begin; i < end; ++i) count += begins(i, item(i));
  const int first = cta_scan(count, sm.warp_sums, 0, plus, &segments) - 1;  // of the item before mine
  for (int s = tid; s < segments; s += kScanThreads) sm.segments[s] = 0;
  if (tid == 0) sm.total = sm.small_tiles = sm.all_tiles = 0;
  if (tid < kHeights) sm.by_height[tid] = 0;
  __syncthreads();
  for (int i = begin, s = first; i < end; ++i) {
    const Item it = item(i);
    s += begins(i, it);
    atomicAdd(&sm.segments[s], it.num_rows);
  }
  __syncthreads();
  for (int s = tid; s < segments; s += kScanThreads) {
    const int rows = sm.segments[s], tiles = (rows - 1) / kSmallTileRows + 1;
    atomicAdd(&sm.all_tiles, tiles);
    if (rows < p.least_rows) continue;
    atomicAdd(&sm.total, rows);
    atomicAdd(&sm.small_tiles, tiles);
  }
  __syncthreads();
  const Item last = item(max(num_items - 1, 0));
  const int live = num_items > 0 ? last.row_begin + last.num_rows : 0;  // rows of nobody come last
  const bool pays = sm.total >= p.least_total && sm.total >= live - live / 4;
  // Few short segments beside are tiles too: as items they would be shrunk before and expanded behind.
  const bool all = sm.all_tiles <= min(p.clusters, p.most_tiles);
  const int most = sm.small_tiles <= p.clusters + p.clusters / 2 ? kSmallTileRows : kTileRows;
  auto tiled = [&](int s) { return pays && (all || sm.segments[s] >= p.least_rows); };
  for (int s = tid; s < segments; s += kScanThreads)
    for (int h = 0; tiled(s) && h < kHeights; ++h) atomicAdd(&sm.by_height[h], divide_up(sm.segments[s], (h + 1) * kHeightStep));
  __syncthreads();
  const int height = choose_height(p, sm.by_height);
  int kept = 0, made = 0, shrunk = 0, total, shrink_tiles;
  for (int i = begin, s = first; i < end; ++i) {
    const bool starts = begins(i, item(i));
    s += starts;
    if (!tiled(s)) ++kept;
    else if (starts) made += divide_up(sm.segments[s], most), shrunk += divide_up(sm.segments[s], height);
  }
  int at = cta_scan(kept, sm.warp_sums, 0, plus, &total);
  if (tid == 0) *p.num_small = total;
  int tile = cta_scan(made, sm.warp_sums, 0, plus, &total);
  int shrink_tile = cta_scan(shrunk, sm.warp_sums, 0, plus, &shrink_tiles);
  if (tid == 0) p.cut[0] = total, p.cut[1] = most / 8, p.cut[2] = live, p.cut[3] = shrink_tiles;
  for (int i = begin, s = first; i < end; ++i) {
    const Item it = item(i);
    const bool starts = begins(i, it);
    s += starts;
    if (!tiled(s)) {
      p.small[at++] = it;
    } else if (starts) {
      const Item whole{it.slot, it.expert, it.row_begin, sm.segments[s]};
      cut_evenly(whole, most, [&](const Item& cut) { p.tiles[tile++].expand = cut; });
      cut_evenly(whole, height, [&](const Item& cut) { p.tiles[shrink_tile++].shrink = cut; });
    }
  }
  __syncthreads();
  for (int t = tid / 32; t < shrink_tiles; t += kScanThreads / 32) list_rows(p, p.tiles[t]);
}

}  // namespace lora_jax
