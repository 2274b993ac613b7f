// y = (x - mean) / sqrt(variance + eps) * weight + bias of rows in bfloat16; a warp has a row.
//
// The order in which a row's values are added depends on the width alone: first each thread's own, then threads
// by halves.
#pragma once
#include "rms_norm/rms_norm.cuh"

namespace lora_jax {

struct LayerNormArgs {
  const __nv_bfloat16* x;       // [rows, size]
  const __nv_bfloat16* weight;  // [size]
  const __nv_bfloat16* bias;    // [size] or null
  __nv_bfloat16* y;             // [rows, size]
  int rows, size;
  float eps;
};

constexpr int kLayerNormWarps = 8;
constexpr int kLayerNormPieces = 8;  // of 8 values that a thread holds at most

__global__ void __launch_bounds__(kLayerNormWarps * 32) layer_norm_kernel(const LayerNormArgs p) {
  const int row = static_cast<int>(blockIdx.x) * kLayerNormWarps + static_cast<int>(threadIdx.x) / 32;
  if (row >= p.rows) return;
  const int64_t first = static_cast<int64_t>(row) * p.size;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float v[kLayerNormPieces][8], sum = 0, squares = 0;
#pragma unroll
  for (int i = 0; i < kLayerNormPieces; ++i) {
    const int column = (i * 32 + lane) * 8;
    if (column >= p.size) break;
    unpack(load_piece(p.x + first + column), v[i]);
#pragma unroll
    for (int e = 0; e < 8; ++e) sum += v[i][e];
  }
  const float mean = warp_sum(sum) / static_cast<float>(p.size);
#pragma unroll
  for (int i = 0; i < kLayerNormPieces; ++i) {
    if ((i * 32 + lane) * 8 >= p.size) break;
#pragma unroll
    for (int e = 0; e < 8; ++e) v[i][e] -= mean, squares = __fmaf_rn(v[i][e], v[i][e], squares);
  }
  const float factor = rsqrtf(warp_sum(squares) / static_cast<float>(p.size) + p.eps);
#pragma unroll
  for (int i = 0; i < kLayerNormPieces; ++i) {
    const int column = (i * 32 + lane) * 8;
    if (column >= p.size) break;
    float weight[8], bias[8] = {};
    unpack(load_piece(p.weight + column), weight);
    if (p.bias) unpack(load_piece(p.bias + column), bias);
#pragma unroll
    for (int e = 0; e < 8; ++e) v[i][e] = __fmaf_rn(v[i][e] * factor, weight[e], bias[e]);
    store_piece(p.y + first + column, pack(v[i]));
  }
}

// `size` is a multiple of 8, and at most 8 * 32 * kLayerNormPieces.
inline cudaError_t launch_layer_norm(const LayerNormArgs& p, cudaStream_t stream) {
  const auto kernel = layer_norm_kernel;
  kernel<<<(p.rows + kLayerNormWarps - 1) / kLayerNormWarps, kLayerNormWarps * 32, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace lora_jax
