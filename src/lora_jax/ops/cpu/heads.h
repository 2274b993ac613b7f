// Turns heads of q and k by their tokens' angles in float32, and writes k and v into pages.
#pragma once
#include "parallel.h"
#include "vector.h"

namespace lora_jax {

template <class T>
struct PlaceHeads {
  const T *q, *k, *v;
  const float *cos, *sin;  // [tokens, k_dim / 2]
  const int32_t* places;   // a token's row in the pages; outside of them it has none
  T *out, *k_pages, *v_pages;
  int64_t tokens, q_heads, kv_heads, k_dim, v_dim, page_rows;
};

constexpr int64_t kPlacedTokens = 8;  // of a piece

// Pairs (i, i + half) of one head.
template <class T>
inline void turn(const T* head, const float* cos, const float* sin, int64_t half, T* out) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t n = half - i < kLanes ? half - i : kLanes;
    const f32s first = load(head + i, n), second = load(head + half + i, n);
    const f32s c = load(cos + i, n), s = load(sin + i, n);
    store(out + i, fma(first, c, -(second * s)), n);
    store(out + half + i, fma(second, c, first * s), n);
  }
}

template <class T>
inline void place_token(const PlaceHeads<T>& g, int64_t token) {
  const int64_t half = g.k_dim / 2;
  const float *cos = g.cos + token * half, *sin = g.sin + token * half;
  for (int64_t h = token * g.q_heads; h < (token + 1) * g.q_heads; ++h)
    turn(g.q + h * g.k_dim, cos, sin, half, g.out + h * g.k_dim);
  const int64_t place = g.places[token];
  if (place < 0 || place >= g.page_rows) return;
  for (int64_t h = 0; h < g.kv_heads; ++h)
    turn(g.k + (token * g.kv_heads + h) * g.k_dim, cos, sin, half,
         g.k_pages + (place * g.kv_heads + h) * g.k_dim);
  const int64_t width = g.kv_heads * g.v_dim;
  std::memcpy(g.v_pages + place * width, g.v + token * width, width * sizeof(T));
}

// No two tokens have one place.
template <class T>
void run_place_heads(xla::ffi::ThreadPool& pool, const PlaceHeads<T>& g) {
  double work = double(g.tokens) * (g.q_heads + g.kv_heads) * g.k_dim;
  parallel_for(pool, (g.tokens + kPlacedTokens - 1) / kPlacedTokens, work / 4e3, [&](int64_t i) {
    int64_t end = std::min(g.tokens, (i + 1) * kPlacedTokens);
    for (int64_t token = i * kPlacedTokens; token < end; ++token) place_token(g, token);
  });
}

}  // namespace lora_jax
