// Weights of 4 and 8 bits, decoded a block of rows at a time into the type that the dot products
// read. A decoded weight has the bits of the plain array that the quantised one stands for, and the
// sums are those of dot.h: so are the results.
#pragma once
#include <algorithm>

#include "dot.h"
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace lora_jax {

constexpr int64_t kCodeStep = 32;   // codes decoded at a time: 16 bytes
constexpr int64_t kValueStep = 16;  // bytes of 8-bit weights decoded at a time

// Rows of matrices that are not plain. Row n of matrix g is row g * d_out + n.
template <class T>
struct DecodedRows {
  double bytes;  // of a weight, in the estimate of time: decoding counts too
  explicit DecodedRows(double b) : bytes(b) {}
  // out[0, k1 - k0) = w[row][k0, k1), k0 a multiple of kCodeStep; the rest of a step may follow.
  virtual void decode(int64_t row, int64_t k0, int64_t k1, T* out) const = 0;
};

// Finite floats as bfloat16, rounded to the nearest, halves to even.
#if defined(__AVX512BF16__) && defined(__AVX512VL__)
inline __m256i narrow(__m512 v) { return (__m256i)_mm512_cvtneps_pbh(v); }
#elif defined(__AVX512F__)
inline __m256i narrow(__m512 v) { return (__m256i)round_bf16((f32s)v); }
#elif defined(__AVX2__)
inline __m256i rounded_up(__m256 v) {
  __m256i bits = _mm256_castps_si256(v);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  bits = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  return _mm256_srli_epi32(bits, 16);
}
inline __m256i narrow(__m256 first, __m256 second) {
  __m256i both = _mm256_packus_epi32(rounded_up(first), rounded_up(second));
  return _mm256_permute4x64_epi64(both, 0xd8);
}
#endif
inline float narrow(float, float v) { return v; }
inline uint16_t narrow(uint16_t, float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// The 16 values (table[i] - zero) * scale of a group, as the dot products read them. `decode` looks
// up the 32 codes of 16 bytes, low halves first.
template <class T>
struct GroupTable {
  T values[16];
  GroupTable(const float* table, float zero, float scale) {
    for (int i = 0; i < 16; ++i) values[i] = narrow(T(), (table[i] - zero) * scale);
  }
  void decode(const uint8_t* codes, T* out) const {
    for (int i = 0; i < kCodeStep / 2; ++i) {
      out[2 * i] = values[codes[i] & 15];
      out[2 * i + 1] = values[codes[i] >> 4];
    }
  }
};

#ifdef __AVX512BW__
inline __m512 group_values(const float* table, float zero, float scale) {
  __m512 all = _mm512_sub_ps(_mm512_loadu_ps(table), _mm512_set1_ps(zero));
  return _mm512_mul_ps(all, _mm512_set1_ps(scale));
}
template <>
struct GroupTable<uint16_t> {
  __m512i twice;  // all values, two times
  GroupTable(const float* table, float zero, float scale)
      : twice(_mm512_broadcast_i64x4(narrow(group_values(table, zero, scale)))) {}
  void decode(const uint8_t* codes, uint16_t* out) const {
    __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)codes));
    // The low word of a lane has the first code in its low bits, the high word the second. Bit 4 of
    // an index may be set by a neighbour: both halves of the table are equal.
    __m512i index = _mm512_or_si512(wide, _mm512_slli_epi32(wide, 12));
    _mm512_storeu_si512(out, _mm512_permutexvar_epi16(index, twice));
  }
};
template <>
struct GroupTable<float> {
  __m512 values;
  GroupTable(const float* table, float zero, float scale)
      : values(group_values(table, zero, scale)) {}
  void decode(const uint8_t* codes, float* out) const {
    const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)codes));
    // A lookup reads the low four bits of an index.
    __m512 even = _mm512_permutexvar_ps(wide, values);
    __m512 odd = _mm512_permutexvar_ps(_mm512_srli_epi32(wide, 4), values);
    _mm512_storeu_ps(out, _mm512_permutex2var_ps(even, first, odd));
    _mm512_storeu_ps(out + kLanes, _mm512_permutex2var_ps(even, second, odd));
  }
};
#elif defined(__AVX2__)
template <>
struct GroupTable<uint16_t> {
  __m256i low, high;  // bytes of the 16 values by significance, two times
  GroupTable(const float* table, float zero, float scale) {
    __m256 z = _mm256_set1_ps(zero), s = _mm256_set1_ps(scale);
    __m256 first = _mm256_mul_ps(_mm256_sub_ps(_mm256_loadu_ps(table), z), s);
    __m256 second = _mm256_mul_ps(_mm256_sub_ps(_mm256_loadu_ps(table + 8), z), s);
    __m256i words = narrow(first, second), byte = _mm256_set1_epi16(0xff);
    __m256i lows = _mm256_and_si256(words, byte), highs = _mm256_srli_epi16(words, 8);
    __m256i bytes = _mm256_packus_epi16(lows, highs);  // by halves of the registers: l h l h
    low = _mm256_permute4x64_epi64(bytes, 0x88);
    high = _mm256_permute4x64_epi64(bytes, 0xdd);
  }
  void decode(const uint8_t* codes, uint16_t* out) const {
    // A byte in 16 bits, beside itself moved by a code: both codes have bytes of their own.
    __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)codes));
    __m256i both = _mm256_or_si256(wide, _mm256_slli_epi16(wide, 4));
    __m256i index = _mm256_and_si256(both, _mm256_set1_epi8(15));
    __m256i l = _mm256_shuffle_epi8(low, index), h = _mm256_shuffle_epi8(high, index);
    __m256i a = _mm256_unpacklo_epi8(l, h), b = _mm256_unpackhi_epi8(l, h);
    _mm256_storeu_si256((__m256i*)out, _mm256_permute2x128_si256(a, b, 0x20));
    _mm256_storeu_si256((__m256i*)(out + 16), _mm256_permute2x128_si256(a, b, 0x31));
  }
};
#endif

