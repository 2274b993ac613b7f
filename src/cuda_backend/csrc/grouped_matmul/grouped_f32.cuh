// y = w[g] x + bias[g] in float32, for rows sorted by group: routers, norms' sums, float32 models.
//
// A CTA owns 4 rows x C columns, of whose k each warp takes every fourth 128: lane l those with
// k / 4 % 32 == l in order; then lanes are added by halves, and warps in order. So a row's sums have
// one order, whatever stands next to it, and few rows still keep many loads in flight. Tensor cores
// have no full float32; the caches' bandwidth bounds this at about half of the multiply-add rate.
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

constexpr int kF32Warps = 4, kF32Rows = 4;

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

// Adds N values of all lanes, each by halves of the warp; lane l returns value l / (32 / N). Half of the values stay in
// a lane at each of the first steps: with N = 16, 16 exchanges in place of 80, of the same pairs in the same order.
template <int N>
__device__ __forceinline__ float add_lanes(float (&v)[N]) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int d = 16, half = N / 2; d; d /= 2, half /= 2) {
    if (half) {
      const bool upper = lane & d;
#pragma unroll
      for (int i = 0; i < N / 2; ++i)
        if (i < half) {
          const float sent = upper ? v[i] : v[i + half], kept = upper ? v[i + half] : v[i];
          v[i] = kept + __shfl_xor_sync(~0u, sent, d);
        }
    } else {
      v[0] += __shfl_xor_sync(~0u, v[0], d);
    }
  }
  return v[0];
}

// This lane's part of rows row..row + 3 times columns column..column + C - 1.
template <int C>
__device__ __forceinline__ void multiply_f32(const GroupedF32Args& p, int group, int row, int stop, int column,
                                             float (&acc)[kF32Rows * C]) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const float *x[kF32Rows], *w[C];  // past the end they read the last, for nothing
#pragma unroll
  for (int r = 0; r < kF32Rows; ++r) x[r] = p.x + static_cast<int64_t>(min(row + r, stop - 1)) * p.d_in;
#pragma unroll
  for (int c = 0; c < C; ++c) w[c] = p.w + (static_cast<int64_t>(group) * p.d_out + min(column + c, p.d_out - 1)) * p.d_in;
#pragma unroll 4
  for (int k = warp * 128 + lane * 4; k < p.d_in; k += kF32Warps * 128) {
    float4 a[kF32Rows], b[C];
#pragma unroll
    for (int r = 0; r < kF32Rows; ++r) a[r] = __ldg(reinterpret_cast<const float4*>(x[r] + k));
#pragma unroll
    for (int c = 0; c < C; ++c) b[c] = __ldg(reinterpret_cast<const float4*>(w[c] + k));
#pragma unroll
    for (int r = 0; r < kF32Rows; ++r)
#pragma unroll
      for (int c = 0; c < C; ++c) {
        float& sum = acc[r * C + c];
        sum = fmaf(a[r].x, b[c].x, sum);
        sum = fmaf(a[r].y, b[c].y, sum);
        sum = fmaf(a[r].z, b[c].z, sum);
        sum = fmaf(a[r].w, b[c].w, sum);
      }
  }
}

// Adds the lanes' parts, then the warps' in order; thread r * C + c writes one result.
template <int C>
__device__ __forceinline__ void store_f32(const GroupedF32Args& p, int group, int row, int stop, int column, int* room,
                                          float (&acc)[kF32Rows * C]) {
  constexpr int kLanes = 32 / (kF32Rows * C);  // that have the same value
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, tid = threadIdx.x;
  auto* parts = reinterpret_cast<float*>(room);
  const float of_lanes = add_lanes(acc);
  if (lane % kLanes == 0) parts[warp * kF32Rows * C + lane / kLanes] = of_lanes;
  __syncthreads();
  const int r = tid / C, c = column + tid % C;
  if (tid < kF32Rows * C && row + r < stop && c < p.d_out) {
    float sum = parts[tid];
#pragma unroll
    for (int v = 1; v < kF32Warps; ++v) sum += parts[v * kF32Rows * C + tid];
    if (p.bias) sum += __ldg(p.bias + static_cast<int64_t>(group) * p.d_out + c);
    p.y[static_cast<int64_t>(row + r) * p.d_out + c] = sum;
  }
  __syncthreads();
}

// CTAs of the same columns stand together, so that L2 reads their weights once.
template <int C>
__global__ void __launch_bounds__(kF32Warps * 32) grouped_f32_kernel(const GroupedF32Args p) {
  __shared__ int room[kF32Warps * kF32Rows * 4];
  const int tiles = (p.rows + kF32Rows - 1) / kF32Rows, tile = static_cast<int>(blockIdx.x) % tiles;
  const int last = min((tile + 1) * kF32Rows, p.rows), column = static_cast<int>(blockIdx.x) / tiles * C;
  for (int row = tile * kF32Rows; row < last;) {
    const F32Group group = group_of(p, row);
    const int stop = min(last, group.end), c = column + static_cast<int>(threadIdx.x);
    if (group.index < p.groups) {
      float acc[kF32Rows * C] = {};
      multiply_f32<C>(p, group.index, row, stop, column, acc);
      store_f32<C>(p, group.index, row, stop, column, room, acc);
    } else if (threadIdx.x < C && c < p.d_out) {
      for (int r = row; r < stop; ++r) p.y[static_cast<int64_t>(r) * p.d_out + c] = 0.f;
    }
    row = stop;
  }
}

template <int C>
cudaError_t launch_f32_columns(const GroupedF32Args& p, cudaStream_t stream) {
  const int64_t ctas = static_cast<int64_t>((p.rows + kF32Rows - 1) / kF32Rows) * ((p.d_out + C - 1) / C);
  const auto kernel = grouped_f32_kernel<C>;
  kernel<<<static_cast<unsigned>(ctas), kF32Warps * 32, 0, stream>>>(p);
  return cudaGetLastError();
}

// Which of the two does not depend on the rows.
inline cudaError_t launch_grouped_f32(const GroupedF32Args& p, cudaStream_t stream) {
  return p.d_out == 1 ? launch_f32_columns<1>(p, stream) : launch_f32_columns<4>(p, stream);
}

}  // namespace lora_jax
