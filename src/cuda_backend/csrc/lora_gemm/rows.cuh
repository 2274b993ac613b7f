// y + s * (x A^T) B of each row's own adapter, row by row: for dtypes, widths and ranks that the tensor
// cores' kernels do not take. Every row reads its adapter itself.
//
// A CTA has one row and some of its columns, and makes all of h for them. A warp sums every fourth rank
// row's products, lane l those with k % 32 == l in order, then lanes by halves; a column sums ranks in
// order. So a row's bits depend on nothing but its own x, y and adapter.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>

#include "lora_gemm/rank_rows.cuh"

namespace lora_jax {

struct LoraRowsArgs {
  const void *x, *a_pool, *b_pool;  // [rows, d_in], [a_rows, d_in], [b_rows, d_out] of one type, or pools of int8
  void* y;                          // [rows, d_out] of that type or float
  const int* entries;               // [slots, 5]: a_offset, b_offset, rank, a_stride, b_stride
  const float* scaling;             // [slots]
  const int *row_to_slot, *row_to_expert;
  int rows, d_in, d_out, slots, max_rank;
};

constexpr int kOwnWarps = 4, kOwnColumns = 512;  // of a CTA
__host__ __device__ inline int column_parts(const LoraRowsArgs& p) { return (p.d_out + kOwnColumns - 1) / kOwnColumns; }

__device__ __forceinline__ float widen(float v) { return v; }
__device__ __forceinline__ float widen(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ void narrow(float v, float* to) { *to = v; }
__device__ __forceinline__ void narrow(float v, __nv_bfloat16* to) { *to = __float2bfloat16(v); }

__device__ __forceinline__ float widen(int8_t v) { return v; }

// Items of R from the start of a rank row to that of the next, and the factor of a row's values: int8 has it in its tail.
template <class R>
__device__ __forceinline__ int64_t row_items(int width) {
  return width + (sizeof(R) == 1 ? kInt8Tail : 0);
}
template <class R>
__device__ __forceinline__ float row_scale(const R* row, int width) {
  float scale = 1.f;
  if (sizeof(R) == 1) memcpy(&scale, row + width, sizeof scale);
  return scale;
}

template <class T, class Y, class R>
__global__ void __launch_bounds__(kOwnWarps * 32) lora_rows_kernel(const LoraRowsArgs p) {
  extern __shared__ __align__(16) unsigned char rows_raw[];
  auto* h = reinterpret_cast<float*>(rows_raw);  // [max_rank]
  const int parts = column_parts(p), row = blockIdx.x / parts, first = blockIdx.x % parts * kOwnColumns;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, slot = p.row_to_slot[row];
  if (slot < 0 || slot >= p.slots) return;
  const int *entry = p.entries + slot * 5, expert = p.row_to_expert[row], rank = min(entry[2], p.max_rank);
  if (rank <= 0) return;
  const T* x = static_cast<const T*>(p.x) + static_cast<int64_t>(row) * p.d_in;
  const int64_t a_items = row_items<R>(p.d_in), b_items = row_items<R>(p.d_out);
  const R* a = static_cast<const R*>(p.a_pool) + (entry[0] + static_cast<int64_t>(expert) * entry[3]) * a_items;
  const R* b = static_cast<const R*>(p.b_pool) + (entry[1] + static_cast<int64_t>(expert) * entry[4]) * b_items;
  for (int j = warp; j < rank; j += kOwnWarps) {
    float sum = 0.f;
#pragma unroll 4
    for (int k = lane; k < p.d_in; k += 32) sum = fmaf(widen(x[k]), widen(a[j * a_items + k]), sum);
#pragma unroll
    for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    if (lane == 0) h[j] = sum * p.scaling[slot] * row_scale(a + j * a_items, p.d_in) * row_scale(b + j * b_items, p.d_out);
  }
  __syncthreads();
  Y* y = static_cast<Y*>(p.y) + static_cast<int64_t>(row) * p.d_out;
  const int end = min(first + kOwnColumns, p.d_out);
  for (int c = first + threadIdx.x; c < end; c += kOwnWarps * 32) {
    float sum = 0.f;
#pragma unroll 4
    for (int j = 0; j < rank; ++j) sum = fmaf(h[j], widen(b[j * b_items + c]), sum);
    narrow(widen(y[c]) + sum, y + c);
  }
}

template <class T, class Y, class R = T>
cudaError_t launch_lora_rows(const LoraRowsArgs& p, cudaStream_t stream) {
  const auto kernel = lora_rows_kernel<T, Y, R>;
  kernel<<<p.rows * column_parts(p), kOwnWarps * 32, p.max_rank * sizeof(float), stream>>>(p);
  return cudaGetLastError();
}

}  // namespace lora_jax
