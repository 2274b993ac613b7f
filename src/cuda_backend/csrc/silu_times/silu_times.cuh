// y = silu(gate) * up of the first num_rows rows in bfloat16, 0 in the others; one thread computes 8
// neighbouring values.
#pragma once
#include <algorithm>

#include "device/silu.cuh"

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
    p.y[i] = i < real ? silu_times_8(__ldg(p.gate + i), __ldg(p.up + i)) : make_uint4(0, 0, 0, 0);
  }
}

inline cudaError_t launch_silu_times(const SiluTimesArgs& p, cudaStream_t stream) {
  const int64_t ctas = std::min(kSiluCtas, (p.rows * p.units + kSiluThreads - 1) / kSiluThreads);
  silu_times_kernel<<<static_cast<unsigned>(ctas), kSiluThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace lora_jax
