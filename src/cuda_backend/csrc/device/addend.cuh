// Addends of a rounded product, two numbers at a time, in float32 or bfloat16; the sum is rounded again.
#pragma once
#include "device/arithmetic.cuh"
#include "device/ptx.cuh"

namespace lora_jax {

__device__ __forceinline__ uint32_t plus_addend(uint32_t pair, const void* addend, int64_t at, bool wide) {
  if (wide) {
    const float2 f = *reinterpret_cast<const float2*>(static_cast<const float*>(addend) + at);
    return add_bf16x2(pair, f.x, f.y);
  }
  const float2 f = __bfloat1622float2(
      *reinterpret_cast<const __nv_bfloat162*>(static_cast<const __nv_bfloat16*>(addend) + at));
  return add_bf16x2(pair, f.x, f.y);
}

}  // namespace lora_jax
