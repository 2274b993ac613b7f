// y = w x + bias by tensor cores, x in bfloat16, w and y in float32, of one group: a router's logits.
//
// A weight is cut into three bfloat16 numbers whose sum it is, if it is finite, not above the largest bfloat16 number, and
// its last bit not below 2^-133: its products are exact then, and only sums are rounded. Other weights give NaN or lose
// bits. Weights that are bfloat16 numbers have parts of zeros, which are left out; an infinite x gives NaN by those that
// are not.
//
// A row's sums have one order, whatever stands next to it. d_in is cut into units of 32 values and these into 16 slices of
// neighbours. A slice is a chain of tensor-core products: unit by unit, of a unit two steps of 16 values, of a step the
// three parts, first to last. Of a unit's eight neighbours that a lane reads, step 0 has the first four. Slices are added
// in order, then the bias.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "device/arithmetic.cuh"
#include "device/ptx.cuh"

namespace lora_jax {

struct F32PartsArgs {
  const __nv_bfloat16* x;  // [rows, d_in]
  const float* w;          // [d_out, d_in]
  const int* num_rows;     // [1]; later rows give zeros
  const float* bias;       // [d_out] or null
  float* y;                // [rows, d_out]
  int rows, d_out, d_in;
};

constexpr int kPartsSlices = 16, kPartsUnit = 32;

// A CTA's tile is M times 16 rows, or H times 8 where M is 1, by N times 8 columns. Each warp sums S slices, of which
// `DEPTH` units are on their way at once.
template <int M, int H, int N, int S, int DEPTH>
struct PartsTile {
  static constexpr int kM = M, kH = H, kN = N, kS = S, kDepth = DEPTH;
  static constexpr int kRows = M * H * 8, kColumns = N * 8, kThreads = kPartsSlices / S * 32;
  static constexpr int kSums = M * N * 4 * 32, kBytes = kPartsSlices * kSums * 4;  // of one slice, of all
};

// What a lane reads of one unit: eight neighbours of H rows in each of M tiles, and of a column in each of N.
template <class Tile>
struct PartsUnit {
  uint4 x[Tile::kM][Tile::kH];
  float4 w[Tile::kN][2];
};


// Pointers of a lane at the first value of k that it reads.
template <class Tile>
struct PartsSources {
  const __nv_bfloat16* x[Tile::kM][Tile::kH];
  const float* w[Tile::kN];
};

template <class Tile>
__device__ __forceinline__ PartsSources<Tile> parts_sources(const F32PartsArgs& p, int row, int column) {
  const int lane = threadIdx.x & 31, own = lane % 4 * 8, place = lane / 4;
  PartsSources<Tile> from;
#pragma unroll
  for (int m = 0; m < Tile::kM; ++m)
#pragma unroll
    for (int half = 0; half < Tile::kH; ++half)  // past the end they read the last, for nothing
      from.x[m][half] = p.x + static_cast<int64_t>(min(row + m * 16 + half * 8 + place, p.rows - 1)) * p.d_in + own;
#pragma unroll
  for (int n = 0; n < Tile::kN; ++n)
    from.w[n] = p.w + static_cast<int64_t>(min(column + n * 8 + place, p.d_out - 1)) * p.d_in + own;
  return from;
}

template <class Tile>
__device__ __forceinline__ void load_unit(const PartsSources<Tile>& from, int unit, PartsUnit<Tile>& to) {
  const int k = unit * kPartsUnit;
#pragma unroll
  for (int n = 0; n < Tile::kN; ++n)
#pragma unroll
    for (int step = 0; step < 2; ++step) to.w[n][step] = __ldg(reinterpret_cast<const float4*>(from.w[n] + k) + step);
#pragma unroll
  for (int m = 0; m < Tile::kM; ++m)
#pragma unroll
    for (int half = 0; half < Tile::kH; ++half)
      to.x[m][half] = __ldg(reinterpret_cast<const uint4*>(from.x[m][half] + k));
}

// The nearest bfloat16 numbers of a pair, which is left with what they lack.
__device__ __forceinline__ uint32_t take_part(float& lo, float& hi) {
  const uint32_t pair = bf16x2(lo, hi);
  lo -= __uint_as_float(pair << 16);
  hi -= __uint_as_float(pair & 0xffff0000u);
  return pair;
}

// Adds a step's products of N columns; the rows of a tile's second half are zeros where it has none.
template <class Tile, int STEP>
__device__ __forceinline__ void add_step(PartsUnit<Tile>& unit, float (&sum)[Tile::kM][Tile::kN][4]) {
  uint2 x[Tile::kM][2] = {};
#pragma unroll
  for (int m = 0; m < Tile::kM; ++m)
#pragma unroll
    for (int half = 0; half < Tile::kH; ++half) {
      const uint4& own = unit.x[m][half];
      x[m][half] = STEP ? make_uint2(own.z, own.w) : make_uint2(own.x, own.y);
    }
#pragma unroll
  for (int n = 0; n < Tile::kN; ++n) {
    float4& w = unit.w[n][STEP];
#pragma unroll
    for (int part = 0; part < 3; ++part) {
      const uint32_t b0 = take_part(w.x, w.y), b1 = take_part(w.z, w.w);
      if (part && !__any_sync(~0u, (b0 | b1) & 0x7fff7fffu)) break;  // what is left are zeros
#pragma unroll
      for (int m = 0; m < Tile::kM; ++m)
        mma_bf16(sum[m][n], x[m][0].x, x[m][1].x, x[m][0].y, x[m][1].y, b0, b1);
    }
  }
}

// Sums units first..end - 1.
template <class Tile>
__device__ __forceinline__ void sum_slice(const PartsSources<Tile>& from, int first, int end,
                                          float (&sum)[Tile::kM][Tile::kN][4]) {
  PartsUnit<Tile> units[Tile::kDepth];
#pragma unroll
  for (int i = 0; i < Tile::kDepth; ++i)
    if (first + i < end) load_unit(from, first + i, units[i]);
#pragma unroll 1
  for (int unit = first; unit < end; unit += Tile::kDepth)
#pragma unroll
    for (int i = 0; i < Tile::kDepth; ++i) {
      if (unit + i >= end) break;
      const int next = unit + i + Tile::kDepth;
      PartsUnit<Tile> own = units[i];
      if (Tile::kDepth == 1 && next < end) load_unit(from, next, units[i]);  // comes while this one is multiplied
      add_step<Tile, 0>(own, sum);
      add_step<Tile, 1>(own, sum);
      if (Tile::kDepth > 1 && next < end) load_unit(from, next, units[i]);
    }
}

// Adds the slices of each result, and stores it.
template <class Tile>
__device__ __forceinline__ void store_parts(const F32PartsArgs& p, const float* sums, int row, int column) {
  const int real = load_now(p.num_rows), lane = threadIdx.x & 31;
#pragma unroll 1
  for (int i = threadIdx.x; i < Tile::kSums; i += Tile::kThreads) {
    const int tile = i / 128, e = i / 32 % 4;
    const int r = row + tile / Tile::kN * 16 + e / 2 * 8 + lane / 4;
    const int c = column + tile % Tile::kN * 8 + lane % 4 * 2 + e % 2;
    float of_slices[kPartsSlices];
#pragma unroll
    for (int slice = 0; slice < kPartsSlices; ++slice) of_slices[slice] = sums[slice * Tile::kSums + i];
    float result = of_slices[0];
#pragma unroll
    for (int slice = 1; slice < kPartsSlices; ++slice) result += of_slices[slice];
    if (r >= p.rows || c >= p.d_out) continue;
    if (p.bias) result += __ldg(p.bias + c);
    p.y[static_cast<int64_t>(r) * p.d_out + c] = r < real ? result : 0.f;
  }
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads) f32_parts_kernel(const F32PartsArgs p) {
  extern __shared__ __align__(16) unsigned char shared[];
  auto* sums = reinterpret_cast<float*>(shared);  // slice, place in a lane, lane
  const int tiles = (p.rows + Tile::kRows - 1) / Tile::kRows, number = static_cast<int>(blockIdx.x);
  const int row = number % tiles * Tile::kRows, column = number / tiles * Tile::kColumns;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, units = p.d_in / kPartsUnit;
  const auto from = parts_sources<Tile>(p, row, column);
#pragma unroll 1
  for (int slice = warp * Tile::kS; slice < (warp + 1) * Tile::kS; ++slice) {
    float sum[Tile::kM][Tile::kN][4] = {};
    sum_slice(from, slice * units / kPartsSlices, (slice + 1) * units / kPartsSlices, sum);
#pragma unroll
    for (int i = 0; i < Tile::kSums / 32; ++i)
      sums[slice * Tile::kSums + i * 32 + lane] = sum[i / 4 / Tile::kN][i / 4 % Tile::kN][i % 4];
  }
  __syncthreads();
  store_parts<Tile>(p, sums, row, column);
}

}  // namespace lora_jax
