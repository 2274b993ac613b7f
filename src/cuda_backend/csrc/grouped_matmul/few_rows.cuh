// y = w[g] x + bias[g] + addend for groups of few rows, x in bfloat16 and w in 8 or 4 bits: what decoding does with experts.
//
// Weights are wgmma's first operand and rows its second, so that a group of one row costs a tile of 8.
// A CTA goes through tiles of some group's weights, 64 columns of d_out for each of its W warpgroups;
// with gate and up, half of them multiply by each. One warp brings weights through a ring of stages by
// the copy engine, with their scales; three bring x, in the order of columns that `codings.cuh` wants.
// A row's result is one sum over d_in in steps of 16, as that of ops/grouped_matmul/pallas_gpu.py.
#pragma once
#include "device/launch_early.cuh"
#include "device/wgmma_few.cuh"
#include "grouped_matmul/codings.cuh"

namespace lora_jax {

struct FewRowsArgs {
  CUtensorMap maps[2];         // of weights, two bytes an element; gate, up
  const void* scales[2];       // [groups, d_out, scale_groups]
  const __nv_bfloat16* x;      // [rows, d_in]
  const int* sizes;            // [groups]
  const __nv_bfloat16* bias;   // [groups, d_out] or null
  const void* addends[2];      // [rows, d_out] or null
  __nv_bfloat16* y;            // [rows, d_out]
  int rows, groups, d_out, d_in, tiles, steps, stages, works;
  int scale_groups, scale_columns;  // of a row; of d_in in each
  int piece;                   // bytes of scales that are copied at once
  bool addends_wide;           // float32
  uint32_t base;               // of kInteger: two bfloat16, 128 less the value of code 0
  float table[16];             // of kTable
};

constexpr int kXWarps = 3, kCopyThreads = 128;

// A block of rows of one group, and what it is among the tile's.
struct FewRowsWork {
  int group, row, count;
};

// Shared memory: stages of weights, x and scales, then barriers, results of up, the table, the list.
template <Coding C, int G, int ROWS, int W>
struct FewRowsLayout {
  static constexpr int kWeights = W * 8192, kX = ROWS * kStepColumns<C> * 2;
  static constexpr int kBarriers = 256, kTable = C == Coding::kTable ? 2 * kTableBytes : 0;
  static constexpr int kResults = ROWS / 8 * 2 * 4 * 128;  // of a pair of warpgroups
  static constexpr int kStage = (kWeights + kX + W * 256 * scale_words<C, G>() + 1023) & ~1023;
  static __host__ __device__ int fixed(bool gated, int works) {
    return kTable + kBarriers + (gated ? W / 2 * kResults : 0) + works * 8;
  }
};

struct FewRowsRing {
  int at = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next(int stages) {
    if (++at == stages) at = 0, phase ^= 1;
  }
};

template <Coding C, int G, int ROWS, int W, bool GATED>
struct FewRowsKernel {
  using Layout = FewRowsLayout<C, G, ROWS, W>;
  static constexpr int kColumns = W * 64 / (GATED ? 2 : 1);  // of d_out in a tile
  static constexpr int kStep = kStepColumns<C>, kRowBytes = 128;
  static constexpr int kPairs = W > 1 ? W / 2 : 1;               // of warpgroups, with gate and up
  static constexpr int kChunks = kStep / 64;                     // of 64 columns, in a stage
  static constexpr int kWords = C == Coding::kFloat8 ? 8 : 4;    // of a thread in each
  static constexpr int kScaleWords = scale_words<C, G>();        // of a row in a stage

  const FewRowsArgs& p;
  uint32_t stage0, table;
  int works;
  uint64_t *full, *empty;
  int2* list;
  uint32_t* results;

  __device__ __forceinline__ FewRowsKernel(const FewRowsArgs& p, unsigned char* shared) : p(p), works(0) {
    stage0 = smem_u32(shared);
    unsigned char* rest = shared + p.stages * Layout::kStage;
    table = ((smem_u32(rest) + kTableBytes - 1) & ~(kTableBytes - 1)) + (threadIdx.x & 31) * 4;  // codes fill up the rest
    rest += Layout::kTable;
    full = reinterpret_cast<uint64_t*>(rest), empty = full + 16;
    rest += Layout::kBarriers;
    results = reinterpret_cast<uint32_t*>(rest);
    list = reinterpret_cast<int2*>(rest + (GATED ? W / 2 * Layout::kResults : 0));
  }

