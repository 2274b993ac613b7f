// The numbers of csrc/device/arithmetic.cuh, for the emulator.
#pragma once
#include "cuda_emulator.h"

namespace lora_jax {

inline float emulated_half(uint32_t pair, int which) { return emulated_float(static_cast<uint16_t>(pair >> 16 * which)); }
inline float reciprocal_approx(float x) { return 1 / x; }
inline float exp2_approx(float x) { return std::exp2f(x); }

inline uint32_t bf16x2(float lo, float hi) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
  return v.x.bits | static_cast<uint32_t>(v.y.bits) << 16;
}
inline float float8_value(uint32_t byte) {
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  const float size = exponent ? std::ldexp(8.f + mantissa, exponent - 10) : std::ldexp(float(mantissa), -9);
  return (byte & 127) == 127 ? NAN : byte & 128 ? -size : size;
}
inline float4 float8_values(uint32_t word) {
  return {float8_value(word & 255), float8_value(word >> 8 & 255), float8_value(word >> 16 & 255), float8_value(word >> 24)};
}
inline uint32_t mask_or(uint32_t word, uint32_t mask, uint32_t more) { return (word & mask) | more; }
inline uint32_t subtract_bf16x2(uint32_t a, uint32_t b) {
  return bf16x2(emulated_half(a, 0) - emulated_half(b, 0), emulated_half(a, 1) - emulated_half(b, 1));
}
inline uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  return bf16x2(emulated_half(a, 0) * emulated_half(b, 0), emulated_half(a, 1) * emulated_half(b, 1));
}
inline uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  const auto one = [&](int i) { return static_cast<float>(double{emulated_half(a, i)} * emulated_half(b, i) + emulated_half(c, i)); };
  return bf16x2(one(0), one(1));
}
inline uint32_t add_bf16x2(uint32_t y, float lo, float hi) {
  return bf16x2(emulated_half(y, 0) + lo, emulated_half(y, 1) + hi);
}

}  // namespace lora_jax
