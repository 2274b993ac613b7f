// One row of bfloat16 times columns of 4-bit codes, two columns side by side with AVX2: a vector has
// four lanes of a column in its low half and the same four of its neighbour in its high half. The
// sums are those of dot.h.
//
// A table then takes half the registers, and two are made in the instructions of one. On AMD Zen 3
// the instructions that are issued are what bounds this loop.
#pragma once
#include "words.h"

namespace lora_jax {

// A packed row of k floats, a multiple of kWords: each half of its vectors two times.
class TwiceRow {
 public:
  TwiceRow(const float* x, int64_t k) : room_(new (std::align_val_t(64)) float[2 * k]) {
    constexpr int64_t kHalf = kLanes / 2;
    float* to = room_.get();
    for (int64_t i = 0; i < k; i += kHalf, to += kLanes)
      for (int64_t half = 0; half < 2; ++half) std::memcpy(to + half * kHalf, x + i, kHalf * sizeof(*x));
  }
  const float* get() const { return room_.get(); }

 private:
  struct Free {
    void operator()(float* p) const { ::operator delete[](p, std::align_val_t(64)); }
  };
  std::unique_ptr<float[], Free> room_;
};

#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)

template <class D>
constexpr bool kPairsFor = kWordsFor<D>;

// sum += w x. The compiler would keep each x in a register for both pairs, and sums in memory.
inline void add_product(__m256& sum, __m256i w, const float* x) {
  asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(w), "m"(*(const __m256*)x));
}

// The sums of eight words of two columns, lanes 0 to 3 or 4 to 7, at x.
inline void add_words(__m256& sum, __m256i words, __m256i upper, const float* x) {
  add_product(sum, _mm256_slli_epi32(words, 16), x);
  add_product(sum, _mm256_and_si256(words, upper), x + 2 * kLanes);
}

// acc[c] = lane products of x and column `row` + c, c < 2 P; x is a TwiceRow. With P of 1 and
// `apart` of 0 there is one column. `rows` is a CodedRows.
template <int P, class R>
__attribute__((noinline)) void dot_pairs(const R& rows, const float* x, int64_t row, int64_t apart,
                                         f32s* acc) {
  const int64_t row_bytes = rows.d_in / 2, groups = rows.d_in / rows.span;
  const int64_t ahead = 2 * P * row_bytes;
  const __m256i fifteen = _mm256_set1_epi8(15), upper = _mm256_set1_epi32(int(0xffff0000));
  const uint8_t* from = rows.from(row, 0);
  __m256 sums[P][2];
#pragma GCC unroll 2
  for (int p = 0; p < P; ++p) sums[p][0] = sums[p][1] = _mm256_setzero_ps();
  for (int64_t k = 0, group = row * groups; k < rows.d_in; ++group) {
    WordTable tables[P];
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) {
      const int64_t first = group + 2 * p * groups;
      tables[p] = rows.table_of_two(first, first + apart * groups);
    }
    for (int64_t b = 0; b < rows.span / 2; b += 64)
#pragma GCC unroll 4
      for (int c = 0; c < 2 * P; ++c) __builtin_prefetch(from + c * row_bytes + b + ahead, 0, 2);
    for (const int64_t end = k + rows.span; k < end; k += kWords, from += kWords / 2, x += 2 * kWords)
#pragma GCC unroll 2
      for (int p = 0; p < P; ++p) {
        const uint8_t* first = from + 2 * p * row_bytes;
        __m256i codes = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)first));
        first += apart * row_bytes;
        codes = _mm256_inserti128_si256(codes, _mm_loadu_si128((const __m128i*)first), 1);
        // Lanes 0 to 3 of a step's vectors are in low halves of bytes, lanes 4 to 7 in high ones.
        Words words = tables[p].at(_mm256_and_si256(codes, fifteen));
        add_words(sums[p][0], words.v[0], upper, x);
        add_words(sums[p][0], words.v[1], upper, x + 4 * kLanes);
        words = tables[p].at(_mm256_and_si256(_mm256_srli_epi16(codes, 4), fifteen));
        add_words(sums[p][1], words.v[0], upper, x + kLanes);
        add_words(sums[p][1], words.v[1], upper, x + 5 * kLanes);
      }
  }
#pragma GCC unroll 2
  for (int p = 0; p < P; ++p) {
    acc[2 * p] = (f32s)_mm256_permute2f128_ps(sums[p][0], sums[p][1], 0x20);
    if (apart) acc[2 * p + 1] = (f32s)_mm256_permute2f128_ps(sums[p][0], sums[p][1], 0x31);
  }
}

// acc[c] = lane products of x and column `row` + c, c < n.
template <class R>
inline void dot_columns_in_pairs(const R& rows, const float* x, int64_t row, int64_t n, f32s* acc) {
  int64_t c = 0;
  for (; c + 4 <= n; c += 4) dot_pairs<2>(rows, x, row + c, 1, acc + c);
  for (; c + 2 <= n; c += 2) dot_pairs<1>(rows, x, row + c, 1, acc + c);
  if (c < n) dot_pairs<1>(rows, x, row + c, 0, acc + c);
}

#else

template <class D>
constexpr bool kPairsFor = false;

#endif

}  // namespace lora_jax
