// y = f(x w^T + bias) + addend of many rows: f is gelu by tanh, or nothing; each is rounded by itself.
//
// A CTA walks over tiles of 192 rows, 64 for each of three consumer warpgroups, by 192 columns. One thread of
// a fourth warpgroup brings pieces of 64 of d_in into a ring, ahead over the borders of tiles: while one
// warpgroup stores its part, the others multiply. A row's result is one sum over d_in in steps of 16, whatever
// its tile and its neighbours.
#pragma once
#include "device/arithmetic.cuh"
#include "device/swizzled_map.cuh"
#include "device/wgmma.cuh"

namespace lora_jax {

struct DenseArgs {
  CUtensorMap x_map, w_map;
  const __nv_bfloat16* bias;    // [d_out] or null
  const __nv_bfloat16* addend;  // [rows, d_out] or null
  const int* num_rows;
  __nv_bfloat16* y;  // [rows, d_out]
  int rows, d_out, d_in;
};

constexpr int kDenseGroups = 3, kDenseRows = kDenseGroups * 64, kDenseColumns = 192, kDenseThreads = 512;
constexpr int kDenseDepth = 64, kDenseStages = 4, kDenseCtas = 132;  // SMs of a Hopper GPU
constexpr int kDenseTogether = 8;  // of a thread's tiles of 8 columns: their addends are asked for together

struct DenseShared {
  alignas(1024) unsigned char x[kDenseStages][kDenseRows * 128];
  alignas(1024) unsigned char w[kDenseStages][kDenseColumns * 128];
  uint64_t full[kDenseStages], empty[kDenseStages];
};

struct DenseRing {
  int at = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next() {
    if (++at == kDenseStages) at = 0, phase ^= 1;
  }
};

__device__ __forceinline__ float2 dense_floats(uint32_t v) {
  return __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&v));
}

// x / (1 + exp(-2 u)) is x (1 + tanh(u)) / 2.
__device__ __forceinline__ float gelu_by_tanh(float x) {
  const float u = x * __fmaf_rn(x * x, 0.044715f * 0.7978845608f, 0.7978845608f);
  return __fdividef(x, 1.f + exp2_approx(-2.f * 1.4426950408889634f * u));
}

template <bool GELU>
__device__ __forceinline__ uint32_t dense_pair(float low, float high, float2 bias) {
  const uint32_t v = bf16x2(low + bias.x, high + bias.y);
  const float2 f = dense_floats(v);
  return GELU ? bf16x2(gelu_by_tanh(f.x), gelu_by_tanh(f.y)) : v;
}

// Stores a warpgroup's 64 rows from `first` on, zeros where they are not below `count`. Of two neighbouring
// tiles of 8 columns lanes with an even place among four store the first, those with an odd one the second.
template <bool GELU, bool ADDEND>
__device__ __forceinline__ void dense_store(const DenseArgs& p, const float (&sums)[kDenseColumns / 2], int first,
                                            int column, int count) {
  const int lane = threadIdx.x & 31, q = lane & 3, odd = q & 1;
  const int row = first + static_cast<int>(threadIdx.x % 128) / 32 * 16 + lane / 4, to = column + odd * 8 + (q & 2) * 2;
  const int room = p.d_out - to, bias_room = p.bias ? p.d_out - column - q * 2 : 0;
  const __nv_bfloat16* bias = p.bias + column + q * 2;
  const int64_t at = static_cast<int64_t>(row) * p.d_out + to, eight_rows = static_cast<int64_t>(p.d_out) * 8;
#pragma unroll
  for (int part = 0; part < kDenseColumns / 8; part += kDenseTogether) {
    uint2 more[kDenseTogether / 2][2];
    if (ADDEND)
#pragma unroll
      for (int i = 0; i < kDenseTogether; ++i) {
        const int n = part + i / 2 * 2, r = i % 2;
        const bool there = row + r * 8 < count && n * 8 < room;
        more[i / 2][r] = there ? *reinterpret_cast<const uint2*>(p.addend + at + r * eight_rows + n * 8) : make_uint2(0, 0);
      }
#pragma unroll
    for (int n = part; n < part + kDenseTogether; n += 2) {
      float2 added[2] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if ((n + i) * 8 < bias_room) added[i] = dense_floats(*reinterpret_cast<const uint32_t*>(bias + (n + i) * 8));
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float* mine = sums + n * 4 + r * 2;
        const uint32_t own = dense_pair<GELU>(mine[0], mine[1], added[0]);
        const uint32_t next = dense_pair<GELU>(mine[4], mine[5], added[1]);
        const uint32_t other = __shfl_xor_sync(~0u, odd ? own : next, 1);
        uint2 v = odd ? make_uint2(other, next) : make_uint2(own, other);
        if (ADDEND) {
          const float2 a = dense_floats(more[(n - part) / 2][r].x), b = dense_floats(more[(n - part) / 2][r].y);
          v = make_uint2(add_bf16x2(v.x, a.x, a.y), add_bf16x2(v.y, b.x, b.y));
        }
        if (row + r * 8 < p.rows && n * 8 < room)
          *reinterpret_cast<uint2*>(p.y + at + r * eight_rows + n * 8) = row + r * 8 < count ? v : make_uint2(0, 0);
      }
    }
  }
}

