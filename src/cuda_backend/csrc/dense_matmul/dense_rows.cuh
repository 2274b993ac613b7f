// y = w x + bias + addend of a dense map, in bfloat16, for a batch of up to 128 rows.
//
// What takes the time is to bring w and x to the SMs, from memory and from L2. So every SM has one tile, and all of d_in
// of it: up to 64 rows by COLUMNS of d_out, by one warpgroup; of more rows 64 by twice as many, by two, where two CTAs
// share the weights: 128 by COLUMNS would be a quarter more to bring. Rows are the first operand of wgmma, because the
// second may be as narrow as 8. One more warp brings weights and another x, through rings of stages.
// A row's result is one sum over d_in in steps of 16, as that of ops/grouped_matmul/pallas_gpu.py.
#pragma once
#include "device/addend.cuh"
#include "device/arithmetic.cuh"
#include "device/launch_early.cuh"
#include "device/swizzled_map.cuh"
#include "device/wgmma.cuh"

namespace lora_jax {

constexpr int kDenseMaps = 3, kMostDenseStages = 32, kDenseBlock = 64;  // of d_in, 128 bytes
constexpr int kRowsThreads = 2 * 128 + 64, kRowsBarriers = 1024;

struct DenseRowsMap {
  const __nv_bfloat16* bias;  // [d_out] or null
  const void* addend;         // [rows, d_out] or null
  __nv_bfloat16* y;           // [rows, d_out]
  int d_out, first_tile;      // an even one
};

struct DenseRowsArgs {
  CUtensorMap maps[kDenseMaps], x_map;  // of weights, and of x: boxes of a stage's blocks of 64 of d_in
  DenseRowsMap of[kDenseMaps];          // maps beside each other
  const int* num_rows;
  int rows, x_rows;      // of y; of a box of x
  int steps, stages[2];  // for tiles of COLUMNS, and of twice as many
  bool addends_wide;     // float32
};

template <int COLUMNS, int BLOCKS>
struct DenseRows {
  static constexpr int kWeights = COLUMNS * 128 * BLOCKS, kX = 64 * 128 * BLOCKS;  // bytes of a stage
  static __host__ __device__ int stage_bytes(int halves) { return halves * kWeights + kX; }

  struct Ring {
    int at = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ void next(int stages) {
      if (++at == stages) at = 0, phase ^= 1;
    }
  };

  const DenseRowsArgs& p;
  uint64_t *full, *empty;
  uint32_t stage0;
  int map, column, row;  // the first of this CTA's columns and rows
  int count, halves, stages;
  __device__ __forceinline__ DenseRows(const DenseRowsArgs& p, unsigned char* shared) : p(p), map(0) {
    full = reinterpret_cast<uint64_t*>(shared), empty = full + kMostDenseStages;
    stage0 = smem_u32(shared) + kRowsBarriers;
    for (int i = 1; i < kDenseMaps; ++i) map += static_cast<int>(blockIdx.x) >= p.of[i].first_tile;
  }
  // Where the tile is depends on how many rows there are, which the previous kernel may have written.
  __device__ __forceinline__ void find_tile() {
    count = uniform(min(load_now(p.num_rows), p.rows));
    halves = 1 + (count > 64), stages = p.stages[halves - 1];
    const int tile = blockIdx.x - p.of[map].first_tile;
    column = tile / halves * halves * COLUMNS, row = tile % halves * 64;
  }
  __device__ __forceinline__ uint32_t weights_at(int stage) const { return stage0 + stage * stage_bytes(halves); }
  __device__ __forceinline__ uint32_t x_at(int stage) const { return weights_at(stage) + halves * kWeights; }

  // Each by one thread.
  __device__ __forceinline__ void bring_weights() const {
    Ring ring;
    for (int step = 0; step < p.steps; ++step, ring.next(stages)) {
      mbar_wait(&empty[ring.at], ring.phase ^ 1);
      mbar_expect(&full[ring.at], halves * kWeights);
      for (int half = 0; half < halves; ++half)
        tile_copy(weights_at(ring.at) + half * kWeights, &p.maps[map], 0, column + half * COLUMNS, step * BLOCKS, 0,
                  &full[ring.at]);
    }
  }
  __device__ __forceinline__ void bring_x() const {
    Ring ring;
    for (int step = 0; step < p.steps; ++step, ring.next(stages)) {
      mbar_wait(&empty[ring.at], ring.phase ^ 1);
      mbar_expect(&full[ring.at], p.x_rows * 128 * BLOCKS);
      tile_copy(x_at(ring.at), &p.x_map, 0, row, step * BLOCKS, 0, &full[ring.at]);
    }
  }

