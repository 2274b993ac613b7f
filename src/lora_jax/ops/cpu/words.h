// Words: 32 bfloat16 weights of a row in registers, in the order of K. Tables make them from codes
// of 4 bits and from e4m3 values of 8, both with the bits of the plain weights.
#pragma once
#include "dot.h"

namespace lora_jax {

constexpr int64_t kWords = 32;

#ifdef __AVX512BW__
struct Words {
  __m512i v;
};
#elif defined(__AVX2__)
struct Words {
  __m256i v[2];
};
#else
struct Words {
  uint16_t v[kWords];
};
#endif

// Operand i of the products with 32 words: part i % kParts of step i / kParts.
template <class D>
constexpr int kOperands = kWords / D::kStep * D::kParts;
template <class D>
inline typename D::V operand(const Words& words, int i) {
  const auto* first = reinterpret_cast<const typename D::T*>(&words);
  return D::load_w(first + i / D::kParts * D::kStep, i % D::kParts);
}

// Writes words as rows are packed, or as they are where rows are not.
template <class D>
inline void put(const Words& words, typename D::X* out) {
  if constexpr (std::is_same_v<typename D::T, typename D::X>)
    std::memcpy(out, &words, sizeof(words));
  else
    for (int i = 0; i < kOperands<D>; ++i) store(out + i * kLanes, operand<D>(words, i));
}

// Whether weights of D are words: floats are decoded as floats.
template <class D>
constexpr bool kWordsFor = std::is_same_v<typename D::T, uint16_t>;

// Finite floats as bfloat16, rounded to the nearest, halves to even.
inline float narrow(float, float v) { return v; }
inline uint16_t narrow(uint16_t, float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
#if defined(__AVX512BF16__) && defined(__AVX512VL__)
inline __m256i narrow(__m512 v) { return (__m256i)_mm512_cvtneps_pbh(v); }
#elif defined(__AVX512F__)
inline __m256i narrow(__m512 v) { return (__m256i)round_bf16((f32s)v); }
#elif defined(__AVX2__)
// Constants of tables, in memory: the compiler would make them anew for each table, as registers are
// few.
struct TableConstants {
  alignas(32) uint32_t one[8] = {1, 1, 1, 1, 1, 1, 1, 1};
  alignas(32) uint32_t half[8] = {0x7fff, 0x7fff, 0x7fff, 0x7fff, 0x7fff, 0x7fff, 0x7fff, 0x7fff};
  alignas(32) uint16_t ones[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  // Low bytes of the low words of lanes, of the high words, high bytes of both; in either half.
  alignas(32) uint8_t fours[32] = {0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15,
                                   0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15};
};
inline const TableConstants* table_constants() {
  static constexpr TableConstants kAll;
  const TableConstants* all = &kAll;
  asm("" : "+r"(all));
  return all;
}
// The rounded word of a lane is its upper half.
inline __m256i rounded(__m256 v) {
  const TableConstants* all = table_constants();
  __m256i one = _mm256_load_si256((const __m256i*)all->one);
  __m256i half = _mm256_load_si256((const __m256i*)all->half);
  __m256i bits = _mm256_castps_si256(v);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
  return _mm256_add_epi32(_mm256_add_epi32(bits, half), odd);
}
inline __m256i narrow(__m256 first, __m256 second) {
  __m256i a = _mm256_srli_epi32(rounded(first), 16), b = _mm256_srli_epi32(rounded(second), 16);
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8);
}
// The rounded words of two vectors: lane i has that of `first` in its low half, of `second` in its
// high half. The halves that are dropped round up from 0x8000 on, less one where a word is even.
inline __m256i narrow_lanes(__m256 first, __m256 second) {
  __m256i a = _mm256_castps_si256(first), b = _mm256_castps_si256(second);
  __m256i dropped = _mm256_blend_epi16(a, _mm256_slli_epi32(b, 16), 0xaa);
  __m256i words = _mm256_blend_epi16(_mm256_srli_epi32(a, 16), b, 0xaa);
  const __m256i* ones = (const __m256i*)table_constants()->ones;
  __m256i even = _mm256_andnot_si256(words, _mm256_load_si256(ones));
  return _mm256_add_epi16(words, _mm256_srli_epi16(_mm256_subs_epu16(dropped, even), 15));
}
#endif

// The 16 values of codes, and their signs and magnitudes where these are at most eight beside zero:
// half the words of a scale are then rounded, and their signs set.
struct Values {
  const float* of;
  bool halved = false;
#if defined(__AVX2__) && !defined(__AVX512BW__)
  alignas(32) float magnitudes[8] = {};
  // Of a code, two times: places of the bytes of its magnitude among those of all, and its sign.
  alignas(32) uint8_t low[32], high[32], sign[32];
  explicit Values(const float* from) : of(from) {
    int found = 0;
    for (int code = 0; code < 16; ++code) {
      float size = from[code] < 0 ? -from[code] : from[code];
      int i = 0;
      while (i < found && magnitudes[i] != size) ++i;
      if (i == found && size != 0) {
        if (found == 8) return;
        magnitudes[found++] = size;
      }
      // Lane i of a half has word i in its low half and word i + 4 in its high half.
      uint8_t place = size == 0 ? 0x80 : i % 4 * 4 + i / 4 * 2;
      low[code] = low[code + 16] = place;
      high[code] = high[code + 16] = size == 0 ? place : place + 1;
      sign[code] = sign[code + 16] = __builtin_signbit(from[code]) ? 0x80 : 0;
    }
    halved = true;
  }
#else
  explicit Values(const float* from) : of(from) {}
#endif
};

// The words of (values[i] - zero) * scale. `quick` gives those of 32 codes in 16 bytes: byte
// 8 p + i holds code 16 p + i in its low half, code 16 p + 8 + i in its high half, i < 8.
#ifdef __AVX512BW__
struct WordTable {
  __m512i twice;  // all words, two times
  Words look_up(const uint8_t* codes) const { return quick(codes); }
  WordTable() {}
  WordTable(const Values& values, float scale) : WordTable(_mm512_loadu_ps(values.of), scale) {}
  WordTable(const Values& values, float zero, float scale)
      : WordTable(_mm512_sub_ps(_mm512_loadu_ps(values.of), _mm512_set1_ps(zero)), scale) {}
  WordTable(__m512 all, float scale) {
    const __m512 scaled = _mm512_mul_ps(all, _mm512_set1_ps(scale));
#if defined(__AVX512BF16__) && defined(__AVX512VL__)
    twice = (__m512i)_mm512_cvtne2ps_pbh(scaled, scaled);
#else
    twice = _mm512_broadcast_i64x4(narrow(scaled));
#endif
  }
  Words quick(const uint8_t* codes) const {
    const __m512i quads = _mm512_setr_epi64(0, 1, 0, 1, 2, 3, 2, 3);
    const __m512i shift = _mm512_setr_epi64(0, 0, 0x4000400040004, 0x4000400040004, 0, 0,
                                            0x4000400040004, 0x4000400040004);
    __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)codes));
    __m512i eights = _mm512_permutexvar_epi64(quads, _mm512_castsi256_si512(wide));
    // Bit 4 of an index may be set by the other half of a byte: both halves of the table are equal.
    return {_mm512_permutexvar_epi16(_mm512_srlv_epi16(eights, shift), twice)};
  }
};
#elif defined(__AVX2__)
// `of_two` has the words of one scale for the low half of indices, of another for the high half.
struct WordTable {
  __m256i low, high;  // bytes of the 16 words by significance, two times
  Words look_up(const uint8_t* codes) const { return quick(codes); }
  WordTable() {}
  WordTable(const Values& values, float scale) {
    if (values.halved && keeps_signs(scale))
      *this = of_magnitudes(values, scale);
    else
      *this = WordTable(_mm256_loadu_ps(values.of), _mm256_loadu_ps(values.of + 8), scale);
  }
  WordTable(const Values& values, float zero, float scale)
      : WordTable(_mm256_sub_ps(_mm256_loadu_ps(values.of), _mm256_set1_ps(zero)),
                  _mm256_sub_ps(_mm256_loadu_ps(values.of + 8), _mm256_set1_ps(zero)), scale) {}
  WordTable(__m256 first, __m256 second, float scale) {
    __m256 s = _mm256_set1_ps(scale);
    __m256i words = narrow_lanes(_mm256_mul_ps(first, s), _mm256_mul_ps(second, s));
    __m256i fours = by_significance(words);
    low = _mm256_permutevar8x32_epi32(fours, _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5));
    high = _mm256_permutevar8x32_epi32(fours, _mm256_setr_epi32(2, 6, 3, 7, 2, 6, 3, 7));
  }
  static WordTable of_two(const Values& values, float first, float second) {
    __m256 scale = halves(first, second);
    if (values.halved && keeps_signs(scale)) {
      __m256 fours = _mm256_mul_ps(twice(values.magnitudes), scale);
      __m256 others = _mm256_mul_ps(twice(values.magnitudes + 4), scale);
      return of_magnitudes(values, narrow_lanes(fours, others));
    }
    __m256 quarters[4];
    for (int i = 0; i < 4; ++i) quarters[i] = _mm256_mul_ps(twice(values.of + 4 * i), scale);
    return of_quarters(quarters);
  }
  static WordTable of_two(const Values& values, const float* zeros, const float* scales) {
    __m256 zero = halves(zeros[0], zeros[1]), scale = halves(scales[0], scales[1]), quarters[4];
    for (int i = 0; i < 4; ++i)
      quarters[i] = _mm256_mul_ps(_mm256_sub_ps(twice(values.of + 4 * i), zero), scale);
    return of_quarters(quarters);
  }
  // Whether a scale is finite and has no sign: zero times it is zero.
  static bool keeps_signs(float scale) {
    uint32_t bits;
    std::memcpy(&bits, &scale, 4);
    return bits < 0x7f800000u;
  }
  static bool keeps_signs(__m256 scales) {
    const __m256i largest = _mm256_set1_epi32(0x7f7fffff);
    __m256i bits = _mm256_castps_si256(scales), under = _mm256_sub_epi32(largest, bits);
    return !_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_or_si256(bits, under)));
  }
  static __m256 halves(float first, float second) {
    return _mm256_blend_ps(_mm256_set1_ps(first), _mm256_set1_ps(second), 0xf0);
  }
  static __m256 twice(const float* four) { return _mm256_broadcast_ps((const __m128*)four); }
  // Bytes of words by fours, as table_constants says.
  static __m256i by_significance(__m256i words) {
    return _mm256_shuffle_epi8(words, _mm256_load_si256((const __m256i*)table_constants()->fours));
  }
  static WordTable of_magnitudes(const Values& values, float scale) {
    __m256i words = rounded(_mm256_mul_ps(_mm256_load_ps(values.magnitudes), _mm256_set1_ps(scale)));
    // Words 0 to 3 go to low halves of lanes, words 4 to 7 to high ones; then all of them to both
    // halves.
    const __m256i places = _mm256_setr_epi8(2, 3, -1, -1, 6, 7, -1, -1, 10, 11, -1, -1, 14, 15, -1, -1,
                                            -1, -1, 2, 3, -1, -1, 6, 7, -1, -1, 10, 11, -1, -1, 14, 15);
    __m256i part = _mm256_shuffle_epi8(words, places);
    return of_magnitudes(values, _mm256_or_si256(part, _mm256_permute2x128_si256(part, part, 1)));
  }
  static WordTable of_magnitudes(const Values& values, __m256i words) {
    WordTable table;
    table.low = _mm256_shuffle_epi8(words, _mm256_load_si256((const __m256i*)values.low));
    table.high = _mm256_xor_si256(
        _mm256_shuffle_epi8(words, _mm256_load_si256((const __m256i*)values.high)),
        _mm256_load_si256((const __m256i*)values.sign));
    return table;
  }
  // Of words 4 i to 4 i + 3 in both halves of vector i.
  static WordTable of_quarters(const __m256* quarters) {
    __m256i first = by_significance(narrow_lanes(quarters[0], quarters[1]));
    __m256i second = by_significance(narrow_lanes(quarters[2], quarters[3]));
    WordTable table;
    table.low = _mm256_unpacklo_epi64(first, second);
    table.high = _mm256_unpackhi_epi64(first, second);
    return table;
  }
  // Words of 32 indices: the first eight of both halves, then the others.
  Words at(__m256i index) const {
    __m256i l = _mm256_shuffle_epi8(low, index), h = _mm256_shuffle_epi8(high, index);
    return {{_mm256_unpacklo_epi8(l, h), _mm256_unpackhi_epi8(l, h)}};
  }
  Words quick(const uint8_t* codes) const {
    // Low halves of the bytes in the low half, high ones in the high half.
    __m256i bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)codes));
    __m256i halves = _mm256_srlv_epi64(bytes, _mm256_setr_epi64x(0, 0, 4, 4));
    return at(_mm256_and_si256(halves, _mm256_set1_epi8(15)));
  }
};
#else
struct WordTable {
  uint16_t words[16];
  Words look_up(const uint8_t* codes) const { return quick(codes); }
  WordTable() {}
  WordTable(const Values& values, float scale) : WordTable(values, 0.0f, scale) {}
  WordTable(const Values& values, float zero, float scale) {
    for (int i = 0; i < 16; ++i) words[i] = narrow(uint16_t(), (values.of[i] - zero) * scale);
  }
  Words quick(const uint8_t* codes) const {
    Words out;
    for (int p = 0; p < 2; ++p)
      for (int i = 0; i < 8; ++i) {
        out.v[16 * p + i] = words[codes[8 * p + i] & 15];
        out.v[16 * p + 8 + i] = words[codes[8 * p + i] >> 4];
      }
    return out;
  }
};
#endif

