// What the tile kernels of lora_tiles.cuh take, for those who only launch them.
#pragma once
#include <cuda_runtime.h>

#include "lora_units.cuh"

namespace lora_jax {

struct TileArgs {
  CUtensorMap a_map;                // boxes of 8 rows x 128 columns of A
  CUtensorMap a_parts[2];           // see parts_map: of parts 0 and 1, and of 2 and 3
  const Item* tiles;
  const int* cut;                   // [2]: number of tiles; blocks of 8 rows in the largest
  const int* row_order;             // sorted place -> row of x and y
  const int* entries;               // [slots, 5]: a_offset, b_offset, rank, a_stride, b_stride
  const float* scaling;             // [slots]
  const __nv_bfloat16* x;           // [rows, d_in]
  const __nv_bfloat16* b_pool;      // [pool rows, d_out]
  __nv_bfloat16* y;                 // [rows, d_out]
  __nv_bfloat16* h;                 // [sorted rows, h_stride]
  int d_in, d_out, h_stride, max_rank, most_tiles;
  bool accumulate;                  // else y is only written
  bool shrink, expand;
  bool behind;                      // expand: h comes from the kernel before
};

// Shrinks, expands or both: the rows of all tiles, in order on the stream.
cudaError_t launch_tiles(TileArgs args, bool shrink, bool expand, cudaStream_t stream);

}  // namespace lora_jax
