// The gated activation, silu(gate) * up: the same arithmetic in the epilogue of a product and in a launch of
// its own.
#pragma once
#include "device/arithmetic.cuh"
#include "device/warp_sums.cuh"

namespace lora_jax {

// silu(gate) up in float32, as Mosaic's kernel has it, bit for bit: exp by libdevice, a reciprocal that is not rounded
// to the nearest. XLA divides, and 4 of 1,000 bfloat16 results are others.
__device__ __forceinline__ float silu_times(float gate, float up) {
  return __fmul_rn(__fmul_rn(gate, reciprocal_approx(__fadd_rn(1.f, expf(-gate)))), up);
}
// Of two, and of 8 bfloat16 values, rounded once.
__device__ __forceinline__ uint32_t silu_times_2(uint32_t gate, uint32_t up) {
  const float2 g = bf16x2_floats(gate), u = bf16x2_floats(up);
  return bf16x2(silu_times(g.x, u.x), silu_times(g.y, u.y));
}
__device__ __forceinline__ uint4 silu_times_8(const uint4& gate, const uint4& up) {
  return make_uint4(silu_times_2(gate.x, up.x), silu_times_2(gate.y, up.y), silu_times_2(gate.z, up.z),
                    silu_times_2(gate.w, up.w));
}

}  // namespace lora_jax
