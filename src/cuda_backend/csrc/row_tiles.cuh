// Takes the segments with many rows out of the items and cuts them into tiles: one CTA, once a step.
//
// No result depends on which segments these are (see lora_tiles.cuh), so the choice may follow what
// the batch holds: tiles only pay where together they have enough rows.
#pragma once
#include "cta_sort.cuh"
#include "tile_args.cuh"

namespace lora_jax {

struct RowTilesArgs {
  const Item* items;     // by segment, as metadata_kernel leaves them
  const int* num_items;
  int rows;              // of the batch
  int least_rows;        // of a segment that becomes tiles, where there are too many for all to
  int least_total;       // rows of all such segments together, with fewer there are no tiles; nor where
                         // more than a quarter of all rows stays in items: those would wait for tiles
  int clusters;          // that can run at a time
  int most_tiles;        // that there is room for
  Item* small;           // [rows] out: the items that stay
  int* num_small;        // [1] out
  Item* tiles;           // [most_tiles] out
  int* cut;              // [3] out, see TileArgs
};

// Of a tile, unless that makes many more tiles than clusters, of which some would shrink one after the
// other. So each warp of a cluster shrinks one block of 16 rows, or each two: between them some would
// wait for others. Shrink of 4096 tokens of 4 adapters on an H200: 24.4 us by 67 small tiles, 29.2 by 35.
constexpr int kSmallTileRows = kTileRows / 2;

struct RowTilesShared {
  int warp_sums[kScanThreads / 32];
  int total;             // rows of segments that may become tiles
  int small_tiles;       // made of them, were tiles small
  int all_tiles;         // made of all segments, were tiles small
  int segments[];        // [items]: rows of each segment
};

__global__ void __launch_bounds__(kScanThreads) row_tiles_kernel(const RowTilesArgs p) {
  extern __shared__ __align__(16) unsigned char row_tiles_raw[];
  auto& sm = *reinterpret_cast<RowTilesShared*>(row_tiles_raw);
  const int num_items = *p.num_items, tid = threadIdx.x, per = (num_items + kScanThreads - 1) / kScanThreads;
  const int begin = min(tid * per, num_items), end = min(begin + per, num_items);
  auto item = [&](int i) {
    const int4 v = __ldg(reinterpret_cast<const int4*>(p.items) + i);
    return Item{v.x, v.y, v.z, v.w};
  };
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
  auto tiles_of = [&](int s) { return (sm.segments[s] + most - 1) / most; };
  int kept = 0, made = 0, total;
  for (int i = begin, s = first; i < end; ++i) {
    const bool starts = begins(i, item(i));
    s += starts;
    if (!tiled(s)) ++kept;
    else if (starts) made += tiles_of(s);
  }
  int at = cta_scan(kept, sm.warp_sums, 0, plus, &total);
  if (tid == 0) *p.num_small = total;
  int tile = cta_scan(made, sm.warp_sums, 0, plus, &total);
  if (tid == 0) p.cut[0] = total, p.cut[1] = most / 8, p.cut[2] = live;
  for (int i = begin, s = first; i < end; ++i) {
    const Item it = item(i);
    const bool starts = begins(i, it);
    s += starts;
    if (!tiled(s)) {
      p.small[at++] = it;
    } else if (starts) {
      const int rows = sm.segments[s], count = tiles_of(s), even = ((rows + count - 1) / count + 7) / 8 * 8;
      for (int n = 0; n < rows; n += even) p.tiles[tile++] = Item{it.slot, it.expert, it.row_begin + n, min(even, rows - n)};
    }
  }
}

}  // namespace lora_jax