  __device__ __forceinline__ uint32_t weights_at(int stage) const { return stage0 + stage * Layout::kStage; }
  __device__ __forceinline__ uint32_t x_at(int stage) const { return weights_at(stage) + Layout::kWeights; }
  __device__ __forceinline__ uint32_t scales_at(int stage) const { return x_at(stage) + Layout::kX; }
  __device__ __forceinline__ FewRowsWork work(int index) const {
    const int2 w = list[index / p.tiles];
    const int group = uniform(w.x), row = uniform(w.y);
    return {group >> 8, row, group & 255};
  }

  // Lists blocks of rows of groups that have any, by one warp; returns how many, and the end of rows.
  __device__ __forceinline__ int2 make_list() {
    const int lane = threadIdx.x & 31;
    int row = 0, blocks = 0;
    for (int base = 0; base < p.groups; base += 32) {
      const int group = base + lane, size = group < p.groups ? load_now(p.sizes + group) : 0;
      const int own = (size + ROWS - 1) / ROWS;
      int end = size, last = own;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int a = __shfl_up_sync(~0u, end, d), b = __shfl_up_sync(~0u, last, d);
        if (lane >= d) end += a, last += b;
      }
      for (int i = 0; i < own; ++i)
        list[blocks + last - own + i] = {group << 8 | min(ROWS, size - i * ROWS), row + end - size + i * ROWS};
      row += __shfl_sync(~0u, end, 31), blocks += __shfl_sync(~0u, last, 31);
    }
    return {blocks, row};
  }

  // Weights and scales, by one warp.
  __device__ __forceinline__ void bring_weights() {
    const int lane = threadIdx.x & 31;
    const int row_bytes = p.scale_groups * kScaleBytes<C>;
    FewRowsRing ring;
    for (int index = blockIdx.x; index < works * p.tiles; index += gridDim.x) {
      const int group = work(index).group, column = index % p.tiles * kColumns;
      for (int step = 0; step < p.steps; ++step, ring.next(p.stages)) {
        mbar_wait(&empty[ring.at], ring.phase ^ 1);
        if (lane == 0) {
          mbar_expect(&full[ring.at], Layout::kWeights);
#pragma unroll
          for (int m = 0; m < 1 + GATED; ++m)
            tile_copy(weights_at(ring.at) + m * kColumns * kRowBytes, &p.maps[m], step * kRowBytes / 2, column, group, 0,
                      &full[ring.at]);
        }
        const int first = step * kStep / p.scale_columns * kScaleBytes<C>;
        for (int r = lane; r < W * 64; r += 32) {
          const int m = GATED && r >= kColumns, d = min(column + r - m * kColumns, p.d_out - 1);
          const auto* from = static_cast<const unsigned char*>(p.scales[m]) +
                             (static_cast<int64_t>(group) * p.d_out + d) * row_bytes;
          for (int b = 0; b < kScaleWords * 4; b += p.piece)
            copy_piece(scales_at(ring.at) + r * kScaleWords * 4 + b, from + min(first + b, row_bytes - p.piece), p.piece,
                       first + b < row_bytes);
        }
        copies_arrive(&full[ring.at]);
      }
    }
  }

  // Rows of x, by warps that take turns: the numbers are read before their place is free.
  __device__ __forceinline__ void bring_x(int warp) {
    constexpr int kLanes = kStep / 8, kAtOnce = 32 / kLanes, kReads = ROWS / kAtOnce < 8 ? ROWS / kAtOnce : 8;
    const int lane = threadIdx.x & 31, column = lane % kLanes * 8, own = lane / kLanes;
    FewRowsRing ring;
    int turn = 0;
    for (int index = blockIdx.x; index < works * p.tiles; index += gridDim.x) {
      const FewRowsWork w = work(index);
      for (int step = 0; step < p.steps; ++step, ring.next(p.stages)) {
        const bool mine = turn == warp;
        turn = turn + 1 == kXWarps ? 0 : turn + 1;
        if (!mine) continue;
        const int k = step * kStep + column;
        bool waited = false;
        for (int base = 0; base < w.count; base += kReads * kAtOnce) {
          uint4 v[kReads];
#pragma unroll
          for (int i = 0; i < kReads; ++i) {
            const int r = base + i * kAtOnce + own;
            v[i] = make_uint4(0, 0, 0, 0);
            if (r < w.count && k < p.d_in)
              v[i] = __ldg(reinterpret_cast<const uint4*>(p.x + static_cast<int64_t>(w.row + r) * p.d_in + k));
          }
          if (!waited) mbar_wait(&empty[ring.at], ring.phase ^ 1);
          waited = true;
#pragma unroll
          for (int i = 0; i < kReads; ++i) {
            const int r = base + i * kAtOnce + own;
            if (r < w.count) place_x<C>(x_at(ring.at) + r * kRowBytes, r & 7, ROWS * kRowBytes, column, v[i]);
          }
        }
        fence_shared_copies();
        __syncwarp();
        if (lane == 0) mbar_arrive(&full[ring.at]);
      }
    }
  }

