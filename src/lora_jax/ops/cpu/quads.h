// Rows of bfloat16 times columns of 4-bit codes with AVX-512 and its BF16, codes in the order of quads:
// of each 128 codes, word i of 32 has that of column 32 q + i in its bits from 4 q on, q < 4. The sums
// are those of dot.h.
//
// The words of 32 codes then take a shift and a look-up: a look-up reads the low bits of a word. On AMD
// Zen 5 shifts, look-ups and products run in different pipes of the core.
#pragma once
#include <algorithm>

#include "words.h"

namespace lora_jax {

constexpr int64_t kQuads = 128;            // codes that are reordered among themselves, in 64 bytes
constexpr int64_t kQuadRows = 8;           // of x at a time
constexpr int64_t kMostQuadRows = 32;      // more rows are faster by blocks of decoded weights
constexpr int64_t kQuadColumns = 24;       // whose sums wait together
constexpr int64_t kQuadGroups = 512;       // of a column, at most
constexpr int64_t kQuadsAhead = 16 << 10;  // bytes from codes that are multiplied to those fetched

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
constexpr bool kReadsQuads = true;

// Whether groups of this many codes, so many of them in a column, are multiplied in registers.
template <class D>
inline bool quads_serve(int64_t span, int64_t groups) {
  return kWordsFor<D> && groups <= kQuadGroups && (span == 32 || span == 64 || span % kQuads == 0);
}

// Writes the 32 weights of indices as rows are packed.
inline void put_words(const WordTable& table, __m512i index, uint16_t* out) {
  _mm512_storeu_si512(out, _mm512_permutexvar_epi16(index, table.twice));
}
inline void put_words(const FloatTable& table, __m512i index, float* out) {
  for (int half = 0; half < 2; ++half) {
    const __m256i words = half ? _mm512_extracti64x4_epi64(index, 1) : _mm512_castsi512_si256(index);
    // A look-up reads the low four bits of an index.
    store(out + half * kLanes, (f32s)_mm512_permutexvar_ps(_mm512_cvtepu16_epi32(words), table.values));
  }
}

// What `decode` of a CodedRows writes, of codes in quads.
template <class R, class X>
inline void decode_quads(const R& rows, int64_t row, int64_t k0, int64_t k1, X* out) {
  const uint8_t* const from = rows.from(row, 0);
  typename R::Tables at(rows, row);
  at.next(k0 / rows.span);
  for (int64_t k = k0, end = (k0 / rows.span + 1) * rows.span; k < k1; at.next(), end += rows.span) {
    const auto table = at.table(0);
    for (const int64_t stop = std::min(k1, end); k < stop; k += kWords, out += kWords) {
      const __m512i quad = _mm512_loadu_si512(from + k / kQuads * (kQuads / 2));
      const __m128i shift = _mm_cvtsi32_si128(int(k % kQuads / kWords * 4));
      put_words(table, _mm512_srl_epi16(quad, shift), out);
    }
  }
}

// Columns of a tile of M rows: a divisor of kQuadColumns, and sums that fit the registers.
template <int M>
constexpr int kTileColumns = M <= 2 ? 8 : M == 3 ? 6 : M <= 6 ? 4 : 3;

// Columns of codes as the loop reads them.
struct QuadColumns {
  const float* values;  // of the 16 codes
  const uint8_t* codes;
  const float *scales, *zeros;  // `groups` for each column; zeros may be null
  int64_t row_bytes, groups;
};

// acc[r * kQuadColumns + c] = lane products of x[r] and column c, r < M and c < C; kSteps of 32 codes
// share a scale, or all of a quad and more. One index serves codes and x. Codes are fetched in the order
// of their bytes: by columns the memory took up to a third longer.
template <int M, int C, int kSteps, bool kZeros>
__attribute__((noinline)) void dot_quads(const QuadColumns& w, const uint16_t* const* x, f32s* acc) {
  const int64_t groups = w.groups, row_bytes = w.row_bytes, span = row_bytes / groups;
  const float* scales = w.scales;
  const int64_t zeros = kZeros ? w.zeros - w.scales : 0;
  const uint8_t* codes[C];
  const char* xp[M];
  f32s a[M][C];
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) codes[c] = w.codes + c * row_bytes;
#pragma GCC unroll 8
  for (int r = 0; r < M; ++r) {
    xp[r] = (const char*)x[r];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) a[r][c] = f32s{};
  }
  __m512i tables[C];
  const __m512 values = _mm512_loadu_ps(w.values);
  const auto make_tables = [&] {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      __m512 all = values;
      if (kZeros) all = _mm512_sub_ps(all, _mm512_set1_ps(scales[c * groups + zeros]));
      all = _mm512_mul_ps(all, _mm512_set1_ps(scales[c * groups]));
      tables[c] = (__m512i)_mm512_cvtne2ps_pbh(all, all);
    }
    ++scales;
  };
  for (int64_t at = 0; at < row_bytes;) {
    if (kSteps == 4) make_tables();
    for (const int64_t end = at + std::max(span, kQuads / 2); at < end; at += kQuads / 2) {
      const uint8_t* const next = codes[0] + C * at + kQuadsAhead;
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) __builtin_prefetch(next + 64 * c, 0, M <= 2 ? 3 : 2);
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q) {
        if (kSteps < 4 && q % kSteps == 0) make_tables();
        __m512bh words[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
          const __m512i some = _mm512_srli_epi16(_mm512_loadu_si512(codes[c] + at), 4 * q);
          words[c] = (__m512bh)_mm512_permutexvar_epi16(some, tables[c]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < M; ++r) {
          __m512i xv = _mm512_loadu_si512(xp[r] + 4 * at + 64 * q);
          in_register(xv);
#pragma GCC unroll 8
          for (int c = 0; c < C; ++c)
            a[r][c] = (f32s)_mm512_dpbf16_ps((__m512)a[r][c], (__m512bh)xv, words[c]);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < M; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) acc[r * kQuadColumns + c] = a[r][c];
}

template <int M, int kSteps>
inline void dot_quads_of(const QuadColumns& w, const uint16_t* const* x, f32s* acc) {
  constexpr int C = kTileColumns<M>;
  w.zeros ? dot_quads<M, C, kSteps, true>(w, x, acc) : dot_quads<M, C, kSteps, false>(w, x, acc);
}

template <class T>
inline void to_floats(const T* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; ++i) {
    if constexpr (sizeof(T) == 2)
      to[i] = to_f32(from[i]);
    else
      to[i] = float(from[i]);
  }
}

