// The products of csrc/device/wgmma.cuh, for the emulator: done at once, from the same descriptors.
#pragma once
#include "device/ptx.cuh"

namespace lora_jax {

inline uint64_t wgmma_operand(uint32_t address) {
  if (address % 16) emu::fail("an operand off its boundary of 16");
  return (address & 0x3ffff) >> 4 | uint64_t{1} << 16 | uint64_t{64} << 32 | uint64_t{1} << 62;
}
inline uint64_t wgmma_pieces(uint32_t address, uint32_t along, uint32_t across) {
  if ((address | along | across) % 16) emu::fail("an operand off its boundary of 16");
  return (address & 0x3ffff) >> 4 | uint64_t{along >> 4} << 16 | uint64_t{across >> 4} << 32;
}
struct WgmmaOperand {
  uint32_t low, high;
  uint64_t at(uint32_t bytes) const { return uint64_t{high} << 32 | (low + (bytes >> 4)); }
};
inline WgmmaOperand wgmma_lines(uint32_t address) {
  const uint64_t operand = wgmma_operand(address);
  return {static_cast<uint32_t>(operand), static_cast<uint32_t>(operand >> 32)};
}
inline WgmmaOperand wgmma_turned(uint32_t address, uint32_t apart) {
  const WgmmaOperand lines = wgmma_lines(address);
  return {(lines.low & 0x3fff) | apart >> 4 << 16, lines.high};
}
inline void wgmma_begin() {}
inline void wgmma_commit() {}
template <int PENDING>
inline void wgmma_wait() {}
template <int N>
inline void wgmma_settle(float (&)[N]) {}

inline uint32_t wgmma_field(uint64_t operand, int bit) { return static_cast<uint32_t>(operand >> bit & 0x3fff) << 4; }
inline float wgmma_value(uint32_t address) {
  uint16_t bits;
  std::memcpy(&bits, emu::at_shared(address), 2);
  return emulated_float(bits);
}
// The element of an operand whose columns, along which sums go, lie beside each other.
inline float wgmma_element(uint64_t operand, int row, int column) {
  const uint32_t first = wgmma_field(operand, 0), across = wgmma_field(operand, 32);
  if (operand >> 62 == 0)
    return wgmma_value(first + row / 8 * across + row % 8 * 16 + column / 8 * wgmma_field(operand, 16) + column % 8 * 2);
  const uint32_t linear = first + row / 8 * across + row % 8 * 128 + column * 2;
  return wgmma_value(linear ^ (linear >> 7 & 7) << 4);
}
// The same of one in pieces whose other elements do: `k` is the place along the sum.
inline float wgmma_across(uint64_t operand, int k, int n) {
  if (operand >> 62) {  // 64 of them make a swizzled row of 128 bytes
    const uint32_t linear = wgmma_field(operand, 0) + n / 64 * wgmma_field(operand, 16) + n % 64 * 2 +
                            k / 8 * wgmma_field(operand, 32) + k % 8 * 128;
    return wgmma_value(linear ^ (linear >> 7 & 7) << 4);
  }
  return wgmma_value(wgmma_field(operand, 0) + n / 8 * wgmma_field(operand, 32) + n % 8 * 2 +
                     k / 8 * wgmma_field(operand, 16) + k % 8 * 16);
}
template <int N>
inline void wgmma_rows(float (&d)[N], uint64_t a, uint64_t b, bool add) {
  const int warp = threadIdx.x % 128 / 32, g = emu::lane() >> 2, q = emu::lane() & 3;
  float rows[2][16];
  for (int r = 0; r < 2; ++r)
    for (int k = 0; k < 16; ++k) rows[r][k] = wgmma_element(a, warp * 16 + g + r * 8, k);
  for (int n = 0; n < N / 4; ++n)
    for (int c = 0; c < 2; ++c) {
      float column[16];
      for (int k = 0; k < 16; ++k) column[k] = wgmma_element(b, n * 8 + q * 2 + c, k);
      for (int r = 0; r < 2; ++r) {
        float sum = 0;
        for (int k = 0; k < 16; ++k) sum += rows[r][k] * column[k];
        float& to = d[n * 4 + r * 2 + c];
        to = add ? to + sum : sum;
      }
    }
}
// This warp's rows g and g + 8 of an operand of mma.
inline void wgmma_fragment(const uint32_t (&a)[4], float (&rows)[2][16]) {
  struct Fragment { uint32_t a[4]; };
  const auto* slots = emu::exchange("wgmma", Fragment{{a[0], a[1], a[2], a[3]}});
  const int g = emu::lane() >> 2;
  for (int k = 0; k < 16; ++k)
    for (int r = 0; r < 2; ++r)
      rows[r][k] = emulated_half(emu::shown<Fragment>(slots, g * 4 + k % 8 / 2).a[r + k / 8 * 2], k & 1);
}
template <int N>
inline void wgmma_keys(float (&d)[N], const uint32_t (&a)[4], uint64_t b, bool add) {
  float rows[2][16];
  wgmma_fragment(a, rows);
  for (int n = 0; n < N / 4; ++n)
    for (int c = 0; c < 2; ++c)
      for (int r = 0; r < 2; ++r) {
        float sum = 0;
        for (int k = 0; k < 16; ++k) sum += rows[r][k] * wgmma_element(b, n * 8 + (emu::lane() & 3) * 2 + c, k);
        float& to = d[n * 4 + r * 2 + c];
        to = add ? to + sum : sum;
      }
}
template <int N>
inline void wgmma_columns(float (&d)[N], const uint32_t (&a)[4], uint64_t b) {
  float rows[2][16];
  wgmma_fragment(a, rows);
  for (int n = 0; n < N / 4; ++n)
    for (int c = 0; c < 2; ++c)
      for (int r = 0; r < 2; ++r) {
        float sum = 0;
        for (int k = 0; k < 16; ++k) sum += rows[r][k] * wgmma_across(b, k, n * 8 + (emu::lane() & 3) * 2 + c);
        d[n * 4 + r * 2 + c] += sum;
      }
}

}  // namespace lora_jax