// The 16 floats (values[i] - zero) * scale; `decode` writes those of 32 codes.
#ifdef __AVX512F__
struct FloatTable {
  __m512 values;
  FloatTable(const Values& from, float scale) : FloatTable(from, 0.0f, scale) {}
  FloatTable(const Values& from, float zero, float scale) {
    __m512 all = _mm512_sub_ps(_mm512_loadu_ps(from.of), _mm512_set1_ps(zero));
    values = _mm512_mul_ps(all, _mm512_set1_ps(scale));
  }
  void decode(const uint8_t* codes, float* out) const {
    __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)codes));
    // A lookup reads the low four bits of an index.
    __m512 low = _mm512_permutexvar_ps(wide, values);
    __m512 high = _mm512_permutexvar_ps(_mm512_srli_epi32(wide, 4), values);
    _mm512_storeu_ps(out, _mm512_shuffle_f32x4(low, high, 0x44));
    _mm512_storeu_ps(out + kLanes, _mm512_shuffle_f32x4(low, high, 0xee));
  }
};
#elif defined(__AVX2__)
struct FloatTable {
  __m256 first, second;  // of eight codes each
  FloatTable(const Values& from, float scale) : FloatTable(from, 0.0f, scale) {}
  FloatTable(const Values& from, float zero, float scale) {
    __m256 z = _mm256_set1_ps(zero), s = _mm256_set1_ps(scale);
    first = _mm256_mul_ps(_mm256_sub_ps(_mm256_loadu_ps(from.of), z), s);
    second = _mm256_mul_ps(_mm256_sub_ps(_mm256_loadu_ps(from.of + 8), z), s);
  }
  // A lookup reads the low three bits of an index, a choice the highest.
  __m256 at(__m256i index) const {
    __m256 choice = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(first, index),
                            _mm256_permutevar8x32_ps(second, index), choice);
  }
  void decode(const uint8_t* codes, float* out) const {
    for (int p = 0; p < 2; ++p, out += 16) {
      __m256i both = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(codes + 8 * p)));
      _mm256_storeu_ps(out, at(both));
      _mm256_storeu_ps(out + 8, at(_mm256_srli_epi32(both, 4)));
    }
  }
};
#else
struct FloatTable {
  float values[16];
  FloatTable(const Values& from, float scale) : FloatTable(from, 0.0f, scale) {}
  FloatTable(const Values& from, float zero, float scale) {
    for (int i = 0; i < 16; ++i) values[i] = (from.of[i] - zero) * scale;
  }
  void decode(const uint8_t* codes, float* out) const {
    for (int p = 0; p < 2; ++p, codes += 8, out += 16)
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        uint32_t both = codes[i];
#ifdef __GNUC__
        asm("" : "+r"(both));  // as a vector it is 80 kB of code
#endif
        out[i] = values[both & 15];
        out[i + 8] = values[both >> 4];
      }
  }
};
#endif

// Writes the 32 weights at `from` as rows are packed.
template <class D, class Table>
inline void put(const Table& table, const uint8_t* from, typename D::X* out) {
  if constexpr (kWordsFor<D>)
    put<D>(table.look_up(from), out);
  else
    table.decode(from, out);
}

}  // namespace lora_jax
