// y = x / sqrt(mean(x^2) + eps) * weight of rows in bfloat16; x may first become x + addend, rounded.
//
// The order in which a row's squares are added depends on the width alone: first each thread's own, then the
// threads of a warp by halves, then the warps in order.
#pragma once
#include "device/arithmetic.cuh"
#include "device/warp_sums.cuh"

namespace lora_jax {

struct RmsNormArgs {
  const __nv_bfloat16* x;       // [rows, size]
  const __nv_bfloat16* addend;  // [rows, size] or null
  const __nv_bfloat16* weight;  // [size]
  __nv_bfloat16* sum;           // [rows, size] x + addend; null without an addend
  __nv_bfloat16* y;             // [rows, size]
  int rows, size;
  float eps;
};

constexpr int kNormWarps = 8;
constexpr int kNormPieces = 4;  // of 8 values that a thread holds at most

__device__ __forceinline__ void unpack(const uint4& piece, float (&v)[8]) {
  const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 two = bf16x2_floats(words[i]);
    v[i * 2] = two.x, v[i * 2 + 1] = two.y;
  }
}
__device__ __forceinline__ uint4 pack(const float (&v)[8]) {
  return make_uint4(bf16x2(v[0], v[1]), bf16x2(v[2], v[3]), bf16x2(v[4], v[5]), bf16x2(v[6], v[7]));
}
__device__ __forceinline__ uint4 load_piece(const __nv_bfloat16* p) { return __ldg(reinterpret_cast<const uint4*>(p)); }
__device__ __forceinline__ void store_piece(__nv_bfloat16* p, const uint4& piece) {
  *reinterpret_cast<uint4*>(p) = piece;
}

// WARPS share a row; a CTA has kNormWarps.
template <int WARPS>
__global__ void __launch_bounds__(kNormWarps * 32) rms_norm_kernel(const RmsNormArgs p) {
  __shared__ int room[kNormWarps];
  const int thread = static_cast<int>(threadIdx.x) % (WARPS * 32);
  const int row = static_cast<int>(blockIdx.x) * (kNormWarps / WARPS) + static_cast<int>(threadIdx.x) / (WARPS * 32);
  if (row >= p.rows) return;  // all of a warp; all of the CTA where warps meet
  const int64_t first = static_cast<int64_t>(row) * p.size;
  // All is asked for before anything is waited for: a row alone takes the memory's latency, not its bandwidth.
  uint4 own[kNormPieces], more[kNormPieces], scale[kNormPieces];
#pragma unroll
  for (int i = 0; i < kNormPieces; ++i) {
    const int column = (i * WARPS * 32 + thread) * 8;
    if (column >= p.size) continue;
    own[i] = load_piece(p.x + first + column), scale[i] = load_piece(p.weight + column);
    if (p.addend) more[i] = load_piece(p.addend + first + column);
  }
  float v[kNormPieces][8], squares = 0;
#pragma unroll
  for (int i = 0; i < kNormPieces; ++i) {
    const int column = (i * WARPS * 32 + thread) * 8;
    if (column >= p.size) continue;
    unpack(own[i], v[i]);
    if (p.addend) {
      float added[8];
      unpack(more[i], added);
#pragma unroll
      for (int e = 0; e < 8; ++e) v[i][e] += added[e];
      const uint4 rounded = pack(v[i]);
      store_piece(p.sum + first + column, rounded);
      unpack(rounded, v[i]);
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) squares = __fmaf_rn(v[i][e], v[i][e], squares);
  }
  squares = warp_sum(squares);
  if (WARPS > 1) {
    auto* parts = reinterpret_cast<float*>(room);
    if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5] = squares;
    __syncthreads();
    squares = parts[0];
#pragma unroll
    for (int w = 1; w < WARPS; ++w) squares += parts[w];
  }
  const float factor = rsqrtf(squares / static_cast<float>(p.size) + p.eps);
#pragma unroll
  for (int i = 0; i < kNormPieces; ++i) {
    const int column = (i * WARPS * 32 + thread) * 8;
    if (column >= p.size) continue;
    float weight[8];
    unpack(scale[i], weight);
#pragma unroll
    for (int e = 0; e < 8; ++e) v[i][e] = v[i][e] * factor * weight[e];
    store_piece(p.y + first + column, pack(v[i]));
  }
}

// `size` is a multiple of 8, and at most 8 * 32 * kNormWarps * kNormPieces.
inline cudaError_t launch_rms_norm(const RmsNormArgs& p, cudaStream_t stream) {
  const bool narrow = p.size <= 8 * 32 * kNormPieces;
  const auto kernel = narrow ? rms_norm_kernel<1> : rms_norm_kernel<kNormWarps>;
  const int rows = narrow ? kNormWarps : 1;  // of a CTA
  kernel<<<(p.rows + rows - 1) / rows, kNormWarps * 32, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace lora_jax
