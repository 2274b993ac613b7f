// The product of grouped_f32.cuh for many rows, in the order of sums that is stated there.
//
// A CTA owns 8 R rows x 64 columns. Two warps sum each quarter, R x 8 results a thread; a part and the quarter's sum are
// in registers. Each quarter streams its values of k through three stages of shared memory of its own, so quarters meet
// only where their sums are added.
#pragma once
#include "device/ptx.cuh"
#include "grouped_matmul/grouped_f32.cuh"

namespace lora_jax {

constexpr int kTileColumns = 64, kQuarterThreads = 64, kTileThreads = kF32Quarters * kQuarterThreads;
constexpr int kTileStages = 3, kStageLanes = 2, kStageQuads = kStageLanes * kF32Steps;
constexpr int kTileStride = kStageQuads * 4 + 4;  // floats from row to row: eight rows' quads are in other banks

template <int R>
constexpr int kTileStage = (8 * R + kTileColumns) * kTileStride;  // floats
template <int R>
constexpr int kTileBytes = kF32Quarters * kTileStages * kTileStage<R> * 4;

// Rows row..stop - 1 of one group, and columns from `column` on.
struct F32Tile {
  int group, row, stop, column;
};

// The quarter of this thread, and its number there. Made anew at each use: they and what is made of them would fill the
// registers otherwise.
struct F32Place {
  int quarter, thread;
};
__device__ __forceinline__ F32Place f32_place() {
  const int tid = thread_anew();
  return {tid / kQuarterThreads, tid % kQuarterThreads};
}

// Asks for two lanes of a block: 8 R rows of x, then 64 of w. Thread t copies quad t % 8 of every eighth row; rows and
// columns past the end read the last, for nothing. Quads past the end of k are zeros, which change no sum.
template <class X, int R>
__device__ __forceinline__ void fetch_stage(const GroupedF32Args<X>& p, const F32Tile& tile, int stage, float* to) {
  const F32Place at = f32_place();
  const int quad = at.thread % kStageQuads, first = at.thread / kStageQuads;
  const int lane = stage * kStageLanes % kF32Lanes + quad / kF32Steps, block = stage * kStageLanes / kF32Lanes;
  const int k = block * kF32Block + quad % kF32Steps * kF32Step + at.quarter * kF32Quarter + lane * 4;
  const bool wanted = k < p.d_in;
  const X* x = p.x + (wanted ? k : 0);
  const float* w = p.w + static_cast<int64_t>(tile.group) * p.d_out * p.d_in + (wanted ? k : 0);
  const uint32_t dst = smem_u32(to + first * kTileStride + quad * 4);
#pragma unroll 2
  for (int i = 0; i < R; ++i)
    copy_piece(dst + i * 8 * kTileStride * 4,
               x + static_cast<int64_t>(min(tile.row + first + i * 8, tile.stop - 1)) * p.d_in, 4 * sizeof(X), wanted);
#pragma unroll 2
  for (int i = 0; i < kTileColumns / 8; ++i)
    copy_piece(dst + (R + i) * 8 * kTileStride * 4,
               w + static_cast<int64_t>(min(tile.column + first + i * 8, p.d_out - 1)) * p.d_in, 16, wanted);
}

// Makes float32 of the bfloat16 that this thread has copied, in place.
template <int R>
__device__ __forceinline__ void widen_stage(float* stage) {
  const int thread = f32_place().thread;
  float* own = stage + thread / kStageQuads * kTileStride + thread % kStageQuads * 4;
#pragma unroll
  for (int i = 0; i < R; ++i, own += 8 * kTileStride)
    *reinterpret_cast<float4*>(own) = widened(*reinterpret_cast<const uint2*>(own));
}

template <int R>
__device__ __forceinline__ void add_tile_quad(const float* x, const float* w, float (&part)[R][8]) {
  float4 a[R];
#pragma unroll
  for (int r = 0; r < R; ++r) a[r] = *reinterpret_cast<const float4*>(x + r * 4 * kTileStride);
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    const float4 b = *reinterpret_cast<const float4*>(w + c * 8 * kTileStride);
#pragma unroll
    for (int r = 0; r < R; ++r) part[r][c] = fmaf(a[r].x, b.x, part[r][c]);
#pragma unroll
    for (int r = 0; r < R; ++r) part[r][c] = fmaf(a[r].y, b.y, part[r][c]);
#pragma unroll
    for (int r = 0; r < R; ++r) part[r][c] = fmaf(a[r].z, b.z, part[r][c]);
#pragma unroll
    for (int r = 0; r < R; ++r) part[r][c] = fmaf(a[r].w, b.w, part[r][c]);
  }
}

// The first of a thread's rows and columns in the tile; the others follow in steps of 4 and of 8. Neighbouring threads
// have the same column, and threads two apart the same row: they share their loads from shared memory.
template <int R>
__device__ __forceinline__ int first_row(int thread) {
  return thread / 32 * 4 * R + (thread & 1) + (thread & 16) / 8;
}
__device__ __forceinline__ int first_column(int thread) { return thread / 2 % 8; }

