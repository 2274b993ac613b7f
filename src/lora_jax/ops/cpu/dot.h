// Dot products of rows with rows, both contiguous along K: the one inner loop of every GEMM here.
//
// out[r][c] = sum_k x[r][k] w[c][k] is computed as 16 lane sums along K (lane i takes k = i mod 16;
// pairs of k for bfloat16 dot instructions), then sum_lanes_8. K is padded with zeros to whole
// vectors. So the operations for one output never depend on the tile it is computed in.
#pragma once
#include "vector.h"

namespace lora_jax {

// Keeps a loaded vector in a register: GCC would load it again for each of its uses, and two loads
// a cycle are what bounds the loop.
template <class V>
inline void in_register(V& v) {
#if defined(__AVX512F__) && defined(__GNUC__)
  asm("" : "+v"(v));
#endif
}

// Tile of M rows by kCols columns of accumulators that fits the registers.
#ifdef __AVX512F__
constexpr int kRows = 3, kCols = 8;
#else
constexpr int kRows = 2, kCols = 2;
#endif

struct DotF32 {
  using T = float;
  using V = f32x16;
  static constexpr int kStep = 16, kLine = 64 / sizeof(T);  // elements
  static V load(const T* p) { return lora_jax::load(p); }
  static V load(const T* p, int64_t n) { return lora_jax::load(p, n); }
  static f32x16 fma(f32x16 acc, V x, V w) { return lora_jax::fma(x, w, acc); }
};

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
struct DotBF16 {
  using T = uint16_t;
  using V = __m512bh;
  static constexpr int kStep = 32, kLine = 64 / sizeof(T);
  static V load(const T* p) { return (V)_mm512_loadu_si512(p); }
  static V load(const T* p, int64_t n) {
    if (n >= kStep) return load(p);
    return (V)_mm512_maskz_loadu_epi16(__mmask32(first_bits(n)), p);
  }
  static f32x16 fma(f32x16 acc, V x, V w) { return (f32x16)_mm512_dpbf16_ps((__m512)acc, x, w); }
};
#else
struct DotBF16 {
  using T = uint16_t;
  using V = f32x16;
  static constexpr int kStep = 16, kLine = 64 / sizeof(T);  // elements
  static V load(const T* p) { return lora_jax::load(p); }
  static V load(const T* p, int64_t n) { return lora_jax::load(p, n); }
  static f32x16 fma(f32x16 acc, V x, V w) { return lora_jax::fma(x, w, acc); }
};
#endif

// acc[r * kCols + c] += lane products of x[r] and w[c] over elements [k0, k1). k0 is a multiple of
// the step, and so is k1 unless it is the end.
//
// With kFetch, what lies `fetch` elements beyond w is brought into L2 on the way.
template <class D, int M, bool kFetch = false>
inline void dot_rows(const typename D::T* const* x, const typename D::T* const* w, int64_t k0,
                     int64_t k1, f32x16* acc, int64_t fetch = 0) {
  f32x16 a[M][kCols];
  for (int r = 0; r < M; ++r)
    for (int c = 0; c < kCols; ++c) a[r][c] = acc[r * kCols + c];
  const typename D::T* wp[kCols];
  for (int c = 0; c < kCols; ++c) wp[c] = w[c];
  const typename D::T* xp[M];
  for (int r = 0; r < M; ++r) xp[r] = x[r];
  int64_t k = k0;
  for (; k + D::kStep <= k1; k += D::kStep) {
    typename D::V xv[M];
    for (int r = 0; r < M; ++r) xv[r] = D::load(xp[r] + k);
    for (int c = 0; c < kCols; ++c) {
      typename D::V wv = D::load(wp[c] + k);
      in_register(wv);
      if (kFetch) __builtin_prefetch(wp[c] + k + fetch, 0, 2);
      for (int r = 0; r < M; ++r) a[r][c] = D::fma(a[r][c], xv[r], wv);
    }
  }
  if (k < k1) {
    typename D::V xv[M];
    for (int r = 0; r < M; ++r) xv[r] = D::load(xp[r] + k, k1 - k);
    for (int c = 0; c < kCols; ++c) {
      typename D::V wv = D::load(wp[c] + k, k1 - k);
      for (int r = 0; r < M; ++r) a[r][c] = D::fma(a[r][c], xv[r], wv);
    }
  }
  for (int r = 0; r < M; ++r)
    for (int c = 0; c < kCols; ++c) acc[r * kCols + c] = a[r][c];
}

// out[i] = sum of the lanes of acc[i], i < M * kCols; acc is padded to a multiple of 8.
template <int M>
inline void sum_tile(const f32x16* acc, float* out) {
  for (int i = 0; i < M * kCols; i += 8) sum_lanes_8(acc + i, out + i);
}

constexpr int kTile = (kRows * kCols + 7) / 8 * 8;

// out[r * kCols + c] = x[r] . w[c] for m <= kRows rows and kCols columns.
template <class D>
inline void dot_tile(int64_t m, const typename D::T* const* x, const typename D::T* const* w,
                     int64_t k, float* out) {
  f32x16 acc[kTile] = {};
  switch (m) {
    case 1: dot_rows<D, 1>(x, w, 0, k, acc); return sum_tile<1>(acc, out);
    case 2: dot_rows<D, 2>(x, w, 0, k, acc); return sum_tile<2>(acc, out);
#ifdef __AVX512F__
    case 3: dot_rows<D, 3>(x, w, 0, k, acc); return sum_tile<3>(acc, out);
#endif
  }
}

}  // namespace lora_jax