// Rows past the last real one are zeros.
__device__ __forceinline__ void dense_clear(const DenseArgs& p, int first, int column) {
  const int pieces = min(kDenseColumns, p.d_out - column) / 8, rows = min(64, p.rows - first);
  for (int i = threadIdx.x % 128; i < rows * pieces; i += 128)
    *reinterpret_cast<uint4*>(p.y + static_cast<int64_t>(first + i / pieces) * p.d_out + column + i % pieces * 8) =
        make_uint4(0, 0, 0, 0);
}

template <bool GELU, bool ADDEND>
__global__ void __launch_bounds__(kDenseThreads, 1) dense_matmul_kernel(const __grid_constant__ DenseArgs p) {
  extern __shared__ __align__(1024) unsigned char dense_raw[];
  auto& sm = *reinterpret_cast<DenseShared*>(dense_raw);
  const int count = min(__ldg(p.num_rows), p.rows), wide = (p.d_out + kDenseColumns - 1) / kDenseColumns;
  const int tiles = (p.rows + kDenseRows - 1) / kDenseRows * wide, real = (count + kDenseRows - 1) / kDenseRows * wide;
  const int steps = (p.d_in + kDenseDepth - 1) / kDenseDepth, group = static_cast<int>(threadIdx.x) / 128 - 1;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kDenseStages; ++i) mbar_init(&sm.full[i], 1), mbar_init(&sm.empty[i], kDenseGroups);
    fence_barriers();
  }
  __syncthreads();
  DenseRing ring;
  if (group < 0) {
    fewer_registers<32>();
    if (threadIdx.x) return;
    for (int tile = blockIdx.x; tile < real; tile += gridDim.x)
      for (int step = 0; step < steps; ++step, ring.next()) {
        uint64_t* full = &sm.full[ring.at];
        mbar_wait(&sm.empty[ring.at], ring.phase ^ 1);
        mbar_expect(full, (kDenseRows + kDenseColumns) * 128);
        tile_copy(smem_u32(sm.x[ring.at]), &p.x_map, step * kDenseDepth, tile / wide * kDenseRows, 0, 0, full);
        tile_copy(smem_u32(sm.w[ring.at]), &p.w_map, step * kDenseDepth, tile % wide * kDenseColumns, 0, 0, full);
      }
    return;
  }
  more_registers<160>();
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int first = tile / wide * kDenseRows + group * 64, column = tile % wide * kDenseColumns;
    if (tile >= real) {
      dense_clear(p, first, column);
      continue;
    }
    float sums[kDenseColumns / 2];
#pragma unroll
    for (int i = 0; i < kDenseColumns / 2; ++i) sums[i] = 0;
    int before = -1;
#pragma unroll 1
    for (int step = 0; step < steps; ++step, ring.next()) {
      mbar_wait(&sm.full[ring.at], ring.phase);
      const uint32_t x = smem_u32(sm.x[ring.at]) + group * 64 * 128, w = smem_u32(sm.w[ring.at]);
      wgmma_settle(sums);
      wgmma_begin();
#pragma unroll
      for (int k = 0; k < kDenseDepth / 16; ++k)
        wgmma_rows(sums, wgmma_operand(x + k * 32), wgmma_operand(w + k * 32), true);
      wgmma_commit();
      wgmma_wait<1>();
      if (before >= 0) mbar_arrive_if(&sm.empty[before], threadIdx.x % 128 == 0);
      before = ring.at;
    }
    wgmma_wait<0>();
    wgmma_settle(sums);
    mbar_arrive_if(&sm.empty[before], threadIdx.x % 128 == 0);
    dense_store<GELU, ADDEND>(p, sums, first, column, count);
  }
}

template <bool GELU, bool ADDEND>
cudaError_t launch_dense_as(DenseArgs& p, const void* x, const void* w, cudaStream_t stream) {
  const cuuint64_t depth = p.d_in, step = depth * 2, strides[] = {step, step, step};
  const cuuint64_t of_x[] = {depth, static_cast<cuuint64_t>(p.rows), 1, 1};
  const cuuint64_t of_w[] = {depth, static_cast<cuuint64_t>(p.d_out), 1, 1};
  const cuuint32_t x_box[] = {kDenseDepth, kDenseRows, 1, 1}, w_box[] = {kDenseDepth, kDenseColumns, 1, 1};
  cudaError_t e = swizzled_map<4>(&p.x_map, x, of_x, strides, x_box);
  if (e == cudaSuccess) e = swizzled_map<4>(&p.w_map, w, of_w, strides, w_box);
  constexpr int bytes = sizeof(DenseShared);
  const auto kernel = dense_matmul_kernel<GELU, ADDEND>;
  if (e == cudaSuccess) e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (e != cudaSuccess) return e;
  const int tiles = (p.rows + kDenseRows - 1) / kDenseRows * ((p.d_out + kDenseColumns - 1) / kDenseColumns);
  kernel<<<tiles < kDenseCtas ? tiles : kDenseCtas, kDenseThreads, bytes, stream>>>(p);
  return cudaGetLastError();
}

// Everything but the maps is set in `p`; d_in and d_out are multiples of 8.
inline cudaError_t launch_dense_matmul(DenseArgs& p, const void* x, const void* w, bool gelu, cudaStream_t stream) {
  if (gelu) return p.addend ? launch_dense_as<true, true>(p, x, w, stream) : launch_dense_as<true, false>(p, x, w, stream);
  return p.addend ? launch_dense_as<false, true>(p, x, w, stream) : launch_dense_as<false, false>(p, x, w, stream);
}

}  // namespace lora_jax
