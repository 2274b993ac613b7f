// Integers of 4 bits with scales in float32 or bfloat16, with zero points or without: (code - zero) * scale.
//
// GPTQ's and AWQ's scales were float16: the 8 upper bits of one are a bfloat16, the 3 bits below another one. A code's
// product with the lower one is exact in a bfloat16, and one fused operation with the upper one then rounds the whole
// product once. Where a stage has a scale that no float16 holds, products are rounded to float32 and then to bfloat16.
// Both are what ops/grouped_matmul/weights.py says.
#pragma once
#include "device/arithmetic.cuh"
#include "device/ptx.cuh"

namespace lora_jax {

// Words of a row in a stage of SLOTS groups of columns: a float32 scale has one, or two bfloat16 that begin anywhere; and
// zero points that begin anywhere. A word of all rows lies together, so that copies of a warp ask no bank twice.
template <int SLOTS>
constexpr int kAffineScaleWords = SLOTS;
template <int SLOTS>
constexpr int kAffineZeroWords = (SLOTS + 6) / 4;
constexpr uint32_t kThirtyTwo = 0x42004200;  // two bfloat16, and with a number below 128 in their low bits 32 + it / 4
constexpr uint32_t kFour = 0x40804080, kTwoTo127 = 0x7f007f00;

// Where a group's scale and zero point are: words, counted from those of a stage's first group, and their bytes for
// __byte_perm. `element` is the place of the scale in its array and `first` that of the stage's first one; both may be less
// by a multiple of 8.
struct AffinePlace {
  int scale_word, zero_word;
  uint32_t scale, zero;
  __device__ __forceinline__ AffinePlace(int element, int first, bool narrow, bool zeros)
      : scale_word(narrow ? (element >> 1) - (first >> 1) : element - first),
        zero_word((element >> 2) - (first >> 2)),
        scale(narrow ? (element & 1 ? 0x3244 : 0x1044) : 0x3210),
        zero(zeros ? 0x5050 + (element & 3) * 0x101 : 0x5454) {}
};

// Whether no float16 holds a scale of a word, or its four times is infinite in bfloat16. Of bfloat16 a word has two.
__device__ __forceinline__ bool is_affine_wide(uint32_t word, bool narrow) {
  if (narrow) return ((word & 0x7fff7fff) + 0x02000200) & 0x80008000;
  const uint32_t size = word & 0x7fffffff;  // from 2^-100 to 2^100 with 10 bits of mantissa, or 0
  return (word & 0x1fff) || (size && size - 0x0d800000 > 0x64000000);
}

// A row's group of columns, ready to decode.
template <bool WIDE>
struct AffineGroup {
  uint32_t scale, rest;  // WIDE: a float32. Else the upper and the lower part of four times the scale, twice each.
  uint32_t zero;         // 32 + zero / 4, twice
  // `none` is that of a group without a zero point.
  __device__ __forceinline__ void load(uint32_t scale_word, uint32_t zero_word, const AffinePlace& place, uint32_t none) {
    zero = __byte_perm(zero_word, none, place.zero);
    scale = __byte_perm(scale_word, 0, place.scale);
    if constexpr (!WIDE) {
      const uint32_t whole = __float_as_uint(__fmul_rn(__uint_as_float(scale), 4));
      const float less = __fsub_rn(__uint_as_float(whole), __uint_as_float(whole & 0xffff0000));
      scale = __byte_perm(whole, 0, 0x3232), rest = __byte_perm(__float_as_uint(less), 0, 0x3232);
    }
  }
  // Columns 8 i and 8 i + 1 of a word's: codes in bits 4 i to 4 i + 3 of its halves.
  __device__ __forceinline__ uint32_t pair(uint32_t word, int i) const {
    const uint32_t codes = i < 2 ? word : word >> 8;
    uint32_t quarter;  // of code - zero
    if (i % 2 == 0)
      quarter = subtract_bf16x2(mask_or(codes, 0x000f000f, kThirtyTwo), zero);
    else  // a code is itself times 2^-129 there
      quarter = fma_bf16x2(codes & 0x00f000f0, kTwoTo127, subtract_bf16x2(kThirtyTwo, zero));
    if constexpr (!WIDE) return fma_bf16x2(quarter, scale, multiply_bf16x2(quarter, rest));
    const uint32_t value = multiply_bf16x2(quarter, kFour);
    const float s = __uint_as_float(scale);
    return bf16x2(__fmul_rn(__uint_as_float(value << 16), s), __fmul_rn(__uint_as_float(value & 0xffff0000), s));
  }
};

}  // namespace lora_jax
