// Dot products of rows with rows, both contiguous along K: the one inner loop of every GEMM here.
//
// out[r][c] = sum_k x[r][k] w[c][k] is computed as kLanes sums along K, then sum_lanes_8. In float32
// lane i takes k = i mod kLanes; bfloat16 weights are read two vectors at a time, whose lane i takes
// k = 2 i, then 2 i + 1. K is padded with zeros to whole steps. So the operations for one output never
// depend on the tile it is computed in.
#pragma once
#include <memory>
#include <new>
#include <type_traits>

#include "vector.h"

namespace lora_jax {

// Keeps a loaded vector in a register: GCC would load it again for each of its uses, and two loads
// a cycle are what bounds the loop.
template <class V>
inline void in_register(V& v) {
#if defined(__AVX512F__) && defined(__GNUC__)
  asm("" : "+v"(v));
#elif defined(__AVX__) && defined(__GNUC__)
  asm("" : "+x"(v));
#endif
}

// Tile of M rows by kCols columns of accumulators that fits the registers; kCols <= kLanes.
#ifdef __AVX512F__
constexpr int kRows = 3, kCols = 8;
#else
constexpr int kRows = 3, kCols = 4;
#endif

// What the loop reads: weights are of T, rows of X, which `pack` makes where it is not T. A step of
// kStep elements is kParts vectors of products.
struct DotF32 {
  using T = float;
  using X = float;
  using V = f32s;
  static constexpr int kStep = kLanes, kParts = 1, kLine = 64 / sizeof(T);  // elements
  static V load_x(const X* p, int) { return lora_jax::load(p); }
  static V load_x(const X* p, int, int64_t n) { return lora_jax::load(p, n); }
  static V load_w(const T* p, int) { return lora_jax::load(p); }
  static V load_w(const T* p, int, int64_t n) { return lora_jax::load(p, n); }
  static f32s fma(f32s acc, V x, V w) { return lora_jax::fma(x, w, acc); }
};

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
struct DotBF16 {
  using T = uint16_t;
  using X = uint16_t;
  using V = __m512bh;
  static constexpr int kStep = 32, kParts = 1, kLine = 64 / sizeof(T);
  static V load_w(const T* p, int) { return (V)_mm512_loadu_si512(p); }
  static V load_w(const T* p, int, int64_t n) {
    if (n >= kStep) return load_w(p, 0);
    return (V)_mm512_maskz_loadu_epi16(__mmask32(first_bits(n)), p);
  }
  static V load_x(const X* p, int) { return load_w(p, 0); }
  static V load_x(const X* p, int, int64_t n) { return load_w(p, 0, n); }
  static f32s fma(f32s acc, V x, V w) { return (f32s)_mm512_dpbf16_ps((__m512)acc, x, w); }
};
#else
// A pair of bfloat16 weights is 32 bits: shifted or masked each half is a float. Rows are packed to
// floats in that order.
struct DotBF16 {
  using T = uint16_t;
  using X = float;
  using V = f32s;
  static constexpr int kStep = 2 * kLanes, kParts = 2, kLine = 64 / sizeof(T);
  static V load_x(const X* p, int part) { return lora_jax::load(p + part * kLanes); }
  static V load_x(const X* p, int part, int64_t) { return load_x(p, part); }
  static V load_w(const T* p, int part) {
    u32s pairs;
    std::memcpy(&pairs, p, sizeof(pairs));
    return (V)(part ? pairs & 0xffff0000u : pairs << 16);
  }
  static V load_w(const T* p, int part, int64_t n) {
    if (n >= kStep) return load_w(p, part);
    T buffer[kStep] = {};
    std::memcpy(buffer, p, n * sizeof(T));
    return load_w(buffer, part);
  }
  static f32s fma(f32s acc, V x, V w) { return lora_jax::fma(x, w, acc); }
  static void pack(const T* row, int64_t k, X* out) {
    for (int64_t first = 0; first < k; first += kStep)
      for (int part = 0; part < kParts; ++part, out += kLanes)
        store(out, load_w(row + first, part, k - first));
  }
};
#endif

// Rows as the loop reads them.
template <class D>
class PackedRows {
 public:
  static constexpr bool kCopies = !std::is_same_v<typename D::T, typename D::X>;
  using Row = const typename D::X*;

  // Room for this many rows of k elements, each at the start of a cache line. A line between them
  // keeps rows of a power of two from sharing their places in L1.
  PackedRows(int64_t rows, int64_t k) : k_(k) {
    constexpr int64_t kLine = 64 / sizeof(typename D::X);
    stride_ = (k + D::kStep - 1) / D::kStep * D::kStep;
    stride_ = (stride_ + kLine - 1) / kLine * kLine + kLine;
    if (kCopies) room_.reset(new (std::align_val_t(64)) typename D::X[rows * stride_]);
  }
  // Where row i can be read, `row` being its elements; the caller names each i once.
  Row add(int64_t i, const typename D::T* row) {
    if constexpr (kCopies) {
      D::pack(row, k_, room_.get() + i * stride_);
      return room_.get() + i * stride_;
    } else {
      return row;
    }
  }

