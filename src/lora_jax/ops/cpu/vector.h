// Float vectors of one register of the CPU that is compiled for, in GCC vector extensions: 16 lanes
// with AVX512, 8 with AVX, else 4. Every function has one order of operations, whatever the data
// around it. Wider vectors than a register would live in memory.
#pragma once
#include <cstdint>
#include <cstring>
#ifdef __AVX__
#include <immintrin.h>
#endif

namespace lora_jax {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float f32s __attribute__((vector_size(4 * kLanes)));
typedef int32_t i32s __attribute__((vector_size(4 * kLanes)));
typedef uint32_t u32s __attribute__((vector_size(4 * kLanes)));
typedef int8_t i8s __attribute__((vector_size(kLanes)));
typedef uint16_t u16s __attribute__((vector_size(2 * kLanes)));

inline f32s splat(float v) { return v - f32s{}; }

inline f32s fma(f32s a, f32s b, f32s c) {
#ifdef __AVX512F__
  return (f32s)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) && defined(__AVX__)
  return (f32s)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

inline f32s vmax(f32s a, f32s b) { return a > b ? a : b; }

// bfloat16 is the upper half of a float.
inline float to_f32(uint16_t v) {
  uint32_t bits = uint32_t(v) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
inline float to_f32(float v) { return v; }

inline u16s round_bf16(f32s v) {
  u32s bits = (u32s)v;
  u32s rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  u32s quiet_nan = (bits >> 16) | 0x40;
  return __builtin_convertvector(v == v ? rounded : quiet_nan, u16s);
}

// Loads and stores of n <= kLanes elements; lanes at or after n are zero and are not touched in memory.
inline f32s load(const float* p) {
  f32s v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
inline f32s load(const uint16_t* p) {
  u16s v;
  std::memcpy(&v, p, sizeof(v));
  return (f32s)(__builtin_convertvector(v, u32s) << 16);
}
inline f32s load(const int8_t* p) {
  i8s v;
  std::memcpy(&v, p, sizeof(v));
  return __builtin_convertvector(v, f32s);
}
inline f32s load(const int8_t* p, int64_t n) {
  if (n >= kLanes) return load(p);
  int8_t buffer[kLanes] = {};
  std::memcpy(buffer, p, n);
  return load(buffer);
}
#if defined(__AVX512BW__) && defined(__AVX512VL__)
inline uint32_t first_bits(int64_t n) { return uint32_t((uint64_t(1) << n) - 1); }
inline f32s load(const float* p, int64_t n) {
  return n >= kLanes ? load(p) : (f32s)_mm512_maskz_loadu_ps(__mmask16(first_bits(n)), p);
}
inline f32s load(const uint16_t* p, int64_t n) {
  if (n >= kLanes) return load(p);
  u16s v = (u16s)_mm256_maskz_loadu_epi16(__mmask16(first_bits(n)), p);
  return (f32s)(__builtin_convertvector(v, u32s) << 16);
}
#else
// Half a vector is frequent, and a copy of a fixed size is quick.
template <class T>
inline void copy_some(T* to, const T* from, int64_t n) {
  if (n == kLanes / 2)
    std::memcpy(to, from, kLanes / 2 * sizeof(T));
  else
    std::memcpy(to, from, n * sizeof(T));
}
template <class T>
inline f32s load(const T* p, int64_t n) {
  if (n >= kLanes) return load(p);
  T buffer[kLanes] = {};
  copy_some(buffer, p, n);
  return load(buffer);
}
#endif
inline void store(float* p, f32s v) { std::memcpy(p, &v, sizeof(v)); }
inline void store(uint16_t* p, f32s v) {
  u16s r = round_bf16(v);
  std::memcpy(p, &r, sizeof(r));
}
#if defined(__AVX512BW__) && defined(__AVX512VL__)
inline void store(float* p, f32s v, int64_t n) {
  if (n >= kLanes) return store(p, v);
  _mm512_mask_storeu_ps(p, __mmask16(first_bits(n)), (__m512)v);
}
inline void store(uint16_t* p, f32s v, int64_t n) {
  if (n >= kLanes) return store(p, v);
  _mm256_mask_storeu_epi16(p, __mmask16(first_bits(n)), (__m256i)round_bf16(v));
}
#else
template <class T>
inline void store(T* p, f32s v, int64_t n) {
  if (n >= kLanes) return store(p, v);
  T buffer[kLanes];
  store(buffer, v);
  copy_some(p, buffer, n);
}
#endif

// Sums the lanes of eight vectors: out[i] = sum of v[i]. Lanes meet as i + 8, i + 4, i + 2, i + 1,
// as far as there are so many, each sum in the same order whichever of the eight it is.
#if defined(__AVX512F__)
inline void sum_lanes_8(const f32s* v, float* out) {
  f32s a[4], b[2];
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
  f32s c = __builtin_shufflevector(b[0], b[1], 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28,
                                   29) +
           __builtin_shufflevector(b[0], b[1], 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27,
                                   30, 31);
  f32s d = c + __builtin_shufflevector(c, c, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
  f32s e = __builtin_shufflevector(d, d, 0, 2, 4, 6, 8, 10, 12, 14, 0, 2, 4, 6, 8, 10, 12, 14);
  std::memcpy(out, &e, 32);
}
#elif defined(__AVX__)
inline void sum_lanes_8(const f32s* v, float* out) {
  f32s a[4], b[2];
  for (int i = 0; i < 4; ++i)
    a[i] = __builtin_shufflevector(v[2 * i], v[2 * i + 1], 0, 1, 2, 3, 8, 9, 10, 11) +
           __builtin_shufflevector(v[2 * i], v[2 * i + 1], 4, 5, 6, 7, 12, 13, 14, 15);
  for (int i = 0; i < 2; ++i)
    b[i] = __builtin_shufflevector(a[2 * i], a[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
           __builtin_shufflevector(a[2 * i], a[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
  f32s c = __builtin_shufflevector(b[0], b[1], 0, 2, 8, 10, 4, 6, 12, 14) +
           __builtin_shufflevector(b[0], b[1], 1, 3, 9, 11, 5, 7, 13, 15);
  f32s d = __builtin_shufflevector(c, c, 0, 4, 1, 5, 2, 6, 3, 7);
  std::memcpy(out, &d, 32);
}
#else
inline void sum_lanes_8(const f32s* v, float* out) {
  for (int i = 0; i < 8; i += 4) {
    f32s a[2];
    for (int j = 0; j < 2; ++j)
      a[j] = __builtin_shufflevector(v[i + 2 * j], v[i + 2 * j + 1], 0, 1, 4, 5) +
             __builtin_shufflevector(v[i + 2 * j], v[i + 2 * j + 1], 2, 3, 6, 7);
    store(out + i, __builtin_shufflevector(a[0], a[1], 0, 2, 4, 6) +
                       __builtin_shufflevector(a[0], a[1], 1, 3, 5, 7));
  }
}
#endif

// Lanes before n of v, `fill` after.
inline f32s keep(f32s v, int64_t n, float fill) {
  static const int32_t lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  i32s lane;
  std::memcpy(&lane, lanes, sizeof(lane));
  return lane < int32_t(n < kLanes ? n : kLanes) ? v : splat(fill);
}

inline float sum_lanes(f32s v) {
  f32s all[8] = {v};
  float out[8];
  sum_lanes_8(all, out);
  return out[0];
}

inline float max_lanes(f32s v) {
  float m = v[0];
  for (int i = 1; i < kLanes; ++i) m = v[i] > m ? v[i] : m;
  return m;
}

// exp(x) for x <= 0 to about 1e-7 relative; below -87 it is 0. NaN stays NaN.
inline f32s exp_nonpositive(f32s x) {
  const f32s magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  f32s safe = x < splat(-87.0f) ? splat(-87.0f) : x;
  f32s n = fma(safe, splat(1.44269504f), magic) - magic;
  f32s r = fma(n, splat(-0.693145752f), safe);
  r = fma(n, splat(-1.42860677e-6f), r);
  f32s p = splat(1.0f / 720);
  p = fma(p, r, splat(1.0f / 120));
  p = fma(p, r, splat(1.0f / 24));
  p = fma(p, r, splat(1.0f / 6));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r, splat(1.0f));
  p = fma(p, r, splat(1.0f));
  i32s exponent = __builtin_convertvector(n == n ? n : f32s{}, i32s);
  f32s y = p * (f32s)((exponent + 127) << 23);
  return x < splat(-87.0f) ? f32s{} : y;
}

}  // namespace lora_jax
