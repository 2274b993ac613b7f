// Values of 8 bits, e4m3, times a scale. None is NaN.
#pragma once
#include "words.h"

namespace lora_jax {

constexpr int64_t kValueStep = 16;  // values that scale_e4m3 takes

// out[0, 16) = scale times the e4m3 values of 16 bytes.
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

// The words of e4m3 values times a scale. A value is (1 + m / 8) 2^(e - 7), and m / 8 2^-6 where e
// is 0: so a word is that of a small e with the rest added to its exponent. Scales with which words
// could leave the normal numbers, and negative ones, are multiplied in float32.
struct ScaledTable {
  WordTable words;
  float scale;

  ScaledTable() {}
  explicit ScaledTable(float s) : words(values(), s), scale(s) {}
  // Whether `quick` serves.
  static bool has_words(float s) { return kTables && s > 0x1p-100f && s < 0x1p100f; }
#ifdef __AVX512BW__
  static constexpr bool kTables = true;
  // Of m with exponent 0, then of m where e is 0.
  static const Values& values() {
    static const float kOf[16] = {0x8p-10f, 0x9p-10f, 0xap-10f, 0xbp-10f, 0xcp-10f, 0xdp-10f,
                                  0xep-10f, 0xfp-10f, 0x0p-9f,  0x1p-9f,  0x2p-9f,  0x3p-9f,
                                  0x4p-9f,  0x5p-9f,  0x6p-9f,  0x7p-9f};
    static const Values kValues(kOf);
    return kValues;
  }
  Words quick(const uint8_t* values) const {
    __m512i v = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)values));
    __m512i e = _mm512_and_si512(v, _mm512_set1_epi16(0x78));
    __m512i m = _mm512_and_si512(v, _mm512_set1_epi16(7));
    __mmask32 none = _mm512_testn_epi16_mask(e, e);
    __m512i index = _mm512_mask_add_epi16(m, none, m, _mm512_set1_epi16(8));
    __m512i w = _mm512_permutexvar_epi16(index, words.twice);
    w = _mm512_add_epi16(w, _mm512_slli_epi16(e, 4));
    __m512i sign = _mm512_and_si512(_mm512_slli_epi16(v, 8), _mm512_set1_epi16(int16_t(0x8000)));
    return {_mm512_xor_si512(w, sign)};
  }
#elif defined(__AVX2__)
  static constexpr bool kTables = true;
  // Of m with e 1, then of m with e 0, as if that had a leading 1: an index is that of four bits
  // less 8, and two steps of e are one in the high byte of a word.
  static const Values& values() {
    static const float kOf[16] = {0x8p-9f,  0x9p-9f,  0xap-9f,  0xbp-9f,  0xcp-9f,  0xdp-9f,
                                  0xep-9f,  0xfp-9f,  0x8p-10f, 0x9p-10f, 0xap-10f, 0xbp-10f,
                                  0xcp-10f, 0xdp-10f, 0xep-10f, 0xfp-10f};
    static const Values kValues(kOf);
    return kValues;
  }
  // In memory: the compiler would make them anew each time, where registers are few.
  static const __m256i* constants() {
    alignas(32) static const uint8_t kBytes[4][32] = {
#define TWICE(...) {__VA_ARGS__, __VA_ARGS__}
        TWICE(127, 127, 127, 127, 127, 127, 127, 127, 127, 127, 127, 127, 127, 127, 127, 127),
        TWICE(8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8),
        TWICE(15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15),
        TWICE(0, 1, 2, 3, 4, 5, 6, 7, 128, 129, 130, 131, 132, 133, 134, 135)};
#undef TWICE
    const __m256i* all = (const __m256i*)kBytes;
    asm("" : "+r"(all));
    return all;
  }
  Words quick(const uint8_t* values) const {
    const __m256i* all = constants();
    // Eights 0 and 2 in the low half, 1 and 3 in the high one: so the words come out in order.
    __m256i v = _mm256_permute4x64_epi64(_mm256_loadu_si256((const __m256i*)values), 0xd8);
    __m256i index = _mm256_sub_epi8(_mm256_and_si256(v, all[0]), all[1]);
    if (__builtin_expect(_mm256_movemask_epi8(index), 0)) {
      const Words some = with_small(v, index, words.low, words.high);
      __m256i first = some.v[0], second = some.v[1];
      in_register(first), in_register(second);
      return {{first, second}};
    }
    return joined(v, _mm256_shuffle_epi8(words.low, index), _mm256_shuffle_epi8(words.high, index));
  }
  // Words of bytes, without signs and what the upper two bits of e add.
  static Words joined(__m256i v, __m256i low, __m256i high) {
    const __m256i* all = constants();
    __m256i upper = _mm256_and_si256(_mm256_srli_epi16(v, 4), all[2]);
    high = _mm256_add_epi8(high, _mm256_shuffle_epi8(all[3], upper));
    return {{_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)}};
  }
  // Where e is 0, m / 8 2^-6 is (1 + m' / 8) 2^(e' - 7) with an e' of at most 0, or zero.
  __attribute__((noinline, cold)) static Words with_small(__m256i v, __m256i index, __m256i of_low,
                                                          __m256i of_high) {
    __m256i m = _mm256_and_si256(v, _mm256_set1_epi8(7));
    __m256i zero = _mm256_setzero_si256();
    __m256i some = _mm256_cmpgt_epi8(zero, index);  // where e is 0
    const __m256i places =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(8, 8, 8, 12, 8, 10, 12, 14, 0, 0, 0, 0, 0, 0, 0, 0));
    const __m256i less_low = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 0, -128, -128, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0));
    const __m256i less_high = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0));
    index = _mm256_blendv_epi8(index, _mm256_shuffle_epi8(places, m), some);
    __m256i low = _mm256_shuffle_epi8(of_low, index);
    __m256i high = _mm256_shuffle_epi8(of_high, index);
    // Two's complement by bytes: where the low byte is under 0x80, 0x80 less borrows one.
    __m256i take = _mm256_and_si256(_mm256_shuffle_epi8(less_low, m), some);
    __m256i borrow = _mm256_andnot_si256(low, take);
    low = _mm256_xor_si256(low, take);
    high = _mm256_sub_epi8(high, _mm256_and_si256(_mm256_shuffle_epi8(less_high, m), some));
    high = _mm256_add_epi8(high, _mm256_cmpgt_epi8(zero, borrow));
    __m256i none = _mm256_and_si256(some, _mm256_cmpeq_epi8(m, zero));
    return joined(v, _mm256_andnot_si256(none, low), _mm256_andnot_si256(none, high));
  }
#else
  static constexpr bool kTables = false;
  static const Values& values() {
    static const float kOf[16] = {};
    static const Values kValues(kOf);
    return kValues;
  }
  Words quick(const uint8_t*) const { return {}; }
#endif
  Words look_up(const uint8_t* values) const {
    return has_words(scale) ? quick(values) : multiplied(values, scale);
  }
  __attribute__((noinline, cold)) static Words multiplied(const uint8_t* values, float scale) {
    uint16_t slow[kWords];
    for (int i = 0; i < kWords; i += kValueStep) scale_e4m3(values + i, scale, slow + i);
    Words out;
    std::memcpy(&out, slow, sizeof(out));
    return out;
  }
  void decode(const uint8_t* values, float* out) const {
    for (int i = 0; i < kWords; i += kValueStep) scale_e4m3(values + i, scale, out + i);
  }
};

}  // namespace lora_jax
