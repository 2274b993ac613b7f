// y = w[g] x + bias[g] in float32, for rows sorted by group: routers, norms' sums, float32 models. x in bfloat16 gives the
// bits of its float32 values.
//
// A row's sums have one order, whatever stands next to it and whichever kernel runs. Four neighbouring values of k are a
// quad. Quad t is in block t / 512, at step t / 128 % 4, in quarter t / 32 % 4 and in lane t % 32. A part is the products
// of one block, quarter and lane: fused multiply-adds in the order of k. A quarter adds its parts in the order of blocks
// and lanes. The quarters are added in order, then the bias.
//
// This file has the kernel for few rows: a thread sums one lane, so that many loads are in flight. In the kernel for many
// (grouped_f32_tiles.cuh) a thread sums all lanes of a quarter, one after the other. Tensor cores have no full float32.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "device/ptx.cuh"

namespace lora_jax {

template <class X>
struct GroupedF32Args {
  const X* x;         // [rows, d_in], float or bfloat16
  const float* w;     // [groups, d_out, d_in]
  const int* sizes;   // [groups]
  const float* bias;  // [groups, d_out] or null
  float* y;           // [rows, d_out]
  int rows, groups, d_out, d_in;
};

constexpr int kF32Quarters = 4, kF32Lanes = 32, kF32Steps = 4;
constexpr int kF32Quarter = 4 * kF32Lanes, kF32Step = kF32Quarters * kF32Quarter;  // of k
constexpr int kF32Block = kF32Steps * kF32Step;
// Of a CTA of few rows: its rows, blocks whose parts are added at once, and floats from one result's parts to the next's,
// which are then in other banks.
constexpr int kF32Rows = 4, kF32Threads = kF32Quarters * kF32Lanes, kF32Together = 2, kF32Apart = 36;

// A group and the row after its last; `index` is `groups` for rows in no group.
struct F32Group {
  int index, end;
};

// All lanes of a warp ask for the group of one row.
template <class X>
__device__ __forceinline__ F32Group group_of(const GroupedF32Args<X>& p, int row) {
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

// Four bfloat16 as they are in float32.
__device__ __forceinline__ float4 widened(uint2 pairs) {
  return make_float4(__uint_as_float(pairs.x << 16), __uint_as_float(pairs.x & 0xffff0000u),
                     __uint_as_float(pairs.y << 16), __uint_as_float(pairs.y & 0xffff0000u));
}
__device__ __forceinline__ float4 load_quad(const float* p) { return __ldg(reinterpret_cast<const float4*>(p)); }
__device__ __forceinline__ float4 load_quad(const __nv_bfloat16* p) {
  return widened(__ldg(reinterpret_cast<const uint2*>(p)));
}

__device__ __forceinline__ void add_quad(float& sum, const float4& a, const float4& b) {
  sum = fmaf(a.x, b.x, sum);
  sum = fmaf(a.y, b.y, sum);
  sum = fmaf(a.z, b.z, sum);
  sum = fmaf(a.w, b.w, sum);
}

// This lane's part of rows row..row + 3 times columns column..column + C - 1, in the block that begins at k = `first`.
template <class X, int C>
__device__ __forceinline__ void multiply_f32(const GroupedF32Args<X>& p, int group, int row, int stop, int column,
                                             int first, float (&part)[kF32Rows * C]) {
  const X* x[kF32Rows];  // past the end they read the last, for nothing
  const float* w[C];
  const int own = first + static_cast<int>(threadIdx.x) * 4;
#pragma unroll
  for (int r = 0; r < kF32Rows; ++r) x[r] = p.x + static_cast<int64_t>(min(row + r, stop - 1)) * p.d_in;
#pragma unroll
  for (int c = 0; c < C; ++c)
    w[c] = p.w + (static_cast<int64_t>(group) * p.d_out + min(column + c, p.d_out - 1)) * p.d_in;
  const auto add_step = [&](int k) {
    float4 a[kF32Rows], b[C];
#pragma unroll
    for (int r = 0; r < kF32Rows; ++r) a[r] = load_quad(x[r] + k);
#pragma unroll
    for (int c = 0; c < C; ++c) b[c] = load_quad(w[c] + k);
#pragma unroll
    for (int r = 0; r < kF32Rows; ++r)
#pragma unroll
      for (int c = 0; c < C; ++c) add_quad(part[r * C + c], a[r], b[c]);
  };
  if (first + kF32Block <= p.d_in) {
#pragma unroll
    for (int step = 0; step < kF32Steps; ++step) add_step(own + step * kF32Step);
  } else {
#pragma unroll 1
    for (int k = own; k < p.d_in; k += kF32Step) add_step(k);
  }
}

// Adds to a warp's quarter of result i, in lane i < N, the parts of its lanes, which are in `parts` block by block.
template <int N>
__device__ __forceinline__ void add_parts(const float* parts, int blocks, bool first, float* quarter) {
  const int lane = threadIdx.x & 31;
  __syncwarp();
  if (lane < N) {
    float sum = first ? 0.f : quarter[lane];
    for (int block = 0; block < blocks; ++block) {
      const float* own = parts + (block * N + lane) * kF32Apart;
#pragma unroll
      for (int i = 0; i < kF32Lanes; i += 4) {
        const float4 of_lanes = *reinterpret_cast<const float4*>(own + i);
        sum += of_lanes.x;
        sum += of_lanes.y;
        sum += of_lanes.z;
        sum += of_lanes.w;
      }
    }
    quarter[lane] = sum;
  }
  __syncwarp();
}

// CTAs of the same columns stand together, so that L2 reads their weights once.
template <class X, int C>
__global__ void __launch_bounds__(kF32Threads) grouped_f32_kernel(const GroupedF32Args<X> p) {
  constexpr int N = kF32Rows * C, kParts = kF32Together * N * kF32Apart;
  __shared__ float4 room[kF32Quarters * kParts / 4];
  __shared__ float quarters[kF32Quarters * N];
  const int tiles = (p.rows + kF32Rows - 1) / kF32Rows, tile = static_cast<int>(blockIdx.x) % tiles;
  const int last = min((tile + 1) * kF32Rows, p.rows), column = static_cast<int>(blockIdx.x) / tiles * C;
  // Of one group, as a router's, weights are on their way before it is known how many rows it has.
  const bool alone = p.groups == 1;
  const int real = alone ? load_now(p.sizes) : p.rows;
  for (int row = tile * kF32Rows; row < last;) {
    const F32Group group = alone ? F32Group{0, p.rows} : group_of(p, row);
    const int stop = min(last, group.end);
    if (group.index < p.groups) {
      for (int first = 0; first < p.d_in; first += kF32Block) {
        float part[N] = {};
        multiply_f32<X, C>(p, group.index, row, stop, column, first, part);
        const int tid = thread_anew(), lane = tid & 31, warp = tid >> 5, kept = first / kF32Block % kF32Together;
        float* parts = reinterpret_cast<float*>(room) + warp * kParts;
#pragma unroll
        for (int i = 0; i < N; ++i) parts[(kept * N + i) * kF32Apart + lane] = part[i];
        if (kept + 1 == kF32Together || first + kF32Block >= p.d_in)
          add_parts<N>(parts, kept + 1, first < kF32Together * kF32Block, quarters + warp * N);
      }
      __syncthreads();
      const int tid = thread_anew(), r = row + tid / C, c = column + tid % C;
      if (tid < N && r < stop && c < p.d_out) {
        float result = quarters[tid];
#pragma unroll
        for (int q = 1; q < kF32Quarters; ++q) result += quarters[q * N + tid];
        if (p.bias) result += __ldg(p.bias + static_cast<int64_t>(group.index) * p.d_out + c);
        p.y[static_cast<int64_t>(r) * p.d_out + c] = r < real ? result : 0.f;
      }
      __syncthreads();
    } else {
      const int r = row + static_cast<int>(threadIdx.x) / C, c = column + static_cast<int>(threadIdx.x) % C;
      if (r < stop && c < p.d_out) p.y[static_cast<int64_t>(r) * p.d_out + c] = 0.f;
    }
    row = stop;
  }
}

}  // namespace lora_jax
