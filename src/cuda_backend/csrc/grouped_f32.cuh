// y = w[g] x + bias[g] in float32, for rows sorted by group: routers, norms' sums, float32 models.
//
// A warp owns 4 rows x 4 columns: lane l takes the k with k / 4 % 32 == l in order, then lanes are
// added by halves. So a row's sums have one order, whatever stands next to it. Tensor cores have no
// full float32; the caches' bandwidth bounds this at about half of the multiply-add rate.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

namespace lora_jax {

struct GroupedF32Args {
  const float* x;     // [rows, d_in]
  const float* w;     // [groups, d_out, d_in]
  const int* sizes;   // [groups]
  const float* bias;  // [groups, d_out] or null
  float* y;           // [rows, d_out]
  int rows, groups, d_out, d_in;
};

constexpr int kF32Warps = 4, kF32Rows = 4, kF32Columns = 4;

// A group and the row after its last; `index` is `groups` for rows in no group.
struct F32Group {
  int index, end;
};

// All lanes of a warp ask for the group of one row.
__device__ __forceinline__ F32Group group_of(const GroupedF32Args& p, int row) {
  const int lane = threadIdx.x & 31;
  int before = 0;
  for (int base = 0; base < p.groups; base += 32) {
    int ends = base + lane < p.groups ? __ldg(p.sizes + base + lane) : 0;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(~0u, ends, d);
      if (lane >= d) ends += other;
    }
    int passed = before + ends <= row;
#pragma unroll
    for (int d = 16; d; d /= 2) passed += __shfl_xor_sync(~0u, passed, d);
    if (passed < 32) return {base + passed, before + __shfl_sync(~0u, ends, passed)};
    before += __shfl_sync(~0u, ends, 31);
  }
  return {p.groups, p.rows};
}

__device__ __forceinline__ void multiply_f32(const GroupedF32Args& p, int group, int row, int stop, int column) {
  const int lane = threadIdx.x & 31;
  const float *x[kF32Rows], *w[kF32Columns];  // past the end they read the last, for nothing
#pragma unroll
  for (int r = 0; r < kF32Rows; ++r) x[r] = p.x + static_cast<int64_t>(min(row + r, stop - 1)) * p.d_in;
#pragma unroll
  for (int c = 0; c < kF32Columns; ++c)
    w[c] = p.w + (static_cast<int64_t>(group) * p.d_out + min(column + c, p.d_out - 1)) * p.d_in;
  float acc[kF32Rows][kF32Columns] = {};
#pragma unroll 2
  for (int k = lane * 4; k < p.d_in; k += 128) {
    float4 a[kF32Rows], b[kF32Columns];
#pragma unroll
    for (int r = 0; r < kF32Rows; ++r) a[r] = __ldg(reinterpret_cast<const float4*>(x[r] + k));
#pragma unroll
    for (int c = 0; c < kF32Columns; ++c) b[c] = __ldg(reinterpret_cast<const float4*>(w[c] + k));
#pragma unroll
    for (int r = 0; r < kF32Rows; ++r)
#pragma unroll
      for (int c = 0; c < kF32Columns; ++c) {
        acc[r][c] = fmaf(a[r].x, b[c].x, acc[r][c]);
        acc[r][c] = fmaf(a[r].y, b[c].y, acc[r][c]);
        acc[r][c] = fmaf(a[r].z, b[c].z, acc[r][c]);
        acc[r][c] = fmaf(a[r].w, b[c].w, acc[r][c]);
      }
  }
#pragma unroll
  for (int r = 0; r < kF32Rows; ++r)
#pragma unroll
    for (int c = 0; c < kF32Columns; ++c) {
#pragma unroll
      for (int d = 16; d; d /= 2) acc[r][c] += __shfl_xor_sync(~0u, acc[r][c], d);
      if (lane == r * kF32Columns + c && row + r < stop && column + c < p.d_out)
        p.y[static_cast<int64_t>(row + r) * p.d_out + column + c] =
            acc[r][c] + (p.bias ? __ldg(p.bias + static_cast<int64_t>(group) * p.d_out + column + c) : 0.f);
    }
}

// Blocks of the same columns stand together, so that L2 reads their weights once.
__global__ void __launch_bounds__(kF32Warps * 32) grouped_f32_kernel(const GroupedF32Args p) {
  const int tiles = (p.rows + kF32Rows - 1) / kF32Rows, tile = static_cast<int>(blockIdx.x) % tiles;
  const int lane = threadIdx.x & 31, last = min((tile + 1) * kF32Rows, p.rows);
  const int column = (static_cast<int>(blockIdx.x) / tiles * kF32Warps + static_cast<int>(threadIdx.x >> 5)) * kF32Columns;
  if (column >= p.d_out) return;
  for (int row = tile * kF32Rows; row < last;) {
    const F32Group group = group_of(p, row);
    const int stop = min(last, group.end);
    if (group.index < p.groups) {
      multiply_f32(p, group.index, row, stop, column);
    } else if (lane < kF32Columns && column + lane < p.d_out) {
      for (int r = row; r < stop; ++r) p.y[static_cast<int64_t>(r) * p.d_out + column + lane] = 0.f;
    }
    row = stop;
  }
}

inline cudaError_t launch_grouped_f32(const GroupedF32Args& p, cudaStream_t stream) {
  constexpr int columns = kF32Warps * kF32Columns;
  const int64_t blocks = static_cast<int64_t>((p.rows + kF32Rows - 1) / kF32Rows) * ((p.d_out + columns - 1) / columns);
  grouped_f32_kernel<<<static_cast<unsigned>(blocks), kF32Warps * 32, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace lora_jax