 private:
  struct Free {
    void operator()(typename D::X* p) const { ::operator delete[](p, std::align_val_t(64)); }
  };
  int64_t k_, stride_;
  std::unique_ptr<typename D::X[], Free> room_;
};

// The rest of a step in dot_rows, n < kStep elements.
template <class D, int M>
__attribute__((noinline)) void dot_rest(const typename D::X* const* x,
                                        const typename D::T* const* w, int64_t n, f32s* acc) {
  for (int part = 0; part < D::kParts; ++part)
    for (int c = 0; c < kCols; ++c) {
      const typename D::V wv = D::load_w(w[c], part, n);
      for (int r = 0; r < M; ++r) {
        f32s& sum = acc[r * kCols + c];
        sum = D::fma(sum, D::load_x(x[r], part, n), wv);
      }
    }
}

// Whether dot_rows leaves the rest of a step to dot_rest. With the rest in the same function GCC 12
// moves the sums of the loop over floats to memory and back. With AVX2 bfloat16 took up to 1.26 of
// its time so, and no other CPU was measured.
template <class D>
constexpr bool kRestApart = kLanes == 8 && std::is_same_v<typename D::T, float>;

// acc[r * kCols + c] += lane products of x[r] and w[c] over elements [k0, k1); with kFresh the sums
// begin. k0 is a multiple of the step, and so is k1 unless it is the end.
//
// With kFetch, what lies `fetch` elements beyond w is brought into L2 on the way: in the order of its
// bytes for few rows with AVX-512, where columns follow each other and a step is a line. On AMD Zen 5
// one row of bfloat16 took 0.7 to 0.9 of its time so, and no other CPU was measured. In a function of its
// own whose loops are unrolled early GCC 12 copies no sums through memory before and after the loop.
template <class D, int M, bool kFetch = false, bool kFresh = false>
__attribute__((noinline)) void dot_rows(const typename D::X* const* x,
                                        const typename D::T* const* w, int64_t k0, int64_t k1,
                                        f32s* acc, int64_t fetch = 0) {
  f32s a[M][kCols];
  constexpr bool kInOrder = M <= 2 && D::kStep == D::kLine && kLanes == 16;
  const typename D::T* wp[kCols];
  const typename D::X* xp[M];
#pragma GCC unroll 3
  for (int r = 0; r < M; ++r) {
    xp[r] = x[r];
#pragma GCC unroll 8
    for (int c = 0; c < kCols; ++c) a[r][c] = kFresh ? f32s{} : acc[r * kCols + c];
  }
#pragma GCC unroll 8
  for (int c = 0; c < kCols; ++c) wp[c] = w[c];
  int64_t k = k0;
  for (; k + D::kStep <= k1; k += D::kStep)
#pragma GCC unroll 2
    for (int part = 0; part < D::kParts; ++part) {
      typename D::V xv[M];
#pragma GCC unroll 3
      for (int r = 0; r < M; ++r) xv[r] = D::load_x(xp[r] + k, part);
#pragma GCC unroll 8
      for (int c = 0; c < kCols; ++c) {
        typename D::V wv = D::load_w(wp[c] + k, part);
        in_register(wv);
        if (kFetch && part == 0)
          __builtin_prefetch(kInOrder ? wp[0] + fetch + kCols * k + c * D::kLine : wp[c] + k + fetch, 0, 2);
#pragma GCC unroll 3
        for (int r = 0; r < M; ++r) a[r][c] = D::fma(a[r][c], xv[r], wv);
      }
    }
  if (!kRestApart<D> && k < k1)
    for (int part = 0; part < D::kParts; ++part) {
      typename D::V xv[M];
#pragma GCC unroll 3
      for (int r = 0; r < M; ++r) xv[r] = D::load_x(xp[r] + k, part, k1 - k);
#pragma GCC unroll 8
      for (int c = 0; c < kCols; ++c) {
        typename D::V wv = D::load_w(wp[c] + k, part, k1 - k);
#pragma GCC unroll 3
        for (int r = 0; r < M; ++r) a[r][c] = D::fma(a[r][c], xv[r], wv);
      }
    }
#pragma GCC unroll 3
  for (int r = 0; r < M; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < kCols; ++c) acc[r * kCols + c] = a[r][c];
  if (kRestApart<D> && k < k1) {
    for (int c = 0; c < kCols; ++c) wp[c] += k;
    for (int r = 0; r < M; ++r) xp[r] += k;
    dot_rest<D, M>(xp, wp, k1 - k, acc);
  }
}

constexpr int kTile = (kRows * kCols + 7) / 8 * 8;

// out[i] = sum of the lanes of acc[i], i < M * kCols; both have room for kTile.
template <int M>
inline void sum_tile(const f32s* acc, float* out) {
  for (int i = 0; i < M * kCols; i += 8) sum_lanes_8(acc + i, out + i);
}

// out[r * kCols + c] = x[r] . w[c] for m <= kRows rows and kCols columns.
template <class D>
inline void dot_tile(int64_t m, const typename D::X* const* x, const typename D::T* const* w,
                     int64_t k, float* out) {
  f32s acc[kTile];
  switch (m) {
    case 1: dot_rows<D, 1, false, true>(x, w, 0, k, acc); return sum_tile<1>(acc, out);
    case 2: dot_rows<D, 2, false, true>(x, w, 0, k, acc); return sum_tile<2>(acc, out);
    case 3: dot_rows<D, 3, false, true>(x, w, 0, k, acc); return sum_tile<3>(acc, out);
  }
}

}  // namespace lora_jax
