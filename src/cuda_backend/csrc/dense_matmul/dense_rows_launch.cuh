// Launches of dense_rows.cuh: how many columns a tile has, tensor maps and shared memory.
#pragma once
#include <algorithm>

#include "dense_matmul/dense_rows.cuh"

namespace lora_jax {

// What a launch is given beside DenseRowsArgs' pointers.
struct DenseRowsCall {
  const void *x, *weights[kDenseMaps];
  DenseRowsArgs args;
  bool gated;  // silu of the first product times the second
  int count;   // maps
  int d_in;
};

// Views an array [rows, d_in] as blocks of 64 of d_in: a box are some of them, of so many rows.
inline cudaError_t blocks_map(CUtensorMap* map, const void* base, int rows, int d_in, int box_rows, int blocks) {
  const cuuint64_t bytes = 2 * static_cast<cuuint64_t>(d_in), all = rows, many = d_in / kDenseBlock;
  const cuuint64_t dims[4] = {kDenseBlock, all, many, 1}, strides[3] = {bytes, 128, bytes * all};
  const cuuint32_t box[4] = {kDenseBlock, static_cast<cuuint32_t>(box_rows), static_cast<cuuint32_t>(blocks), 1};
  return swizzled_map(map, base, dims, strides, box);
}

template <int COLUMNS, bool GATED, int BLOCKS>
cudaError_t launch_dense_rows_as(const DenseRowsCall& call, cudaStream_t stream) {
  using Kernel = DenseRows<COLUMNS, GATED, BLOCKS>;
  DenseRowsArgs p = call.args;
  int tiles = 0;
  for (int m = 0; m < kDenseMaps; ++m) {
    DenseRowsMap& of = p.of[m];
    of.first_tile = m < call.count && !(GATED && m) ? tiles : 1 << 30;
    if (m >= call.count) continue;
    if (const cudaError_t e = blocks_map(&p.maps[m], call.weights[m], of.d_out, call.d_in, COLUMNS, BLOCKS); e != cudaSuccess)
      return e;
    if (!(GATED && m)) tiles += (of.d_out + COLUMNS - 1) / COLUMNS;
  }
  p.x_rows = std::min(64, (p.rows + 7) / 8 * 8);  // copies of rows that are not there take as long as of others
  if (const cudaError_t e = blocks_map(&p.x_map, call.x, p.rows, call.d_in, p.x_rows, BLOCKS); e != cudaSuccess) return e;
  p.steps = (call.d_in + BLOCKS * kDenseBlock - 1) / (BLOCKS * kDenseBlock);
  constexpr int kRoom = (227 << 10) - kRowsBarriers - 1024;
  int shared = 0;
  for (int groups = 1; groups <= kRowGroups; ++groups) {
    const int stages = std::min({kMostDenseStages, kRoom / Kernel::stage_bytes(groups), p.steps});
    p.stages[groups - 1] = stages, shared = std::max(shared, kRowsBarriers + stages * Kernel::stage_bytes(groups));
  }
  const auto kernel = dense_rows_kernel<COLUMNS, GATED, BLOCKS>;
  if (const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
      e != cudaSuccess)
    return e;
  return launch_early(kernel, tiles, kRowsThreads, shared, stream, p);
}

// The tiles of all maps, of so many columns.
inline int dense_tiles(const DenseRowsCall& call, int columns) {
  int tiles = 0;
  for (int m = 0; m < (call.gated ? 1 : call.count); ++m) tiles += (call.args.of[m].d_out + columns - 1) / columns;
  return tiles;
}

// Narrow tiles take longer stages: what a stage costs beside its bytes is the same.
template <int COLUMNS>
cudaError_t launch_dense_rows_of(const DenseRowsCall& call, cudaStream_t stream) {
  constexpr int kBlocks = COLUMNS <= 16 ? 4 : COLUMNS <= 48 ? 2 : 1;
  return call.gated ? launch_dense_rows_as<COLUMNS, true, std::min(kBlocks, 2)>(call, stream)
                    : launch_dense_rows_as<COLUMNS, false, kBlocks>(call, stream);
}

// By the narrowest tiles of which every SM has one at most, if there are any.
inline cudaError_t launch_dense_rows(const DenseRowsCall& call, cudaStream_t stream) {
  int sms = 0;
  if (const cudaError_t e = count_sms(&sms); e != cudaSuccess) return e;
  const auto fit = [&](int columns) { return dense_tiles(call, columns) <= sms; };
  if (fit(16)) return launch_dense_rows_of<16>(call, stream);
  if (fit(32)) return launch_dense_rows_of<32>(call, stream);
  if (fit(48)) return launch_dense_rows_of<48>(call, stream);
  if (fit(64)) return launch_dense_rows_of<64>(call, stream);
  if (fit(80)) return launch_dense_rows_of<80>(call, stream);
  if (fit(96)) return launch_dense_rows_of<96>(call, stream);
  return launch_dense_rows_of<112>(call, stream);
}

}  // namespace lora_jax
