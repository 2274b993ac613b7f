// Decodes weights of 8 and 4 bits in the registers of mma's first operand; bfloat16 weights are used as they
// are.
//
// A stage holds 128 bytes of each row of weights, of bfloat16 twice as much. `ldmatrix` gives a thread four neighbouring bytes of a row.
// Codes of 4 bits lie in the order that mma wants (`order` in ops/grouped_matmul/weights.py): a word's
// half-words are two columns, their four nibbles those 8, 16 and 24 columns on. Of 8 bits the four bytes are four
// neighbouring columns: the 16 columns of a product are taken in another order, in x too. A product adds its 16
// columns at once: their order changes no bit.
// Values are computed as ops/grouped_matmul/weights.py says, in float32, and rounded once.
#pragma once
#include "device/arithmetic.cuh"
#include "grouped_matmul/few_rows_affine.cuh"

namespace lora_jax {

// Integers and E2M1 have scales in bfloat16 here, whose products need no float32; the others float32. Affine are
// integers with scales of either and with zero points (few_rows_affine.cuh).
enum class Coding { kFloat8, kInteger, kE2m1, kTable, kPlain, kAffine };

constexpr int kRowBytes = 128;  // of a row of weights in a block of a stage, or of 64 columns of x
// Blocks of a stage. A warp takes 150 ns from one stage to the next: of one block each, the 224 stages of Llama-3.1-8B's
// down map made one row take 39 us on an H200, of two 31.
template <Coding C>
constexpr int kBlocks = C == Coding::kPlain ? 2 : 1;
template <Coding C>
constexpr int kStepColumns = C == Coding::kFloat8 || C == Coding::kPlain ? 128 : 256;  // of d_in in a stage
template <Coding C>
constexpr int kScaleBytes = C == Coding::kInteger || C == Coding::kE2m1 ? 2 : 4;
constexpr int kTableRepeats = 32;  // a lane reads a table of its own: no bank is asked twice
constexpr uint32_t kTableBytes = 16 * 4 * kTableRepeats;

// Scales of a row in a stage, one for G columns though more may share it, and their words.
template <Coding C, int G>
constexpr int kSlots = C == Coding::kPlain ? 0 : (kStepColumns<C> + G - 1) / G;
template <Coding C, int G>
constexpr int scale_words() {
  constexpr int slots = kSlots<C, G>;
  return C == Coding::kAffine ? kAffineScaleWords<slots> + kAffineZeroWords<slots> : slots * kScaleBytes<C> / 4;
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
// The scale of a column of a stage: bits of a float32, or two bfloat16.
template <Coding C, int G, int N>
__device__ __forceinline__ uint32_t scale_of(const uint32_t (&words)[N], int column) {
  const int at = column / G;
  if constexpr (kScaleBytes<C> == 4) return words[at];
  return __byte_perm(words[at / 2], 0, at % 2 ? 0x3232 : 0x1010);
}

// Codes become subnormal numbers, which a product with a power of two and the scale makes whole at once.
// That product is of a bfloat16 as long as the scale is below this power of two.
template <Coding C>
constexpr bool kWideScales = C == Coding::kInteger || C == Coding::kE2m1 || C == Coding::kAffine;
constexpr uint32_t kNibble = 0x00f000f0;            // code c is c times 2^-129 there
constexpr uint32_t kTwoTo100 = 0x71807180, kTwoTo29 = 0x4e004e00, kTwoTo126 = 0x7e807e80;
// Whether any of some scales is too large: 0.5 and more for integers, 2 for E2M1. By their exponents.
template <Coding C, int TILES, int N>
__device__ __forceinline__ bool are_wide(const uint32_t (&scales)[TILES][2][N]) {
  uint32_t any = 0;
#pragma unroll
  for (int i = 0; i < TILES * 2 * N; ++i) {
    const uint32_t size = scales[i / (2 * N)][i / N % 2][i % N] & 0x7fff7fff;
    any |= C == Coding::kInteger ? size + 0x01000100 : size;
  }
  return any & 0xc000c000;
}

__device__ __forceinline__ uint32_t scaled_pair(float low, float high, uint32_t scale) {
  const float s = __uint_as_float(scale);
  return bf16x2(__fmul_rn(low, s), __fmul_rn(high, s));
}

template <Coding C, int G, bool WIDE>
struct Decoder {
  float first;     // of kInteger: the value of code 0
  uint32_t table;  // of kTable: where this lane's is

  // Puts a word's weights in operands a: those of products of 16 columns that begin at `column` of a stage.
  // `half` says which half of the operands they are of, `high` that they are of the rows 8 further.
  template <int K, int N>
  __device__ __forceinline__ void decode(uint32_t word, const uint32_t (&scales)[N], int column, int half, int high,
                                         uint32_t (&a)[K][4]) const {
    const uint32_t scale = scale_of<C, G>(scales, column);
    if constexpr (C == Coding::kFloat8) {
      const float4 v = float8_values(word);
      a[half][high] = scaled_pair(v.x, v.y, scale), a[half][2 + high] = scaled_pair(v.z, v.w, scale);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[half * 2 + i / 2][i % 2 * 2 + high] = pair(word, i, scale);
    }
  }

  // Columns 8 i and 8 i + 1 of a word's.
  __device__ __forceinline__ uint32_t pair(uint32_t word, int i, uint32_t scale) const {
    if constexpr (C == Coding::kInteger) {  // (c + first) scale, rounded once: first is 0 or a power of two
      const uint32_t codes = (i == 0 ? word << 4 : word >> (4 * i - 4)) & kNibble;
      const uint32_t less = multiply_bf16x2(scale, bf16x2(first, first));
      if constexpr (WIDE)
        return fma_bf16x2(multiply_bf16x2(multiply_bf16x2(codes, kTwoTo100), kTwoTo29), scale, less);
      return fma_bf16x2(codes, multiply_bf16x2(multiply_bf16x2(scale, kTwoTo100), kTwoTo29), less);
    } else if constexpr (C == Coding::kE2m1) {  // lies so in a bfloat16 whose exponent is less by 126
      const uint32_t sign = (i == 3 ? word : word << (12 - 4 * i)) & 0x80008000;
      const uint32_t size = i < 2 ? word << (6 - 4 * i) : word >> (4 * i - 6);
      const uint32_t value = mask_or(size, 0x01c001c0, sign);
      if constexpr (WIDE) return multiply_bf16x2(multiply_bf16x2(value, kTwoTo126), scale);
      return multiply_bf16x2(value, multiply_bf16x2(scale, kTwoTo126));
    } else {
      const uint32_t low = i < 2 ? word << (7 - 4 * i) : word >> (4 * i - 7), high = word >> (9 + 4 * i);
      const float a = __uint_as_float(lds32(mask_or(low, 0x780, table)));
      const float b = __uint_as_float(lds32(mask_or(high, 0x780, table)));
      return scaled_pair(a, b, scale);
    }
  }
};

// Where a thread reads 8 rows of x as the second operand of two products of 16 columns. Of 8 bits a thread has
// the four columns of its four bytes.
template <Coding C>
struct XPlaces {
  uint32_t places[2][C == Coding::kFloat8 ? 2 : 1];  // of 32 of 64 columns
  __device__ __forceinline__ XPlaces() {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if constexpr (C == Coding::kFloat8) {
#pragma unroll
        for (int k = 0; k < 2; ++k)
          places[i][k] = lane / 4 * kRowBytes + (((i * 4 + k * 2 + lane % 4 / 2) ^ lane / 4) << 4) + lane % 2 * 8;
      } else {
        places[i][0] = lane % 8 * kRowBytes + (((i * 4 + lane / 8) ^ lane % 8) << 4);
      }
  }
  // `block` is from 64 columns to the next.
  __device__ __forceinline__ void load(uint32_t (&v)[4], uint32_t x, int column, uint32_t block) const {
    const auto& at = places[column / 32 % 2];
    const uint32_t base = x + column / 64 * block;
    if constexpr (C == Coding::kFloat8) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint2 two = lds64(base + at[k]);
        v[k * 2] = two.x, v[k * 2 + 1] = two.y;
      }
    } else {
      ldmatrix(v, base + at[0]);
    }
  }
};

}  // namespace lora_jax
