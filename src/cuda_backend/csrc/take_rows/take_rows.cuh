// y[r] = x[row_to_row[r]] for the first num_rows rows. A warp copies a row; all loads of the row are issued
// before its first store.
#pragma once
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

namespace lora_jax {

struct TakeRowsArgs {
  const uint4* x;  // [_, units] of 16 bytes
  const int* row_to_row;
  const int* num_rows;
  uint4* y;  // [rows, units]
  int rows, units;
};

constexpr int kTakeWarps = 8, kTakeLoads = 8, kTakeCtas = 8 * 132;  // loads of a thread at once: 4 KiB of a row

__global__ void __launch_bounds__(kTakeWarps * 32) take_rows_kernel(const TakeRowsArgs p) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, rows = min(__ldg(p.num_rows), p.rows);
  for (int row = blockIdx.x * kTakeWarps + warp; row < rows; row += gridDim.x * kTakeWarps) {
    const uint4* from = p.x + static_cast<int64_t>(__ldg(p.row_to_row + row)) * p.units;
    uint4* to = p.y + static_cast<int64_t>(row) * p.units;
    for (int unit = lane; unit < p.units; unit += 32 * kTakeLoads) {
      uint4 v[kTakeLoads];
#pragma unroll
      for (int u = 0; u < kTakeLoads; ++u)
        if (unit + 32 * u < p.units) v[u] = __ldg(from + unit + 32 * u);
#pragma unroll
      for (int u = 0; u < kTakeLoads; ++u)
        if (unit + 32 * u < p.units) to[unit + 32 * u] = v[u];
    }
  }
}

inline cudaError_t launch_take_rows(const TakeRowsArgs& p, cudaStream_t stream) {
  const int ctas = std::min(kTakeCtas, (p.rows + kTakeWarps - 1) / kTakeWarps);
  take_rows_kernel<<<ctas, kTakeWarps * 32, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace lora_jax
