// The products of csrc/device/wgmma_few.cuh, for the emulator.
#pragma once
#include "device/wgmma.cuh"

namespace lora_jax {

inline uint32_t wgmma_place(uint32_t address) {
  if (address % 16) emu::fail("an operand off its boundary of 16");
  return uniform(static_cast<int>((address & 0x3ffff) >> 4 | 0x10000));
}
inline uint64_t wgmma_at(uint32_t place) { return uint64_t{0x40000040} << 32 | place; }
template <int N>
inline void wgmma_few(float (&d)[N], const uint32_t (&a)[4], uint64_t b) {
  struct Fragment { uint32_t a[4]; };
  const auto* slots = emu::exchange("wgmma", Fragment{{a[0], a[1], a[2], a[3]}});
  const int g = emu::lane() >> 2, q = emu::lane() & 3;
  float rows[2][16];
  for (int k = 0; k < 16; ++k)
    for (int r = 0; r < 2; ++r)
      rows[r][k] = emulated_half(emu::shown<Fragment>(slots, g * 4 + k % 8 / 2).a[r + k / 8 * 2], k & 1);
  for (int n = 0; n < N / 4; ++n)
    for (int c = 0; c < 2; ++c)
      for (int r = 0; r < 2; ++r) {
        float sum = 0;
        for (int k = 0; k < 16; ++k) sum += rows[r][k] * wgmma_element(b, n * 8 + q * 2 + c, k);
        d[n * 4 + r * 2 + c] += sum;
      }
}

}  // namespace lora_jax
