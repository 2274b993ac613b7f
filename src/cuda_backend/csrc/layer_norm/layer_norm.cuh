// y = (x - mean) / sqrt(variance + eps) * weight + bias of rows in bfloat16; a warp has a row.
//
// The width alone decides in which order a row's values are added: a thread's own, then threads by halves.
#pragma once
#include "device/launch_early.cuh"
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

// PIECES of 8 values are a thread's; all of them are asked for before the first one is used.
template <int PIECES>
__global__ void __launch_bounds__(kLayerNormWarps * 32) layer_norm_kernel(const LayerNormArgs p) {
  const int row = static_cast<int>(blockIdx.x) * kLayerNormWarps + static_cast<int>(threadIdx.x) / 32;
  const int64_t first = static_cast<int64_t>(row) * p.size;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  let_next_begin();
  wait_for_previous();
  if (row >= p.rows) return;
  uint4 raw[PIECES];
#pragma unroll
  for (int i = 0; i < PIECES; ++i) {
    const int column = (i * 32 + lane) * 8;
    raw[i] = column < p.size ? *reinterpret_cast<const uint4*>(p.x + first + column) : make_uint4(0, 0, 0, 0);
  }
  float v[8], sum = 0, squares = 0;
#pragma unroll
  for (int i = 0; i < PIECES; ++i) {
    unpack(raw[i], v);
#pragma unroll
    for (int e = 0; e < 8; ++e) sum += v[e];
  }
  const float mean = warp_sum(sum) / static_cast<float>(p.size);
#pragma unroll
  for (int i = 0; i < PIECES; ++i) {
    if ((i * 32 + lane) * 8 >= p.size) break;
    unpack(raw[i], v);
#pragma unroll
    for (int e = 0; e < 8; ++e) v[e] -= mean, squares = __fmaf_rn(v[e], v[e], squares);
  }
  const float factor = rsqrtf(warp_sum(squares) / static_cast<float>(p.size) + p.eps);
#pragma unroll
  for (int i = 0; i < PIECES; ++i) {
    const int column = (i * 32 + lane) * 8;
    if (column >= p.size) break;
    float weight[8], bias[8] = {};
    unpack(raw[i], v);
    unpack(load_piece(p.weight + column), weight);
    if (p.bias) unpack(load_piece(p.bias + column), bias);
#pragma unroll
    for (int e = 0; e < 8; ++e) v[e] = __fmaf_rn((v[e] - mean) * factor, weight[e], bias[e]);
    store_piece(p.y + first + column, pack(v));
  }
}

template <int PIECES>
cudaError_t launch_layer_norm_of(const LayerNormArgs& p, cudaStream_t stream) {
  const auto kernel = layer_norm_kernel<PIECES>;
  return launch_early(kernel, (p.rows + kLayerNormWarps - 1) / kLayerNormWarps, kLayerNormWarps * 32, 0, stream, p);
}

constexpr int kMostLayerNorm = 18 * 256;  // values of a row

// `size` is a multiple of 8, and at most kMostLayerNorm.
inline cudaError_t launch_layer_norm(const LayerNormArgs& p, cudaStream_t stream) {
  return p.size <= 5 * 256 ? launch_layer_norm_of<5>(p, stream) : launch_layer_norm_of<kMostLayerNorm / 256>(p, stream);
}

}  // namespace lora_jax
