// The products of csrc/device/wgmma.cuh, for the emulator: done at once, from the same descriptors.
#pragma once
#include "device/ptx.cuh"

namespace lora_jax {

inline uint64_t wgmma_operand(uint32_t address, uint32_t bytes = 16) {
  if (address % 16) emu::fail("an operand off its boundary of 16");
  return (address & 0x3ffff) >> 4 | static_cast<uint64_t>(bytes >> 4) << 16 | uint64_t{64} << 32 | uint64_t{1} << 62;
}
inline void wgmma_begin() {}
inline void wgmma_commit() {}
template <int PENDING>
inline void wgmma_wait() {}
template <int N>
inline void wgmma_settle(float (&)[N]) {}

// The element of an operand: row `row` of 128 bytes, column `column` there, block `block` of columns.
inline float wgmma_element(uint64_t operand, int row, int column, int block = 0) {
  const auto field = [&](int bit) { return static_cast<uint32_t>(operand >> bit & 0x3fff) << 4; };
  const uint32_t linear = field(0) + row / 8 * field(32) + row % 8 * 128 + column * 2 + block * field(16);
  uint16_t bits;
  std::memcpy(&bits, emu::at_shared(linear ^ (linear >> 7 & 7) << 4), 2);
  return emulated_float(bits);
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
inline void wgmma_columns_72(float (&d)[36], const uint32_t (&a)[4], uint64_t b) {
  struct Fragment { uint32_t a[4]; };
  const auto* slots = emu::exchange("wgmma", Fragment{{a[0], a[1], a[2], a[3]}});
  const int g = emu::lane() >> 2, q = emu::lane() & 3;
  float rows[2][16];
  for (int k = 0; k < 16; ++k)
    for (int r = 0; r < 2; ++r)
      rows[r][k] = emulated_half(emu::shown<Fragment>(slots, g * 4 + k % 8 / 2).a[r + k / 8 * 2], k & 1);
  for (int n = 0; n < 9; ++n)
    for (int c = 0; c < 2; ++c) {
      const int at = n * 8 + q * 2 + c;
      for (int r = 0; r < 2; ++r) {
        float sum = 0;
        for (int k = 0; k < 16; ++k) sum += rows[r][k] * wgmma_element(b, k, at % 64, at / 64);
        d[n * 4 + r * 2 + c] += sum;
      }
    }
}

}  // namespace lora_jax
