// y = w x + bias + addend of a dense map, in bfloat16, for a batch of up to 128 rows; or silu of one map times another.
//
// What takes the time is to stream the weights, so every SM has to read its part of them all the time: a CTA has all of
// d_in for so few columns of d_out that each SM has one tile. Rows are the first operand of wgmma, 64 for each of two
// warpgroups, because the second may be as narrow as 8. One more warp brings weights and another x, through rings of
// stages. Where one warpgroup has all rows, x takes less room and the rings are longer.
// A row's result is one sum over d_in in steps of 16, as that of ops/grouped_matmul/pallas_gpu.py.
#pragma once
#include "device/addend.cuh"
#include "device/launch_early.cuh"
#include "device/silu.cuh"
#include "device/swizzled_map.cuh"
#include "device/wgmma.cuh"

namespace lora_jax {

constexpr int kDenseMaps = 3, kMostDenseStages = 32, kDenseBlock = 64;  // of d_in, 128 bytes
constexpr int kRowGroups = 2, kRowsThreads = kRowGroups * 128 + 64, kRowsBarriers = 1024;

struct DenseRowsMap {
  const __nv_bfloat16* bias;  // [d_out] or null
  const void* addend;         // [rows, d_out] or null
  __nv_bfloat16* y;           // [rows, d_out]; of up none
  int d_out, first_tile;
};

struct DenseRowsArgs {
  CUtensorMap maps[kDenseMaps], x_map;  // of weights, and of x: boxes of a stage's blocks of 64 of d_in
  DenseRowsMap of[kDenseMaps];          // gate and up, or maps beside each other
  const int* num_rows;
  int rows, x_rows;      // of y; of a box of x
  int steps, stages[2];  // for 1 and 2 warpgroups with rows
  bool addends_wide;     // float32
  bool ahead;            // weights are older than the previous kernel, and may be read before it is done
};

template <int COLUMNS, bool GATED, int BLOCKS>
struct DenseRows {
  static constexpr int kProducts = 1 + GATED;
  static constexpr int kWeights = COLUMNS * 128 * BLOCKS;       // bytes of a stage, of one product
  static constexpr int kX = 64 * 128 * BLOCKS;                  // of a warpgroup
  static constexpr int kStage = kProducts * kWeights;
  static __host__ __device__ int stage_bytes(int groups) { return kStage + groups * kX; }

  struct Ring {
    int at = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ void next(int stages) {
      if (++at == stages) at = 0, phase ^= 1;
    }
  };

  const DenseRowsArgs& p;
  uint64_t *full, *empty;
  uint32_t weights0;
  int map, column;  // the first of this CTA's columns
  int count, groups, stages;
  __device__ __forceinline__ DenseRows(const DenseRowsArgs& p, unsigned char* shared) : p(p), map(0) {
    full = reinterpret_cast<uint64_t*>(shared), empty = full + kMostDenseStages;
    weights0 = smem_u32(shared) + kRowsBarriers;
    if constexpr (!GATED)
      for (int i = 1; i < kDenseMaps; ++i) map += static_cast<int>(blockIdx.x) >= p.of[i].first_tile;
    column = (blockIdx.x - p.of[map].first_tile) * COLUMNS;
  }
  // Which the previous kernel may have written.
  __device__ __forceinline__ void read_counts() {
    count = uniform(min(load_now(p.num_rows), p.rows));
    groups = min(kRowGroups, max(1, (count + 63) / 64));
    stages = p.stages[groups - 1];
  }
  __device__ __forceinline__ uint32_t x_at(int stage) const { return weights0 + stages * kStage + stage * groups * kX; }

  __device__ __forceinline__ void copy_weights(int step, int stage) const {
    mbar_expect(&full[stage], kStage);
#pragma unroll
    for (int i = 0; i < kProducts; ++i)
      tile_copy(weights0 + stage * kStage + i * kWeights, &p.maps[map + i], 0, column, step * BLOCKS, 0, &full[stage]);
  }
  // By one thread; `ahead` stages are on their way.
  __device__ __forceinline__ void bring_weights(int ahead) const {
    Ring ring;
    for (int step = 0; step < p.steps; ++step, ring.next(stages)) {
      if (step < ahead) continue;
      mbar_wait(&empty[ring.at], ring.phase ^ 1);
      copy_weights(step, ring.at);
    }
  }
  __device__ __forceinline__ void bring_x() const {
    Ring ring;
    for (int step = 0; step < p.steps; ++step, ring.next(stages)) {
      mbar_wait(&empty[ring.at], ring.phase ^ 1);
      mbar_expect(&full[ring.at], groups * p.x_rows * 128 * BLOCKS);
      for (int group = 0; group < groups; ++group)
        tile_copy(x_at(ring.at) + group * kX, &p.x_map, 0, group * 64, step * BLOCKS, 0, &full[ring.at]);
    }
  }