// Adds the parts of a stage's lanes, which begin at k = `first`, to the quarter's sums.
template <int R>
__device__ __forceinline__ void add_stage(const float* stage, int first, int d_in, float (&sum)[R][8]) {
  const int thread = f32_place().thread;
  const float* x = stage + first_row<R>(thread) * kTileStride;
  const float* w = stage + (8 * R + first_column(thread)) * kTileStride;
#pragma unroll 1
  for (int lane = 0; lane < kStageLanes; ++lane, x += kF32Steps * 4, w += kF32Steps * 4) {
    float part[R][8] = {};
    const int left = d_in - first - lane * 4;  // of k, from the lane's first quad on
    if (left > (kF32Steps - 1) * kF32Step) {
#pragma unroll
      for (int step = 0; step < kF32Steps; ++step) add_tile_quad<R>(x + step * 4, w + step * 4, part);
    } else {
#pragma unroll 1
      for (int step = 0; step * kF32Step < left; ++step) add_tile_quad<R>(x + step * 4, w + step * 4, part);
    }
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int c = 0; c < 8; ++c) sum[r][c] += part[r][c];
  }
}

template <class X, int R>
__device__ __forceinline__ void sum_quarter(const GroupedF32Args<X>& p, const F32Tile& tile, float* stages,
                                            float (&sum)[R][8]) {
  constexpr int kBlockStages = kF32Lanes / kStageLanes, kStep = kStageLanes * 4;
  const int quarter = f32_place().quarter, before = quarter * kF32Quarter, blocks = p.d_in / kF32Block;
  const int count = blocks * kBlockStages + min(kBlockStages, max(0, p.d_in % kF32Block - before + kStep - 1) / kStep);
#pragma unroll
  for (int stage = 0; stage < kTileStages - 1; ++stage) {
    if (stage < count) fetch_stage<X, R>(p, tile, stage, stages + stage * kTileStage<R>);
    copies_commit();
  }
  int at = 0, next = kTileStages - 1;
#pragma unroll 1
  for (int stage = 0; stage < count; ++stage) {
    copies_wait<kTileStages - 2>();
    if (sizeof(X) == 2) widen_stage<R>(stages + at * kTileStage<R>);
    named_barrier_wait(2 + quarter, kQuarterThreads);  // the stage is there, and that before it is read
    if (stage + kTileStages - 1 < count)
      fetch_stage<X, R>(p, tile, stage + kTileStages - 1, stages + next * kTileStage<R>);
    copies_commit();
    const int first = stage / kBlockStages * kF32Block + before + stage % kBlockStages * kStep;
    add_stage<R>(stages + at * kTileStage<R>, first, p.d_in, sum);
    at = at + 1 == kTileStages ? 0 : at + 1, next = next + 1 == kTileStages ? 0 : next + 1;
  }
}

// Adds the quarters, each of which writes a fourth of the results; the stages' memory is free for it.
template <class X, int R>
__device__ __forceinline__ void store_tile(const GroupedF32Args<X>& p, const F32Tile& tile, float* room,
                                           const float (&sum)[R][8]) {
  constexpr int N = R * 8;
  const auto [quarter, thread] = f32_place();
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i) room[(quarter * N + i) * kQuarterThreads + thread] = sum[i / 8][i % 8];
  __syncthreads();
#pragma unroll
  for (int n = 0; n < N / kF32Quarters; ++n) {
    const int i = quarter * (N / kF32Quarters) + n;
    const float* own = room + i * kQuarterThreads + thread;
    float result = own[0];
#pragma unroll
    for (int q = 1; q < kF32Quarters; ++q) result += own[q * N * kQuarterThreads];
    const int row = tile.row + first_row<R>(thread) + i / 8 * 4, c = tile.column + first_column(thread) + i % 8 * 8;
    if (row < tile.stop && c < p.d_out) {
      if (p.bias) result += __ldg(p.bias + static_cast<int64_t>(tile.group) * p.d_out + c);
      p.y[static_cast<int64_t>(row) * p.d_out + c] = result;
    }
  }
  __syncthreads();
}

template <class X, int R>
__global__ void __launch_bounds__(kTileThreads, 1) grouped_f32_tiles_kernel(const GroupedF32Args<X> p) {
  extern __shared__ __align__(16) unsigned char shared[];
  auto* room = reinterpret_cast<float*>(shared);
  constexpr int kRows = 8 * R;
  const int tiles = (p.rows + kRows - 1) / kRows, number = static_cast<int>(blockIdx.x) % tiles;
  const int last = min((number + 1) * kRows, p.rows), column = static_cast<int>(blockIdx.x) / tiles * kTileColumns;
  for (int row = number * kRows; row < last;) {
    const F32Group group = group_of(p, row);
    const int stop = min(last, group.end);
    if (group.index < p.groups) {
      const F32Tile tile{group.index, row, stop, column};
      float sum[R][8] = {};
      sum_quarter<X, R>(p, tile, room + f32_place().quarter * kTileStages * kTileStage<R>, sum);
      store_tile<X, R>(p, tile, room, sum);
    } else {
      for (int i = threadIdx.x; i < (stop - row) * kTileColumns; i += kTileThreads) {
        const int c = column + i % kTileColumns;
        if (c < p.d_out) p.y[static_cast<int64_t>(row + i / kTileColumns) * p.d_out + c] = 0.f;
      }
    }
    row = stop;
  }
}

}  // namespace lora_jax
