// Launches of dense_rows.cuh: how many columns a tile has, tensor maps and shared memory.
#pragma once
#include <algorithm>

#include "dense_matmul/dense_rows.cuh"

namespace lora_jax {

// What a launch is given beside DenseRowsArgs' pointers.
struct DenseRowsCall {
  const void *x, *weights[kDenseMaps];
  DenseRowsArgs args;
  int count;  // maps
  int d_in;
};

// Views an array [rows, d_in] as blocks of 64 of d_in: a box are some of them, of so many rows.
inline cudaError_t blocks_map(CUtensorMap* map, const void* base, int rows, int d_in, int box_rows, int blocks) {
  const cuuint64_t bytes = 2 * static_cast<cuuint64_t>(d_in), all = rows, many = d_in / kDenseBlock;
  const cuuint64_t dims[4] = {kDenseBlock, all, many, 1}, strides[3] = {bytes, 128, bytes * all};
  const cuuint32_t box[4] = {kDenseBlock, static_cast<cuuint32_t>(box_rows), static_cast<cuuint32_t>(blocks), 1};
  return swizzled_map(map, base, dims, strides, box);
}

// The tiles of a map, of so many columns: pairs of them, which become one of twice as many.
inline int dense_tiles(int d_out, int columns) { return (d_out + 2 * columns - 1) / (2 * columns) * 2; }

template <int COLUMNS, int BLOCKS>
cudaError_t launch_dense_rows(const DenseRowsCall& call, cudaStream_t stream) {
  using Kernel = DenseRows<COLUMNS, BLOCKS>;
  DenseRowsArgs p = call.args;
  int tiles = 0;
  for (int m = 0; m < kDenseMaps; ++m) {
    DenseRowsMap& of = p.of[m];
    of.first_tile = m < call.count ? tiles : 1 << 30;
    if (m >= call.count) continue;
    if (const cudaError_t e = blocks_map(&p.maps[m], call.weights[m], of.d_out, call.d_in, COLUMNS, BLOCKS); e != cudaSuccess)
      return e;
    tiles += dense_tiles(of.d_out, COLUMNS);
  }
  p.x_rows = std::min(64, (p.rows + 7) / 8 * 8);  // copies of rows that are not there take as long as of others
  if (const cudaError_t e = blocks_map(&p.x_map, call.x, p.rows, call.d_in, p.x_rows, BLOCKS); e != cudaSuccess) return e;
  p.steps = (call.d_in + BLOCKS * kDenseBlock - 1) / (BLOCKS * kDenseBlock);
  constexpr int kRoom = (227 << 10) - kRowsBarriers - 1024;
  int shared = 0;
  for (int halves = 1; halves <= 2; ++halves) {
    const int stages = std::min({kMostDenseStages, kRoom / Kernel::stage_bytes(halves), p.steps});
    p.stages[halves - 1] = stages, shared = std::max(shared, kRowsBarriers + stages * Kernel::stage_bytes(halves));
  }
  const auto kernel = dense_rows_kernel<COLUMNS, BLOCKS>;
  if (const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
      e != cudaSuccess)
    return e;
  return launch_early(kernel, tiles, kRowsThreads, shared, stream, p);
}

// By the narrowest tiles of which every SM has one at most. Narrow ones take longer stages: what a stage costs beside
// its bytes is the same.
inline cudaError_t launch_dense_rows(const DenseRowsCall& call, cudaStream_t stream) {
  int sms = 0;
  if (const cudaError_t e = count_sms(&sms); e != cudaSuccess) return e;
  const auto fit = [&](int columns) {
    int tiles = 0;
    for (int m = 0; m < call.count; ++m) tiles += dense_tiles(call.args.of[m].d_out, columns);
    return tiles <= sms;
  };
  if (fit(16)) return launch_dense_rows<16, 4>(call, stream);
  if (fit(32)) return launch_dense_rows<32, 2>(call, stream);
  return launch_dense_rows<48, 2>(call, stream);
}

}  // namespace lora_jax