  // Two columns of one row, rounded and with the addend.
  __device__ __forceinline__ uint32_t result(float low, float high, float2 bias, const void* addend, int64_t at) const {
    const uint32_t v = bf16x2(low + bias.x, high + bias.y);
    return addend ? plus_addend(v, addend, at, p.addends_wide) : v;
  }
  __device__ __forceinline__ void store(const float (&sums)[kProducts][COLUMNS / 2], int group) const {
    const int lane = threadIdx.x & 31, first = group * 64 + static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane / 4;
    const DenseRowsMap& of = p.of[map];
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; ++n) {
      const int d = column + n * 8 + lane % 4 * 2;
      if (d >= of.d_out) break;
      const float2 bias = of.bias ? __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(of.bias + d)) : float2{};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first + half * 8;
        if (row >= p.rows) continue;
        const int64_t at = static_cast<int64_t>(row) * of.d_out + d;
        uint32_t v = 0;
        if (row < count) {
          const float* own = &sums[0][n * 4 + half * 2];
          v = result(own[0], own[1], bias, of.addend, at);
          if constexpr (GATED) {
            const float* other = &sums[1][n * 4 + half * 2];
            const uint32_t w = result(other[0], other[1], float2{}, p.of[1].addend, at);
            const float2 g = __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&v));
            const float2 u = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&w));
            v = bf16x2(silu_times(g.x, u.x), silu_times(g.y, u.y));
          }
        }
        *reinterpret_cast<uint32_t*>(of.y + at) = v;
      }
    }
  }

  __device__ __forceinline__ void let_go(int stage) const { mbar_arrive_if(&empty[stage], threadIdx.x % 128 == 0); }
  // Of a warpgroup with rows.
  __device__ __forceinline__ void multiply(int group) const {
    float sums[kProducts][COLUMNS / 2];
#pragma unroll
    for (int i = 0; i < kProducts * COLUMNS / 2; ++i) sums[i / (COLUMNS / 2)][i % (COLUMNS / 2)] = 0;
    Ring ring;
    int before = -1;
#pragma unroll 1
    for (int step = 0; step < p.steps; ++step, ring.next(stages)) {
      mbar_wait(&full[ring.at], ring.phase);
      const uint32_t w = weights0 + ring.at * kStage, x = x_at(ring.at) + group * kX;
#pragma unroll
      for (int i = 0; i < kProducts; ++i) wgmma_settle(sums[i]);
      wgmma_begin();
#pragma unroll
      for (int k = 0; k < BLOCKS * 4; ++k)
#pragma unroll
        for (int i = 0; i < kProducts; ++i)
          wgmma_rows(sums[i], wgmma_operand(x + k / 4 * p.x_rows * 128 + k % 4 * 32),
                     wgmma_operand(w + i * kWeights + k / 4 * (COLUMNS * 128) + k % 4 * 32), true);
      wgmma_commit();
      wgmma_wait<1>();
      if (before >= 0) let_go(before);
      before = ring.at;
    }
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < kProducts; ++i) wgmma_settle(sums[i]);
    store(sums, group);
  }
  // Of one without: it waits for nobody's products, and what it stores are zeros.
  __device__ __forceinline__ void idle(int group) const {
    Ring ring;
    for (int step = 0; step < p.steps; ++step, ring.next(stages)) {
      mbar_wait(&full[ring.at], ring.phase);
      let_go(ring.at);
    }
    const float none[kProducts][COLUMNS / 2] = {};
    store(none, group);
  }
};

template <int COLUMNS, bool GATED, int BLOCKS>
__global__ void __launch_bounds__(kRowsThreads, 1) dense_rows_kernel(const __grid_constant__ DenseRowsArgs p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  DenseRows<COLUMNS, GATED, BLOCKS> kernel(p, shared);
  const int warp = uniform(threadIdx.x / 32), ahead = p.ahead ? min(p.stages[kRowGroups - 1], p.steps) : 0;
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.stages[0]; ++i) mbar_init(&kernel.full[i], 2), mbar_init(&kernel.empty[i], kRowGroups);
    fence_barriers();
  }
  __syncthreads();
  const bool first_lane = (threadIdx.x & 31) == 0;
  if (warp == kRowGroups * 4 && first_lane)
    for (int step = 0; step < ahead; ++step) kernel.copy_weights(step, step);
  wait_for_previous();
  let_next_begin();
  kernel.read_counts();
  if (warp == kRowGroups * 4) {
    if (first_lane) kernel.bring_weights(ahead);
  } else if (warp > kRowGroups * 4) {
    if (first_lane) kernel.bring_x();
  } else if (warp / 4 < kernel.groups) {
    kernel.multiply(warp / 4);
  } else {
    kernel.idle(warp / 4);
  }
}

}  // namespace lora_jax