// A scale: float32, or bfloat16 where `narrow`.
struct Scales {
  const void* data;
  bool narrow;
  float operator[](int64_t i) const {
    return narrow ? to_f32(static_cast<const uint16_t*>(data)[i])
                  : static_cast<const float*>(data)[i];
  }
};

// w[n][k] = (table[code] - zero) * scale, zero and scale of the row's group of `group` weights.
template <class T>
struct CodedRows : DecodedRows<T> {
  const uint8_t* codes;
  Scales scales;
  const uint8_t* zeros;  // may be null
  const float* table;
  int64_t d_in, group;  // weights of a group: a multiple of kCodeStep

  CodedRows() : DecodedRows<T>(0.8) {}

  void decode(int64_t row, int64_t k0, int64_t k1, T* out) const override {
    const uint8_t* from = codes + row * (d_in / 2);
    int64_t g = k0 / group, end = (g + 1) * group, at = row * (d_in / group) + g;
    for (int64_t k = k0; k < k1; end += group, ++at) {
      GroupTable<T> values(table, zeros ? float(zeros[at]) : 0.0f, scales[at]);
      for (int64_t stop = std::min(k1, end); k < stop; k += kCodeStep)
        values.decode(from + k / 2, out + (k - k0));
    }
  }
};

// out[0, 16) = scale times the e4m3 values of 16 bytes, none of them NaN.
#ifdef __AVX2__  // and F16C, which is older
// As float16 the same bits, moved, are the value times 2^-8; the product is rounded once.
inline __m256i e4m3_as_f16(const uint8_t* p) {
  __m256i wide = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)), 8);
  return _mm256_and_si256(_mm256_srai_epi16(wide, 1), _mm256_set1_epi16(int16_t(0xbfff)));
}
#ifdef __AVX512F__
inline void scale_e4m3(const uint8_t* p, float scale, __m512* out) {
  *out = _mm512_mul_ps(_mm512_cvtph_ps(e4m3_as_f16(p)), _mm512_set1_ps(scale * 256));
}
inline void scale_e4m3(const uint8_t* p, float scale, float* out) {
  __m512 v;
  scale_e4m3(p, scale, &v);
  _mm512_storeu_ps(out, v);
}
inline void scale_e4m3(const uint8_t* p, float scale, uint16_t* out) {
  __m512 v;
  scale_e4m3(p, scale, &v);
  _mm256_storeu_si256((__m256i*)out, narrow(v));
}
#else
inline void scale_e4m3(const uint8_t* p, float scale, __m256* out) {
  __m256i half = e4m3_as_f16(p);
  __m256 s = _mm256_set1_ps(scale * 256);
  out[0] = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(half)), s);
  out[1] = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1)), s);
}
inline void scale_e4m3(const uint8_t* p, float scale, float* out) {
  __m256 v[2];
  scale_e4m3(p, scale, v);
  _mm256_storeu_ps(out, v[0]);
  _mm256_storeu_ps(out + 8, v[1]);
}
inline void scale_e4m3(const uint8_t* p, float scale, uint16_t* out) {
  __m256 v[2];
  scale_e4m3(p, scale, v);
  _mm256_storeu_si256((__m256i*)out, narrow(v[0], v[1]));
}
#endif
#else
inline float e4m3(uint8_t code) {
  uint32_t bits = (uint32_t(code & 0x7f) << 20) + (120u << 23);
  float v;
  std::memcpy(&v, &bits, 4);
  // Exponent 0 has no leading 1: m * 2^-9 is twice what the bits say, less 2^-6.
  if ((code & 0x78) == 0) v = v + v - 0.015625f;
  return code & 0x80 ? -v : v;
}
template <class T>
inline void scale_e4m3(const uint8_t* p, float scale, T* out) {
  for (int i = 0; i < kValueStep; ++i) out[i] = narrow(T(), e4m3(p[i]) * scale);
}
#endif

// w[n][k] = value * scale of the block of rows x columns that it lies in. d_in is a multiple of
// kValueStep, and so are blocks of columns that are not all columns.
template <class T>
struct ScaledRows : DecodedRows<T> {
  const uint8_t* values;
  const float* scales;
  int64_t d_out, d_in, block_rows, block_cols;

  ScaledRows() : DecodedRows<T>(1.2) {}

  void decode(int64_t row, int64_t k0, int64_t k1, T* out) const override {
    int64_t down = (d_out + block_rows - 1) / block_rows;
    int64_t across = (d_in + block_cols - 1) / block_cols;
    const float* own = scales + (row / d_out * down + row % d_out / block_rows) * across;
    const uint8_t* from = values + row * d_in;
    int64_t b = k0 / block_cols, end = (b + 1) * block_cols;
    for (int64_t k = k0; k < k1; end += block_cols, ++b) {
      float scale = own[b];
      for (int64_t stop = std::min(k1, end); k < stop; k += kValueStep)
        scale_e4m3(from + k, scale, out + (k - k0));
    }
  }
};

}  // namespace lora_jax