// acc[r * kQuadColumns + c] = lane products of x[r] and column `row` + c, r < M and c < n,
// 8 <= n <= kQuadColumns. `rows` is a CodedRows.
template <int M, class R>
inline void dot_columns_in_quads(const R& rows, const uint16_t* const* x, int64_t row, int64_t n,
                                 f32s* acc) {
  constexpr int C = kTileColumns<M>;
  const int64_t groups = rows.d_in / rows.span;
  float scales[C * kQuadGroups], zeros[C * kQuadGroups];
  for (int64_t c = 0; c < n; c += C) {
    c = std::min(c, n - C);  // the last tile may have columns of the one before
    const int64_t first = (row + c) * groups;
    QuadColumns w{rows.values.of, rows.from(row + c, 0), scales, nullptr, rows.d_in / 2, groups};
    if (rows.scales.narrow)
      to_floats(static_cast<const uint16_t*>(rows.scales.data) + first, C * groups, scales);
    else
      w.scales = static_cast<const float*>(rows.scales.data) + first;
    if (rows.zeros) to_floats(rows.zeros + first, C * groups, zeros), w.zeros = zeros;
    switch (rows.span) {
      case 32: dot_quads_of<M, 1>(w, x, acc + c); break;
      case 64: dot_quads_of<M, 2>(w, x, acc + c); break;
      default: dot_quads_of<M, 4>(w, x, acc + c);
    }
  }
}

template <class R>
inline void dot_in_quads(const R& rows, int64_t m, const uint16_t* const* x, int64_t row, int64_t n,
                         f32s* acc) {
  switch (m) {
    case 1: return dot_columns_in_quads<1>(rows, x, row, n, acc);
    case 2: return dot_columns_in_quads<2>(rows, x, row, n, acc);
    case 3: return dot_columns_in_quads<3>(rows, x, row, n, acc);
    case 4: return dot_columns_in_quads<4>(rows, x, row, n, acc);
    case 5: return dot_columns_in_quads<5>(rows, x, row, n, acc);
    case 6: return dot_columns_in_quads<6>(rows, x, row, n, acc);
    case 7: return dot_columns_in_quads<7>(rows, x, row, n, acc);
    case 8: return dot_columns_in_quads<8>(rows, x, row, n, acc);
  }
}

#else
constexpr bool kReadsQuads = false;

template <class D>
inline bool quads_serve(int64_t, int64_t) {
  return false;
}
#endif

}  // namespace lora_jax
