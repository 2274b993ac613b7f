// Launches of few_rows.cuh: its tiles, tensor maps and shared memory.
#pragma once
#include <algorithm>

#include "device/swizzled_map.cuh"
#include "grouped_matmul/few_rows.cuh"

namespace lora_jax {

// What a launch is given beside FewRowsArgs' pointers.
struct FewRowsCall {
  const void* weights[2];
  FewRowsArgs args;
  bool gated;
};

inline cudaError_t weights_map(CUtensorMap* map, const void* base, int row_bytes, int d_out, int groups, int box) {
  const cuuint64_t bytes = row_bytes, dims[4] = {bytes / 2, static_cast<cuuint64_t>(d_out), static_cast<cuuint64_t>(groups), 1};
  const cuuint64_t strides[3] = {bytes, bytes * dims[1], bytes * dims[1] * dims[2]};
  const cuuint32_t sizes[4] = {64, static_cast<cuuint32_t>(box), 1, 1};
  return swizzled_map(map, base, dims, strides, sizes);
}

inline cudaError_t x_map(CUtensorMap* map, const FewRowsArgs& p, int rows, int columns) {
  const cuuint64_t bytes = 2 * static_cast<cuuint64_t>(p.d_in), blocks = p.d_in / 64;
  const cuuint64_t dims[4] = {64, static_cast<cuuint64_t>(p.rows), blocks, 1}, strides[3] = {bytes, 128, bytes * p.rows};
  const cuuint32_t sizes[4] = {64, static_cast<cuuint32_t>(rows), static_cast<cuuint32_t>(columns / 64), 1};
  return swizzled_map(map, p.x, dims, strides, sizes);
}

template <Coding C, int G, int ROWS, int W, int TILES, bool GATED, int PER_SM>
cudaError_t launch_few_rows(const FewRowsCall& call, cudaStream_t stream) {
  using Layout = FewRowsLayout<C, G, ROWS, W, TILES>;
  constexpr int kColumns = Layout::kWeightRows / (GATED ? 2 : 1), kStep = kStepColumns<C>;
  FewRowsArgs p = call.args;
  const int row_bytes = static_cast<int>(static_cast<int64_t>(p.d_in) * kRowBytes / kStep);
  for (int m = 0; m < 2; ++m) {
    const void* weights = call.weights[GATED ? m : 0];
    if (const cudaError_t e = weights_map(&p.maps[m], weights, row_bytes, p.d_out, p.groups, kColumns); e != cudaSuccess)
      return e;
    if (const cudaError_t e = x_map(&p.x_maps[m], p, m ? ROWS : 8, kStep); e != cudaSuccess) return e;
  }
  p.tiles = (p.d_out + kColumns - 1) / kColumns;
  p.steps = (p.d_in + kStep - 1) / kStep;
  p.works = std::min(p.groups, p.rows) + p.rows / ROWS;
  const int row = p.scale_groups * kScaleBytes<C>, own = scale_words<C, G>() * 4;
  const bool whole = C == Coding::kFloat8 && (p.scale_groups == 1 || p.scale_columns % G == 0);
  if (row % 4 || (p.scale_columns != G && !whole)) return cudaErrorInvalidValue;
  p.piece = own % 16 == 0 && row % 16 == 0 ? 16 : own % 8 == 0 && row % 8 == 0 ? 8 : 4;
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

// Columns of a dense map are few for the SMs, so its tiles are narrower and three CTAs share an SM.
template <Coding C, int G>
cudaError_t launch_few_rows(const FewRowsCall& call, cudaStream_t stream) {
  if (call.gated) return launch_few_rows<C, G, 16, 4, 2, true, 2>(call, stream);
  if (call.args.groups == 1) return launch_few_rows<C, G, 16, 4, 1, false, 3>(call, stream);
  return launch_few_rows<C, G, 16, 4, 2, false, 2>(call, stream);
}

}  // namespace lora_jax