  // What a thread needs of a stage: 16 words of two rows of weights, and those rows' scales.
  struct Raw {
    uint32_t words[kChunks][kWords], scales[2][kScaleWords];
  };
  __device__ __forceinline__ void load(Raw& raw, uint32_t stage, const uint32_t (&places)[kChunks * kWords / 4],
                                       uint32_t scales) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) load_words(raw.scales[r], stage + Layout::kWeights + Layout::kX + scales + r * 8 * kScaleWords * 4);
#pragma unroll
    for (int i = 0; i < kChunks * kWords / 4; ++i)
      ldmatrix(reinterpret_cast<uint32_t(&)[4]>(raw.words[i * 4 / kWords][i * 4 % kWords]), stage + places[i]);
  }
  // The operands of four products of 16 columns.
  __device__ __forceinline__ void decode(const Raw& raw, int chunk, uint32_t selector, uint32_t (&a)[4][4]) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int high = i & 1;
      const uint32_t word = raw.words[chunk][i], scale = scale_of<C, G>(raw.scales[high], chunk * 64 + i / 2 * (128 / kWords));
      if constexpr (C == Coding::kFloat8) {
        decode_float8(word, scale, a[i / 2][high], a[i / 2][2 + high]);
      } else {
        uint32_t pairs[4];
        decode_codes<C>(exchange_codes(word, selector), scale, p.base, table, pairs);
        a[i / 2 * 2][high] = pairs[0], a[i / 2 * 2][2 + high] = pairs[1];
        a[i / 2 * 2 + 1][high] = pairs[2], a[i / 2 * 2 + 1][2 + high] = pairs[3];
      }
    }
  }

  template <int N>
  __device__ __forceinline__ void multiply(FewRowsRing& ring, float (&sums)[N / 2]) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const int row = warp * 16 + (lane & 15);
    uint32_t places[kChunks * kWords / 4];
#pragma unroll
    for (int i = 0; i < kChunks * kWords / 4; ++i) places[i] = row * kRowBytes + (((i * 2 + lane / 16) ^ (row & 7)) << 4);
    const uint32_t scales = (warp * 16 + lane / 4) * kScaleWords * 4, selector = exchange_selector();
    for (int step = 0; step < p.steps; ++step, ring.next(p.stages)) {
      const uint32_t stage = weights_at(ring.at);
      mbar_wait(&full[ring.at], ring.phase);
      const uint32_t x = wgmma_place(stage + Layout::kWeights);
      Raw raw;
      load(raw, stage, places, scales);
      uint32_t a[2][4][4];
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        decode(raw, chunk, selector, a[chunk & 1]);
        wgmma_begin();
#pragma unroll
        for (int i = 0; i < 4; ++i)
          wgmma_few(sums, a[chunk & 1][i], wgmma_at(x + (chunk * ROWS * kRowBytes >> 4) + i * 2));
        wgmma_commit();
        if (chunk + 1 < kChunks) wgmma_wait<1>();
      }
      wgmma_wait<0>();
      mbar_arrive_if(&empty[ring.at], lane == 0);
    }
    wgmma_settle(sums);
  }

  __device__ __forceinline__ uint32_t plus(uint32_t pair, const void* addend, int64_t at) const {
    if (p.addends_wide) {
      const float2 f = *reinterpret_cast<const float2*>(static_cast<const float*>(addend) + at);
      return add_bf16x2(pair, f.x, f.y);
    }
    const float2 f = __bfloat1622float2(
        *reinterpret_cast<const __nv_bfloat162*>(static_cast<const __nv_bfloat16*>(addend) + at));
    return add_bf16x2(pair, f.x, f.y);
  }
  // As Mosaic's kernel has it, bit for bit.
  __device__ __forceinline__ static float gated(float gate, float up) {
    return gate * reciprocal_approx(1.f + expf(-gate)) * up;
  }

  template <int N>
  __device__ __forceinline__ void finish(const FewRowsWork& w, int tile, float (&sums)[N / 2]) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, group = warp / 4;
    const int matrix = GATED && group >= kPairs, pair = GATED ? group % kPairs : 0;
    const int first = tile * kColumns + (warp * 16 - matrix * kColumns);  // of the warp's columns of d_out
    if (p.bias) {
      const int low = first + lane / 4, high = low + 8;
      const auto* bias = p.bias + static_cast<int64_t>(w.group) * p.d_out;
      const float a = low < p.d_out ? __bfloat162float(bias[low]) : 0, b = high < p.d_out ? __bfloat162float(bias[high]) : 0;
#pragma unroll
      for (int i = 0; i < N / 2; ++i) sums[i] += i & 2 ? b : a;
    }
    uint32_t* shown = results + (pair * (ROWS / 8 * 2)) * 128 + (threadIdx.x & 127);
    if (GATED && !matrix) named_barrier_wait(2 + pair, 256);
