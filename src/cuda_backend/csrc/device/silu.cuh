// The gated activation, silu(gate) * up: the same arithmetic in the epilogue of a product and in a launch of
// its own.
#pragma once
#include "device/ptx.cuh"

namespace lora_jax {

// silu(gate) up in float32, as Mosaic's kernel has it, bit for bit: exp by libdevice, a reciprocal that is not rounded
// to the nearest. XLA divides, and 4 of 1,000 bfloat16 results are others.
__device__ __forceinline__ float silu_times(float gate, float up) {
  return __fmul_rn(__fmul_rn(gate, reciprocal_approx(__fadd_rn(1.f, expf(-gate)))), up);
}

}  // namespace lora_jax
