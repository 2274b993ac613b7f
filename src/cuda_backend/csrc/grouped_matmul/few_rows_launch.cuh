// Launches of few_rows.cuh: its tiles, tensor maps and shared memory.
#pragma once
#include <algorithm>

#include "device/swizzled_map.cuh"
#include "grouped_matmul/few_rows.cuh"

namespace lora_jax {

// What a launch is given beside FewRowsArgs' pointers.
struct FewRowsCall {
  const void* weights[kMostMatrices];
  FewRowsArgs args;
  bool gated;  // silu of the first product times the second
  int count;   // matrices
};

// Views weights [groups, d_out, row_bytes] so, or where a box has several `blocks` as [groups, blocks of 128 bytes, d_out].
inline cudaError_t weights_map(CUtensorMap* map, const void* base, int row_bytes, int d_out, int groups, int box, int blocks) {
  const cuuint64_t bytes = row_bytes, rows = d_out, all = groups, matrix = bytes * rows;
  const cuuint32_t height = box, deep = blocks;
  if (blocks == 1) {
    const cuuint64_t dims[4] = {bytes / 2, rows, all, 1}, strides[3] = {bytes, matrix, matrix * all};
    return swizzled_map(map, base, dims, strides, {64, height, 1, 1});
  }
  const cuuint64_t dims[4] = {64, rows, bytes / kRowBytes, all}, strides[3] = {bytes, kRowBytes, matrix};
  return swizzled_map(map, base, dims, strides, {64, height, deep, 1});
}

inline cudaError_t x_map(CUtensorMap* map, const FewRowsArgs& p, int rows, int columns) {
  const cuuint64_t bytes = 2 * static_cast<cuuint64_t>(p.d_in), blocks = p.d_in / 64;
  const cuuint64_t dims[4] = {64, static_cast<cuuint64_t>(p.rows), blocks, 1}, strides[3] = {bytes, 128, bytes * p.rows};
  const cuuint32_t sizes[4] = {64, static_cast<cuuint32_t>(rows), static_cast<cuuint32_t>(columns / 64), 1};
  return swizzled_map(map, p.x, dims, strides, sizes);
}

// Says how scales are copied. Of bfloat16 a copy has two, so only kAffine, which copies more than it needs, takes others.
template <Coding C, int G>
cudaError_t place_scales(FewRowsArgs& p) {
  const int row = p.scale_groups * kScaleBytes<C>, own = scale_words<C, G>() * 4, shared = p.scale_columns / G;
  const bool apart = p.scale_columns == G, one = p.scale_groups == 1;
  const int slots = (p.d_in + G - 1) / G;
  if (!apart && !one && (p.scale_columns % G || slots * shared >= 1 << kScaleBits)) return cudaErrorInvalidValue;
  if (p.scale_groups >= 1 << (32 - kScaleBits)) return cudaErrorInvalidValue;  // scale_at would overflow
  if (!apart && kScaleBytes<C> != 4) return cudaErrorInvalidValue;
  if (row % 4) return cudaErrorInvalidValue;
  p.scale_step = one ? 0 : ((1 << kScaleBits) + shared - 1) / shared;
  p.piece = !apart ? 0 : own % 16 == 0 && row % 16 == 0 ? 16 : own % 8 == 0 && row % 8 == 0 ? 8 : 4;
  return cudaSuccess;
}

template <Coding C, int G, int ROWS, int W, int TILES, bool GATED, int PER_SM>
cudaError_t launch_few_rows(const FewRowsCall& call, cudaStream_t stream) {
  using Layout = FewRowsLayout<C, G, ROWS, W, TILES>;
  constexpr int kColumns = Layout::kWeightRows / (GATED ? 2 : 1), kStep = kStepColumns<C>;
  FewRowsArgs p = call.args;
  const int row_bytes = static_cast<int>(static_cast<int64_t>(p.d_in) * kRowBytes * kBlocks<C> / kStep);
  p.tiles = 0;
  for (int m = 0; m < kMostMatrices; ++m) {
    FewRowsMatrix& of = p.matrices[m];
    of.first_tile = m < call.count && !(GATED && m) ? p.tiles : 1 << 30;
    if (m >= call.count) continue;
    if (const cudaError_t e = weights_map(&p.maps[m], call.weights[m], row_bytes, of.d_out, p.groups, kColumns, kBlocks<C>);
        e != cudaSuccess)
      return e;
    if (!(GATED && m)) p.tiles += (of.d_out + kColumns - 1) / kColumns;
  }
  for (int i = 0; i < 2; ++i)
    if (const cudaError_t e = x_map(&p.x_maps[i], p, i ? ROWS : 8, kStep); e != cudaSuccess) return e;
  p.steps = (p.d_in + kStep - 1) / kStep;
  p.works = std::min(p.groups, p.rows) + p.rows / ROWS;
  if constexpr (C != Coding::kPlain)
    if (const cudaError_t e = place_scales<C, G>(p); e != cudaSuccess) return e;
  const int room = (228 << 10) / PER_SM - 2048 - 64, fixed = Layout::fixed(p.works);
  p.stages = std::min(std::min(16, (room - fixed) / Layout::kStage), p.steps * 4);
  if (p.stages < 2) return cudaErrorInvalidValue;
  const int shared = p.stages * Layout::kStage + fixed;
  const auto kernel = few_rows_kernel<C, G, ROWS, W, TILES, GATED, PER_SM>;
  if (const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
      e != cudaSuccess)
    return e;
  int sms = 0;
  if (const cudaError_t e = count_sms(&sms); e != cudaSuccess) return e;
  const int64_t most = static_cast<int64_t>(p.works) * p.tiles;
  const int ctas = static_cast<int>(std::min<int64_t>(sms * PER_SM, most));
  return launch_early(kernel, ctas, W * 32 + 32, shared, stream, p);
}

// Matrices of one group. Where each tile has an SM of its own, its stages have all the room, and most of d_in is on its
// way at once: so tiles are as wide as that takes, and have 16 rows where there are SMs for them, which multiply less: o of
// Qwen3-30B, 64 rows in FP8, took 14.3 us on an H200 by them, 18.4 by tiles of 32 rows.
template <Coding C, int G>
cudaError_t launch_dense(const FewRowsCall& call, cudaStream_t stream) {
  int sms = 0;
  if (const cudaError_t e = count_sms(&sms); e != cudaSuccess) return e;
  const auto have_sms = [&](int columns, int rows = 32) {
    int tiles = 0;
    for (int m = 0; m < call.count; ++m) tiles += (call.args.matrices[m].d_out + columns - 1) / columns;
    return tiles * ((call.args.rows + rows - 1) / rows) <= sms;
  };
  if (call.args.rows > 16 && have_sms(64, 16)) return launch_few_rows<C, G, 16, 4, 1, false, 1>(call, stream);
  if (have_sms(64)) return launch_few_rows<C, G, 32, 4, 1, false, 1>(call, stream);
  if (have_sms(96)) return launch_few_rows<C, G, 32, 6, 1, false, 1>(call, stream);
  return launch_few_rows<C, G, 32, 4, 1, false, 2>(call, stream);
}

// Plain weights have the most bytes, and what is on its way of a tile of 64 columns takes an SM longer than of two of 32:
// one row of Llama-3.1-8B's down map 38.2 us on an H200, 31.5 so.
inline cudaError_t launch_plain(const FewRowsCall& call, cudaStream_t stream) {
  constexpr Coding C = Coding::kPlain;
  if (call.gated) return launch_few_rows<C, 1, 8, 2, 2, true, 3>(call, stream);
  return launch_few_rows<C, 1, 8, 2, 1, false, 3>(call, stream);
}

// Groups of up to 4 rows in the mean hardly ever have more than 8, whose tiles leave room for a third CTA an SM.
template <Coding C, int G>
cudaError_t launch_few_rows(const FewRowsCall& call, cudaStream_t stream) {
  const FewRowsArgs& p = call.args;
  const bool fewest = p.rows <= 4 * p.groups;
  if (call.gated)
    return fewest ? launch_few_rows<C, G, 8, 4, 2, true, 3>(call, stream) : launch_few_rows<C, G, 16, 4, 2, true, 2>(call, stream);
  if (p.groups == 1) return launch_dense<C, G>(call, stream);
  return fewest ? launch_few_rows<C, G, 8, 4, 2, false, 3>(call, stream) : launch_few_rows<C, G, 16, 4, 2, false, 2>(call, stream);
}

}  // namespace lora_jax
