// Weights in 8 and 4 bits made plain in the registers of wgmma's first operand.
//
// A stage holds 128 bytes of each row of weights. `ldmatrix` gives a thread four bytes of a row where
// wgmma wants other columns of it; so the columns of each product of 16 are taken in another order,
// in x too (`place_x`). A product adds its 16 columns at once: their order changes no bit.
// Values are computed as ops/grouped_matmul/weights.py says, in float32, and rounded once.
#pragma once
#include "device/ptx.cuh"

namespace lora_jax {

// Integers and E2M1 have scales in bfloat16 here, whose products need no float32; the others float32.
enum class Coding { kFloat8, kInteger, kE2m1, kTable };

template <Coding C>
constexpr int kStepColumns = C == Coding::kFloat8 ? 128 : 256;  // of d_in in a stage
template <Coding C>
constexpr int kScaleBytes = C == Coding::kInteger || C == Coding::kE2m1 ? 2 : 4;
constexpr int kTableRepeats = 32;  // a lane reads a table of its own: no bank is asked twice
constexpr uint32_t kTableBytes = 16 * 4 * kTableRepeats;

// Words of the scales of a row in a stage: G columns share one, and where that is more than a stage, whole stages do.
template <Coding C, int G>
constexpr int scale_words() {
  return (kStepColumns<C> + G - 1) / G * kScaleBytes<C> / 4;
}
template <int N>
__device__ __forceinline__ void load_words(uint32_t (&v)[N], uint32_t address) {
  if constexpr (N == 4) {
    const uint4 four = lds128(address);
    v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = lds32(address + i * 4);
  }
}
// The scale of a column of a stage, as the decoder of its coding takes it.
template <Coding C, int G, int N>
__device__ __forceinline__ uint32_t scale_of(const uint32_t (&words)[N], int column) {
  const int at = column / G;
  if constexpr (kScaleBytes<C> == 4) return words[at];
  return __byte_perm(words[at / 2], 0, at % 2 ? 0x3232 : 0x1010);
}

// The first 4 of 8 codes of two products of 16 columns: byte t of this is of the first product if t is
// even. Threads 0 and 1 of four held columns of the first product, 2 and 3 of the second.
__device__ __forceinline__ uint32_t exchange_codes(uint32_t word, uint32_t selector) {
  return __byte_perm(word, __shfl_xor_sync(~0u, word, 2), selector);
}
__device__ __forceinline__ uint32_t exchange_selector() { return threadIdx.x & 2 ? 0x3726 : 0x5140; }

__device__ __forceinline__ uint32_t scaled_pair(float low, float high, uint32_t scale) {
  const float s = __uint_as_float(scale);
  return bf16x2(__fmul_rn(low, s), __fmul_rn(high, s));
}

// Four e4m3 values of a row: the operand's registers of columns 0 to 7 and 8 to 15.
__device__ __forceinline__ void decode_float8(uint32_t word, uint32_t scale, uint32_t& first, uint32_t& second) {
  const float4 v = float8_values(word);
  first = scaled_pair(v.x, v.y, scale), second = scaled_pair(v.z, v.w, scale);
}

// Of exchanged codes: pairs 0 and 1 are of the first product, 2 and 3 of the second.
template <Coding C>
__device__ __forceinline__ void decode_codes(uint32_t word, uint32_t scale, uint32_t base, uint32_t table,
                                             uint32_t (&pairs)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t codes = word >> (4 * i);
    if constexpr (C == Coding::kInteger) {  // 128 plus a code is the bits of 128 and the code's
      const uint32_t value = mask_or(codes, 0x000f000f, 0x43004300);
      pairs[i] = multiply_bf16x2(subtract_bf16x2(value, base), scale);
    } else if constexpr (C == Coding::kE2m1) {  // so they lie in a bfloat16 whose exponent is less by 126
      const uint32_t sign = (i == 3 ? word : word << (12 - 4 * i)) & 0x80008000;
      const uint32_t size = i == 0 ? word << 6 : i == 1 ? word << 2 : i == 2 ? word >> 2 : word >> 6;
      pairs[i] = multiply_bf16x2(multiply_bf16x2(mask_or(size, 0x01c001c0, sign), 0x7e807e80), scale);
    } else {
      const uint32_t low = i < 2 ? word << (7 - 4 * i) : word >> (4 * i - 7), high = word >> (9 + 4 * i);
      const float a = __uint_as_float(lds32(mask_or(low, 0x780, table)));
      const float b = __uint_as_float(lds32(mask_or(high, 0x780, table)));
      pairs[i] = scaled_pair(a, b, scale);
    }
  }
}

// Puts 8 numbers of a row of x, from column `column` of a stage on, where the products want them.
// `row` is the address of the row's first 128 bytes, `block` from 64 columns to the next.
template <Coding C>
__device__ __forceinline__ void place_x(uint32_t row, int turn, uint32_t block, int column, uint4 v) {
  const uint32_t at = row + column / 64 * block, side = column / 8 & 1, first = column % 64 / 16 * 32;
  const auto swizzled = [&](uint32_t byte) { return at + (byte ^ turn << 4); };
  if constexpr (C == Coding::kFloat8) {
    sts64(swizzled(first + side * 8), v.x, v.z);
    sts64(swizzled(first + side * 8 + 16), v.y, v.w);
  } else {
    const uint32_t word = first + side * 4;
    sts32(swizzled(word), __byte_perm(v.x, v.y, 0x5410));
    sts32(swizzled(word + 16), __byte_perm(v.x, v.y, 0x7632));
    sts32(swizzled(word + 8), __byte_perm(v.z, v.w, 0x5410));
    sts32(swizzled(word + 24), __byte_perm(v.z, v.w, 0x7632));
  }
}

}  // namespace lora_jax
