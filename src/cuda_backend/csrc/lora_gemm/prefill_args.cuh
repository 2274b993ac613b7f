// Arguments of the tile kernels of lora_gemm/prefill_shrink.cuh, for code that only launches them.
#pragma once
#include <cuda_runtime.h>

#include "lora_gemm/units.cuh"

namespace lora_jax {

constexpr int kTileRows = 128;  // of a tile, at most
constexpr int kListedRows = 72;  // so that a thread that copies finds its rows in three words: see ShrinkRows

// The n-th tile of the expand and the n-th of the shrink, which cut the same segments to other sizes.
struct alignas(16) TileRecord {
  Item expand, shrink;
  uint32_t rows[kListedRows];       // of the shrink's, so that nobody waits for row_order: the n-th in the lower
                                    // half of word n, the n-th behind kListedRows in the upper one
};
static_assert(sizeof(TileRecord) == 80 * 4, "lora_tiles.RECORD");

struct TileArgs {
  CUtensorMap a_parts[2][2];        // of parts 0 and 1, and of 2 and 3; with boxes of 8 ranks, and of kTallBox * 8
  CUtensorMap b_boxes;              // of B: see pool_map, with wide boxes
  CUtensorMap h_rows;               // see h_map
  CUtensorMap y_boxes[kMaxModules];  // see y_map
  const TileRecord* tiles;
  const int* cut;                   // [4]: number of tiles of the expand; blocks of 8 rows in the largest; rows
                                    // with an adapter; number of tiles of the shrink
  const int* row_order;             // sorted place -> row of x and y
  Module modules[kMaxModules];
  const __nv_bfloat16* x;           // [rows, d_in]
  const __nv_bfloat16* b_pool;      // [pool rows, d_out]; of launch_gated_tiles alone
  __nv_bfloat16* h;                 // [modules, sorted rows, h_stride]
  int num_modules, num_rows, num_slots;
  int d_in, d_out, h_stride, max_rank, most_tiles;
  bool shrink, expand;              // what of it, h being the result or given where it is one alone; else the expand's
                                    // h comes from the kernel before, or from this one
  bool accumulate;                  // the expand adds to y; else y holds nothing before
  uint32_t* shrunk;                 // of the call's state, where one kernel shrinks and expands; else null
};

// Shrinks, expands or both: the rows of all tiles. May begin while the kernel before it in the stream
// runs, that of the items, for it only touches rows in tiles, and ends after it.
cudaError_t launch_tiles(TileArgs args, cudaStream_t stream);
// Shrinks the tiles, if they are to be; then one kernel serves the items and expands the tiles. Their h are
// apart.
struct BothArgs {
  PairArgs items;
  TileArgs tiles;
};
constexpr int kMostRankOfBoth = 64;  // else the tiles need more registers than the items leave
cudaError_t launch_both(BothArgs args, cudaStream_t stream);
// Shrinks and expands tiles, of ranks of at most that. May begin while the kernel before it in the stream runs.
cudaError_t launch_pair_tiles(TileArgs args, CallState* state, cudaStream_t stream);
// Adds to the tiles' rows of gate and up, whose h is known, and multiplies all rows: see lora_gemm/prefill_gated.cuh.
struct GatedTileArgs {
  TileArgs tiles;        // its modules are gate and up, whose y are read alone
  const Item* items;     // whose rows have their adapters
  const int* num_items;
  __nv_bfloat16* y;      // [rows, d_out]
  const int* num_rows;   // those behind are zeros
};
constexpr int kMostRankOfGated = 32;  // else B would fill the registers
cudaError_t launch_gated_tiles(const GatedTileArgs& args, cudaStream_t stream);
// Shrinks the items and the tiles in one kernel, which waits for the one before.
cudaError_t launch_shrinks(const BothArgs& args, cudaStream_t stream);
// Sets the maps of A, [rows, width].
cudaError_t parts_maps(CUtensorMap (&maps)[2][2], const void* a_pool, int64_t rows, int64_t width);

__device__ __forceinline__ Item load_item(const Item* item) {
  const int4 v = __ldg(reinterpret_cast<const int4*>(item));
  return Item{v.x, v.y, v.z, v.w};
}
__device__ __forceinline__ Item load_item_now(const Item* item) {
  const int4 v = load_now(reinterpret_cast<const int4*>(item));
  return Item{v.x, v.y, v.z, v.w};
}
__device__ __forceinline__ Item load_tile(const TileArgs& p, int tile) { return load_item(&p.tiles[tile].expand); }

// Of a place of the sorted order.
__device__ __forceinline__ __nv_bfloat16* h_row(const TileArgs& p, int module, int place) {
  return p.h + (static_cast<int64_t>(module) * p.num_rows + place) * p.h_stride;
}

}  // namespace lora_jax
