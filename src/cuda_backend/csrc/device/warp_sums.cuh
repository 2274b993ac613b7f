// Sums over the lanes of a warp in one fixed order, and conversions of their operands.
#pragma once
#include "device/ptx.cuh"

namespace lora_jax {

// In all lanes: neighbours 16 apart are added first.
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int d = 16; d; d /= 2) v += __shfl_xor_sync(~0u, v, d);
  return v;
}
__device__ __forceinline__ float2 bf16x2_floats(uint32_t two) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&two));
}

}  // namespace lora_jax
