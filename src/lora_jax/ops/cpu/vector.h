// Sixteen-lane float vectors in GCC vector extensions: any CPU compiles them, AVX512 runs them
// whole. Every function has one order of operations, whatever the data around it.
#pragma once
#include <cstdint>
#include <cstring>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace lora_jax {

constexpr int kLanes = 16;
typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef int8_t i8x16 __attribute__((vector_size(16)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

inline f32x16 splat(float v) { return v - f32x16{}; }

inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#ifdef __AVX512F__
  return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return a * b + c;
#endif
}

inline f32x16 vmax(f32x16 a, f32x16 b) { return a > b ? a : b; }

// bfloat16 is the upper half of a float.
inline float to_f32(uint16_t v) {
  uint32_t bits = uint32_t(v) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
inline float to_f32(float v) { return v; }

inline u16x16 round_bf16(f32x16 v) {
  u32x16 bits = (u32x16)v;
  u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  u32x16 quiet_nan = (bits >> 16) | 0x40;
  return __builtin_convertvector(v == v ? rounded : quiet_nan, u16x16);
}

// Loads and stores of n <= 16 elements; lanes at or after n are zero and are not touched in memory.
inline f32x16 load(const float* p) {
  f32x16 v;
  std::memcpy(&v, p, 64);
  return v;
}
inline f32x16 load(const uint16_t* p) {
  u16x16 v;
  std::memcpy(&v, p, 32);
  return (f32x16)(__builtin_convertvector(v, u32x16) << 16);
}
inline f32x16 load(const int8_t* p) {
  i8x16 v;
  std::memcpy(&v, p, 16);
  return __builtin_convertvector(v, f32x16);
}
inline f32x16 load(const int8_t* p, int64_t n) {
  if (n >= kLanes) return load(p);
  int8_t buffer[kLanes] = {};
  std::memcpy(buffer, p, n);
  return load(buffer);
}
#if defined(__AVX512BW__) && defined(__AVX512VL__)
inline uint32_t first_bits(int64_t n) { return uint32_t((uint64_t(1) << n) - 1); }
inline f32x16 load(const float* p, int64_t n) {
  return n >= kLanes ? load(p) : (f32x16)_mm512_maskz_loadu_ps(__mmask16(first_bits(n)), p);
}
inline f32x16 load(const uint16_t* p, int64_t n) {
  if (n >= kLanes) return load(p);
  u16x16 v = (u16x16)_mm256_maskz_loadu_epi16(__mmask16(first_bits(n)), p);
  return (f32x16)(__builtin_convertvector(v, u32x16) << 16);
}
#else
template <class T>
inline f32x16 load(const T* p, int64_t n) {
  if (n >= kLanes) return load(p);
  T buffer[kLanes] = {};
  std::memcpy(buffer, p, n * sizeof(T));
  return load(buffer);
}
#endif
inline void store(float* p, f32x16 v) { std::memcpy(p, &v, 64); }
inline void store(uint16_t* p, f32x16 v) {
  u16x16 r = round_bf16(v);
  std::memcpy(p, &r, 32);
}
#if defined(__AVX512BW__) && defined(__AVX512VL__)
inline void store(float* p, f32x16 v, int64_t n) {
  if (n >= kLanes) return store(p, v);
  _mm512_mask_storeu_ps(p, __mmask16(first_bits(n)), (__m512)v);
}
inline void store(uint16_t* p, f32x16 v, int64_t n) {
  if (n >= kLanes) return store(p, v);
  _mm256_mask_storeu_epi16(p, __mmask16(first_bits(n)), (__m256i)round_bf16(v));
}
#else
template <class T>
inline void store(T* p, f32x16 v, int64_t n) {
  if (n >= kLanes) return store(p, v);
  T buffer[kLanes];
  store(buffer, v);
  std::memcpy(p, buffer, n * sizeof(T));
}
#endif

// Sums the lanes of eight vectors: out[i] = sum of v[i]. Lanes meet as i + 8, i + 4, i + 2, i + 1,
// each sum in the same order whichever of the eight it is.
inline void sum_lanes_8(const f32x16* v, float* out) {
  f32x16 a[4], b[2];
  for (int i = 0; i < 4; ++i)
    a[i] = __builtin_shufflevector(v[2 * i], v[2 * i + 1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19,
                                   20, 21, 22, 23) +
           __builtin_shufflevector(v[2 * i], v[2 * i + 1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26,
                                   27, 28, 29, 30, 31);
  for (int i = 0; i < 2; ++i)
    b[i] = __builtin_shufflevector(a[2 * i], a[2 * i + 1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19,
                                   24, 25, 26, 27) +
           __builtin_shufflevector(a[2 * i], a[2 * i + 1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22,
                                   23, 28, 29, 30, 31);
  f32x16 c = __builtin_shufflevector(b[0], b[1], 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25,
                                     28, 29) +
             __builtin_shufflevector(b[0], b[1], 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27,
                                     30, 31);
  f32x16 d =
      c + __builtin_shufflevector(c, c, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
  f32x16 e = __builtin_shufflevector(d, d, 0, 2, 4, 6, 8, 10, 12, 14, 0, 2, 4, 6, 8, 10, 12, 14);
  std::memcpy(out, &e, 32);
}

// Lanes before n of v, `fill` after.
inline f32x16 keep(f32x16 v, int64_t n, float fill) {
  const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return lane < int32_t(n < kLanes ? n : kLanes) ? v : splat(fill);
}

inline float sum_lanes(f32x16 v) {
  f32x16 all[8] = {v};
  float out[8];
  sum_lanes_8(all, out);
  return out[0];
}

inline float max_lanes(f32x16 v) {
  float m = v[0];
  for (int i = 1; i < kLanes; ++i) m = v[i] > m ? v[i] : m;
  return m;
}

// exp(x) for x <= 0 to about 1e-7 relative; below -87 it is 0. NaN stays NaN.
inline f32x16 exp_nonpositive(f32x16 x) {
  const f32x16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  f32x16 safe = x < splat(-87.0f) ? splat(-87.0f) : x;
  f32x16 n = fma(safe, splat(1.44269504f), magic) - magic;
  f32x16 r = fma(n, splat(-0.693145752f), safe);
  r = fma(n, splat(-1.42860677e-6f), r);
  f32x16 p = splat(1.0f / 720);
  p = fma(p, r, splat(1.0f / 120));
  p = fma(p, r, splat(1.0f / 24));
  p = fma(p, r, splat(1.0f / 6));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r, splat(1.0f));
  p = fma(p, r, splat(1.0f));
  i32x16 exponent = __builtin_convertvector(n == n ? n : f32x16{}, i32x16);
  f32x16 y = p * (f32x16)((exponent + 127) << 23);
  return x < splat(-87.0f) ? f32x16{} : y;
}

}  // namespace lora_jax
