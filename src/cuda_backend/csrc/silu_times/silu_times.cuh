// y = silu(gate) * up of the first num_rows rows in bfloat16, 0 in the others; one thread computes 8
// neighbouring values.
#pragma once
#include <algorithm>

#include "device/silu.cuh"
#include "device/warp_sums.cuh"

namespace lora_jax {

struct SiluTimesArgs {
  const uint4 *gate, *up;  // [rows, units] of 8 values
  const int* num_rows;
  uint4* y;
  int64_t rows, units;
};

constexpr int kSiluThreads = 256;
constexpr int64_t kSiluCtas = 16 * 132;

__global__ void __launch_bounds__(kSiluThreads) silu_times_kernel(const SiluTimesArgs p) {
  const int64_t real = min(static_cast<int64_t>(__ldg(p.num_rows)), p.rows) * p.units, all = p.rows * p.units;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kSiluThreads + threadIdx.x; i < all;
       i += static_cast<int64_t>(gridDim.x) * kSiluThreads) {
    uint32_t words[4] = {};
    if (i < real) {
      const uint4 gate = __ldg(p.gate + i), up = __ldg(p.up + i);
      const uint32_t gates[4] = {gate.x, gate.y, gate.z, gate.w}, ups[4] = {up.x, up.y, up.z, up.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 g = bf16x2_floats(gates[j]), u = bf16x2_floats(ups[j]);
        words[j] = bf16x2(silu_times(g.x, u.x), silu_times(g.y, u.y));
      }
    }
    p.y[i] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

inline cudaError_t launch_silu_times(const SiluTimesArgs& p, cudaStream_t stream) {
  const int64_t ctas = std::min(kSiluCtas, (p.rows * p.units + kSiluThreads - 1) / kSiluThreads);
  silu_times_kernel<<<static_cast<unsigned>(ctas), kSiluThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace lora_jax
