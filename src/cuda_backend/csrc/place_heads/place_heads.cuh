// What lies between the projections and attention, in one pass: norms over heads of q and k if the model
// has them, rotary embedding of both, and k and v at their places in the pages.
//
// A warp takes a head of a token. Lane l holds pairs (i, i + half) from i = l * PAIRS on, so that a pair
// turns within the lane.
#pragma once
#include "device/warp_sums.cuh"

namespace lora_jax {

struct PlaceHeadsArgs {
  const __nv_bfloat16 *q, *k, *v;         // [tokens, q_heads or kv_heads, head_dim]
  const float *cos, *sin;                 // [tokens, head_dim / 2]
  const __nv_bfloat16 *q_scale, *k_scale;  // [head_dim] of the norms, or null
  const int* token_to_place;              // [tokens]; out of range: nowhere
  __nv_bfloat16* turned;                  // [tokens, q_heads, head_dim]
  __nv_bfloat16 *k_pages, *v_pages;       // [places, kv_heads, head_dim]
  int tokens, q_heads, kv_heads;
  int64_t places;
  float eps;
};

constexpr int kHeadWarps = 8;

template <int PAIRS>
struct alignas(PAIRS * 2) HeadPiece {
  __nv_bfloat16 v[PAIRS];
};
// This lane's share of a head of 64 * PAIRS columns.
template <int PAIRS>
struct HeadShare {
  float low[PAIRS], high[PAIRS];
  static constexpr int kHalf = 32 * PAIRS;
  __device__ __forceinline__ static int place() { return (static_cast<int>(threadIdx.x) & 31) * PAIRS; }
  __device__ __forceinline__ void load(const __nv_bfloat16* head) {
    const auto a = *reinterpret_cast<const HeadPiece<PAIRS>*>(head + place());
    const auto b = *reinterpret_cast<const HeadPiece<PAIRS>*>(head + kHalf + place());
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) low[i] = __bfloat162float(a.v[i]), high[i] = __bfloat162float(b.v[i]);
  }
  __device__ __forceinline__ void store(__nv_bfloat16* head) const {
    HeadPiece<PAIRS> a, b;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) a.v[i] = __float2bfloat16(low[i]), b.v[i] = __float2bfloat16(high[i]);
    *reinterpret_cast<HeadPiece<PAIRS>*>(head + place()) = a;
    *reinterpret_cast<HeadPiece<PAIRS>*>(head + kHalf + place()) = b;
  }
  // x / sqrt(mean(x^2) + eps) * scale, rounded.
  __device__ __forceinline__ void norm(const __nv_bfloat16* scale, float eps) {
    float squares = 0;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) squares = __fmaf_rn(high[i], high[i], __fmaf_rn(low[i], low[i], squares));
    const float factor = rsqrtf(warp_sum(squares) / static_cast<float>(2 * kHalf) + eps);
    HeadShare s;
    s.load(scale);
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      low[i] = __bfloat162float(__float2bfloat16(low[i] * factor * s.low[i]));
      high[i] = __bfloat162float(__float2bfloat16(high[i] * factor * s.high[i]));
    }
  }
  // Rounding is said, so that no addition is fused with a product here and not there.
  __device__ __forceinline__ void turn(const float* cos, const float* sin) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      const float c = __ldg(cos + place() + i), s = __ldg(sin + place() + i), first = low[i];
      low[i] = __fmaf_rn(first, c, -__fmul_rn(high[i], s));
      high[i] = __fmaf_rn(high[i], c, __fmul_rn(first, s));
    }
  }
};

template <int PAIRS>
__global__ void __launch_bounds__(kHeadWarps * 32) place_heads_kernel(const PlaceHeadsArgs p) {
  constexpr int kDim = 64 * PAIRS;
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kHeadWarps + (threadIdx.x >> 5);
  const int heads = p.q_heads + 2 * p.kv_heads, token = static_cast<int>(warp / heads);
  if (token >= p.tokens) return;
  int head = static_cast<int>(warp % heads);
  const int64_t angles = static_cast<int64_t>(token) * (kDim / 2);
  HeadShare<PAIRS> own;
  if (head < p.q_heads) {
    const int64_t at = (static_cast<int64_t>(token) * p.q_heads + head) * kDim;
    own.load(p.q + at);
    if (p.q_scale) own.norm(p.q_scale, p.eps);
    own.turn(p.cos + angles, p.sin + angles);
    own.store(p.turned + at);
    return;
  }
  const int place = __ldg(p.token_to_place + token);
  if (place < 0 || place >= p.places) return;
  head -= p.q_heads;
  const bool key = head < p.kv_heads;
  head -= key ? 0 : p.kv_heads;
  own.load((key ? p.k : p.v) + (static_cast<int64_t>(token) * p.kv_heads + head) * kDim);
  if (key) {
    if (p.k_scale) own.norm(p.k_scale, p.eps);
    own.turn(p.cos + angles, p.sin + angles);
  }
  own.store((key ? p.k_pages : p.v_pages) + (static_cast<int64_t>(place) * p.kv_heads + head) * kDim);
}

template <int PAIRS>
cudaError_t launch_head_pairs(const PlaceHeadsArgs& p, cudaStream_t stream) {
  const int64_t warps = static_cast<int64_t>(p.tokens) * (p.q_heads + 2 * p.kv_heads);
  const auto kernel = place_heads_kernel<PAIRS>;
  kernel<<<static_cast<unsigned>((warps + kHeadWarps - 1) / kHeadWarps), kHeadWarps * 32, 0, stream>>>(p);
  return cudaGetLastError();
}

inline cudaError_t launch_place_heads(const PlaceHeadsArgs& p, int head_dim, cudaStream_t stream) {
  switch (head_dim) {
    case 64: return launch_head_pairs<1>(p, stream);
    case 128: return launch_head_pairs<2>(p, stream);
    case 256: return launch_head_pairs<4>(p, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace lora_jax
