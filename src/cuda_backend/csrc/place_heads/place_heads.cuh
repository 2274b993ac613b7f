// All work between the projections and attention in one pass: norms over heads of q and k if the model has
// them, rotary embedding of both, and the writes of k and v into the pages.
//
// A warp takes a head of a token, or of many tokens two neighbouring ones, and asks for both before it waits for either:
// few tokens take the latency of one head, many the memory's bandwidth. Lane l holds pairs (i, i + half) of a head from
// i = l * PAIRS on, so that a pair turns within the lane.
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
  __device__ __forceinline__ void turn(const float (&cos)[PAIRS], const float (&sin)[PAIRS]) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      const float first = low[i];
      low[i] = __fmaf_rn(first, cos[i], -__fmul_rn(high[i], sin[i]));
      high[i] = __fmaf_rn(high[i], cos[i], __fmul_rn(first, sin[i]));
    }
  }
};

// Where a head comes from and goes to; the norm's scale, if it has one; whether it turns, as v does not.
struct HeadPlaces {
  const __nv_bfloat16 *from, *scale;
  __nv_bfloat16* to;  // null: nowhere
  bool turns;
};
__device__ __forceinline__ HeadPlaces places_of(const PlaceHeadsArgs& p, int token, int head, int place, int dim) {
  if (head < p.q_heads) {
    const int64_t at = (static_cast<int64_t>(token) * p.q_heads + head) * dim;
    return {p.q + at, p.q_scale, p.turned + at, true};
  }
  head -= p.q_heads;
  const bool key = head < p.kv_heads, there = place >= 0 && place < p.places && head < 2 * p.kv_heads;
  head -= key ? 0 : p.kv_heads;
  const int64_t at = (static_cast<int64_t>(token) * p.kv_heads + head) * dim;
  const int64_t to = (static_cast<int64_t>(place) * p.kv_heads + head) * dim;
  return {(key ? p.k : p.v) + at, key ? p.k_scale : nullptr, there ? (key ? p.k_pages : p.v_pages) + to : nullptr, key};
}

constexpr int kManyHeadTokens = 256;  // from here on a warp takes two heads
template <int HEADS>
__host__ __device__ int head_groups(const PlaceHeadsArgs& p) {
  return (p.q_heads + 2 * p.kv_heads + HEADS - 1) / HEADS;
}

// HEADS: of a warp.
template <int PAIRS, int HEADS>
__global__ void __launch_bounds__(kHeadWarps * 32) place_heads_kernel(const PlaceHeadsArgs p) {
  constexpr int kDim = 64 * PAIRS;
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kHeadWarps + (threadIdx.x >> 5);
  const int groups = head_groups<HEADS>(p), token = static_cast<int>(warp / groups);
  if (token >= p.tokens) return;
  const int head = static_cast<int>(warp % groups) * HEADS, place = __ldg(p.token_to_place + token);
  HeadPlaces places[HEADS];
  HeadShare<PAIRS> own[HEADS];
#pragma unroll
  for (int i = 0; i < HEADS; ++i) {
    places[i] = places_of(p, token, head + i, place, kDim);
    if (places[i].to) own[i].load(places[i].from);
  }
  float cos[PAIRS], sin[PAIRS];
  const int64_t angles = static_cast<int64_t>(token) * (kDim / 2) + HeadShare<PAIRS>::place();
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) cos[i] = __ldg(p.cos + angles + i), sin[i] = __ldg(p.sin + angles + i);
#pragma unroll
  for (int i = 0; i < HEADS; ++i) {
    if (!places[i].to) continue;  // all of the warp
    if (places[i].scale) own[i].norm(places[i].scale, p.eps);
    if (places[i].turns) own[i].turn(cos, sin);
    own[i].store(places[i].to);
  }
}

template <int PAIRS, int HEADS>
cudaError_t launch_heads_by(const PlaceHeadsArgs& p, cudaStream_t stream) {
  const int64_t warps = static_cast<int64_t>(p.tokens) * head_groups<HEADS>(p);
  const auto kernel = place_heads_kernel<PAIRS, HEADS>;
  kernel<<<static_cast<unsigned>((warps + kHeadWarps - 1) / kHeadWarps), kHeadWarps * 32, 0, stream>>>(p);
  return cudaGetLastError();
}
template <int PAIRS>
cudaError_t launch_head_pairs(const PlaceHeadsArgs& p, cudaStream_t stream) {
  return p.tokens < kManyHeadTokens ? launch_heads_by<PAIRS, 1>(p, stream) : launch_heads_by<PAIRS, 2>(p, stream);
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