  // Stores 64 rows, zeros where they are not there.
  __device__ __forceinline__ void store(const float (&sums)[COLUMNS / 2], int row, int column) const {
    const int lane = threadIdx.x & 31, first = row + static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane / 4;
    const DenseRowsMap& of = p.of[map];
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; ++n) {
      const int d = column + n * 8 + lane % 4 * 2;
      if (d >= of.d_out) break;
      const float2 bias = of.bias ? __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(of.bias + d)) : float2{};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = first + half * 8;
        if (r >= p.rows) continue;
        const int64_t at = static_cast<int64_t>(r) * of.d_out + d;
        const float* own = &sums[n * 4 + half * 2];
        uint32_t v = r < count ? bf16x2(own[0] + bias.x, own[1] + bias.y) : 0;
        if (of.addend && r < count) v = plus_addend(v, of.addend, at, p.addends_wide);
        *reinterpret_cast<uint32_t*>(of.y + at) = v;
      }
    }
  }

  __device__ __forceinline__ void let_go(int stage) const { mbar_arrive_if(&empty[stage], threadIdx.x % 128 == 0); }
  // Of a warpgroup with columns.
  __device__ __forceinline__ void multiply(int half) const {
    float sums[COLUMNS / 2];
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) sums[i] = 0;
    Ring ring;
    int before = -1;
#pragma unroll 1
    for (int step = 0; step < p.steps; ++step, ring.next(stages)) {
      mbar_wait(&full[ring.at], ring.phase);
      const uint32_t w = weights_at(ring.at) + half * kWeights, x = x_at(ring.at);
      wgmma_settle(sums);
      wgmma_begin();
#pragma unroll
      for (int k = 0; k < BLOCKS * 4; ++k)
        wgmma_rows(sums, wgmma_operand(x + k / 4 * p.x_rows * 128 + k % 4 * 32),
                   wgmma_operand(w + k / 4 * (COLUMNS * 128) + k % 4 * 32), true);
      wgmma_commit();
      wgmma_wait<1>();
      if (before >= 0) let_go(before);
      before = ring.at;
    }
    wgmma_wait<0>();
    wgmma_settle(sums);
    store(sums, row, column + half * COLUMNS);
  }
  // Of one without: it waits for nobody's products, and stores the zeros of the rows behind the first 64.
  __device__ __forceinline__ void idle() const {
    Ring ring;
    for (int step = 0; step < p.steps; ++step, ring.next(stages)) {
      mbar_wait(&full[ring.at], ring.phase);
      let_go(ring.at);
    }
    const float none[COLUMNS / 2] = {};
    store(none, 64, column);
  }
};

template <int COLUMNS, int BLOCKS>
__global__ void __launch_bounds__(kRowsThreads, 1) dense_rows_kernel(const __grid_constant__ DenseRowsArgs p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  DenseRows<COLUMNS, BLOCKS> kernel(p, shared);
  const int warp = uniform(threadIdx.x / 32);
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.stages[0]; ++i) mbar_init(&kernel.full[i], 2), mbar_init(&kernel.empty[i], 2);
    fence_barriers();
  }
  if (threadIdx.x == 256) prefetch_map(&p.maps[kernel.map]), prefetch_map(&p.x_map);
  __syncthreads();
  wait_for_previous();
  let_next_begin();
  kernel.find_tile();
  if (warp >= 8) {
    if (threadIdx.x == 256) kernel.bring_weights();
    if (threadIdx.x == 288) kernel.bring_x();
  } else if (warp / 4 < kernel.halves) {
    kernel.multiply(warp / 4);
  } else {
    kernel.idle();
  }
}

}  // namespace lora_jax
