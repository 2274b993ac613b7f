// Products of a warpgroup (wgmma) over few columns: 64 rows of weights by N rows of x, both along d_in.
//
// As wgmma.cuh says; the first operand is this warp's operand of mma.
#pragma once
#include "device/wgmma.cuh"

namespace lora_jax {

// What wgmma_operand gives, by its low word, which is the same in all lanes; 16 columns on it is 2 more.
__device__ __forceinline__ uint32_t wgmma_place(uint32_t address) {
  return uniform(static_cast<int>((address & 0x3ffff) >> 4 | 0x10000));
}
__device__ __forceinline__ uint64_t wgmma_at(uint32_t place) {
  uint64_t v;
  asm("mov.b64 %0, {%1, %2};" : "=l"(v) : "r"(place), "r"(0x40000040));
  return v;
}
__device__ __forceinline__ void wgmma_few(float (&d)[4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3"
      "}, {%4, %5, %6, %7}, %8, 1, 1, 1, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void wgmma_few(float (&d)[8], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7"
      "}, {%8, %9, %10, %11}, %12, 1, 1, 1, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

}  // namespace lora_jax