#pragma unroll
    for (int n = 0; n < N / 8; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = n * 8 + lane / 4, column = first + half * 8 + lane % 4 * 2;
        const bool there = row < w.count && column < p.d_out;
        const int64_t at = static_cast<int64_t>(w.row + row) * p.d_out + column;
        uint32_t v = transposed(bf16x2(sums[n * 4 + half * 2], sums[n * 4 + half * 2 + 1]));
        if (p.addends[0] && there) v = plus(v, p.addends[matrix], at);
        if (GATED && matrix) {
          shown[(n * 2 + half) * 128] = v;
          continue;
        }
        if (GATED) {
          const uint32_t other = shown[(n * 2 + half) * 128];
          const float2 g = __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&v));
          const float2 u = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&other));
          v = bf16x2(gated(g.x, u.x), gated(g.y, u.y));
        }
        if (there) *reinterpret_cast<uint32_t*>(p.y + at) = v;
      }
    // The pair meets when up's results are there, and when they are read.
    if (GATED && matrix) {
      named_barrier_wait(2 + pair, 256);
      named_barrier_wait(2 + kPairs + pair, 256);
    } else if (GATED) {
      named_barrier_wait(2 + kPairs + pair, 256);
    }
  }

  template <int N>
  __device__ __forceinline__ void one(const FewRowsWork& w, int tile, FewRowsRing& ring) {
    float sums[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) sums[i] = 0;
    multiply<N>(ring, sums);
    finish<N>(w, tile, sums);
  }

  __device__ __forceinline__ void consume() {
    FewRowsRing ring;
    for (int index = blockIdx.x; index < works * p.tiles; index += gridDim.x) {
      const FewRowsWork w = work(index);
      const int tile = index % p.tiles;
      if (w.count <= 8)
        one<8>(w, tile, ring);
      else
        one<ROWS>(w, tile, ring);
    }
  }

  // Rows in no group.
  __device__ __forceinline__ void store_zeros(int row) {
    const int64_t first = static_cast<int64_t>(row) * p.d_out / 2, end = static_cast<int64_t>(p.rows) * p.d_out / 2;
    auto* y = reinterpret_cast<uint32_t*>(p.y);
    for (int64_t i = first + blockIdx.x * (W * 128) + threadIdx.x; i < end; i += gridDim.x * (W * 128)) y[i] = 0;
  }
};

template <Coding C, int G, int ROWS, int W, bool GATED>
__global__ void __launch_bounds__(W * 128 + kCopyThreads, W >= 4 ? 1 : 2)
    few_rows_kernel(const __grid_constant__ FewRowsArgs p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ int found[2];
  FewRowsKernel<C, G, ROWS, W, GATED> kernel(p, shared);
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < p.stages; ++s) {
      mbar_init(&kernel.full[s], 2 + 32);  // the copy engine, x, scales by a warp
      mbar_init(&kernel.empty[s], W * 4);
    }
    fence_barriers();
    for (int m = 0; m < 1 + GATED; ++m) prefetch_map(&p.maps[m]);
  }
  if constexpr (C == Coding::kTable)
    for (int i = threadIdx.x; i < 16 * kTableRepeats; i += blockDim.x)
      sts32(kernel.table - (threadIdx.x & 31) * 4 + i * 4, __float_as_uint(p.table[i / kTableRepeats]));
  wait_for_previous();
  let_next_begin();
  if (warp == 0) {
    const int2 list = kernel.make_list();
    found[0] = list.x, found[1] = list.y;
  }
  __syncthreads();
  kernel.works = uniform(found[0]);
  if (warp < W * 4) {
    kernel.store_zeros(found[1]);
    kernel.consume();
  } else if (warp == W * 4) {
    kernel.bring_weights();
  } else {
    kernel.bring_x(warp - W * 4 - 1);
  }
}

}  // namespace lora_jax
