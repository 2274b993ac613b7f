// y = w[g] x + bias[g] + addend for groups of few rows, x in bfloat16 and w in bfloat16, 8 or 4 bits: what decoding does
// with experts, and one row or a few with all maps.
//
// Weights are the first operand of mma and rows its second, so that a group of one row costs a tile of 8. A CTA goes
// through tiles of some group's weights: each of its W warps takes TILES times 16 columns of d_out, with gate and up 16
// of either. One more warp brings weights and x through a ring of stages by the copy engine, and the weights' scales.
// Warps wait for nothing but stages, so one decodes while another multiplies. Of one group there may be several matrices,
// as those of q, k and v, in one launch.
// A row's result is one sum over d_in in steps of 16, as that of ops/grouped_matmul/pallas_gpu.py.
#pragma once
#include "device/addend.cuh"
#include "device/arithmetic.cuh"
#include "device/launch_early.cuh"
#include "device/silu.cuh"
#include "grouped_matmul/few_rows_args.cuh"
#include "grouped_matmul/few_rows_stage.cuh"

namespace lora_jax {

template <Coding C, int G, int ROWS, int W, int TILES, bool GATED>
struct FewRowsKernel {
  static_assert(!GATED || TILES == 2, "a warp has gate and up");
  using Layout = FewRowsLayout<C, G, ROWS, W, TILES>;
  using Stage = FewRowsStage<C, G, ROWS, W, TILES, GATED>;
  using Places = typename Stage::Places;
  using Scales = typename Stage::Scales;
  template <int N>
  using Piece = typename Stage::template Piece<N>;
  template <bool WIDE>
  using Affine = typename Stage::template Affine<WIDE>;
  static constexpr int kColumns = Stage::kColumns, kStep = Stage::kStep, kLoad = Stage::kLoad;

  const FewRowsArgs& p;
  uint32_t stage0, table;
  int works;
  uint64_t *full, *empty;
  int2* list;
  __device__ __forceinline__ FewRowsKernel(const FewRowsArgs& p, unsigned char* shared) : p(p), works(0) {
    stage0 = smem_u32(shared);
    unsigned char* rest = shared + p.stages * Layout::kStage;
    table = ((smem_u32(rest) + kTableBytes - 1) & ~(kTableBytes - 1)) + (threadIdx.x & 31) * 4;  // codes fill up the rest
    rest += Layout::kTable;
    full = reinterpret_cast<uint64_t*>(rest), empty = full + 16;
    list = reinterpret_cast<int2*>(rest + Layout::kBarriers);
  }

  __device__ __forceinline__ uint32_t weights_at(int stage) const { return stage0 + stage * Layout::kStage; }
  __device__ __forceinline__ FewRowsWork work(int index) const {
    const int2 w = list[index / p.tiles];
    const int group = uniform(w.x), row = uniform(w.y);
    return {group >> 8, row, group & 255};
  }
  // The matrix of a tile; of gate and up the first.
  __device__ __forceinline__ int matrix_of(int tile) const {
    int m = 0;
    if constexpr (!GATED)
      for (int i = 1; i < kMostMatrices; ++i) m += tile >= p.matrices[i].first_tile;
    return m;
  }

  // Lists blocks of rows of groups that have any, by one warp; returns how many, and the end of rows.
  __device__ __forceinline__ int2 make_list() {
    const int lane = threadIdx.x & 31;
    int row = 0, blocks = 0;
    int next = lane < p.groups ? load_now(p.sizes + lane) : 0;  // one read ahead
    for (int base = 0; base < p.groups; base += 32) {
      const int group = base + lane, size = next;
      next = group + 32 < p.groups ? load_now(p.sizes + group + 32) : 0;
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

  __device__ __forceinline__ static void copy_weights(uint32_t to, const CUtensorMap* map, int step, int column,
                                                      int group, uint64_t* bar) {
    if constexpr (C == Coding::kPlain) tile_copy(to, map, 0, column, step * kBlocks<C>, group, bar);
    else tile_copy(to, map, step * kRowBytes / 2, column, group, 0, bar);
  }
  // Weights, x and scales, by one warp.
  __device__ __forceinline__ void bring() {
    const int lane = threadIdx.x & 31;
    FewRowsRing ring;
    for (int index = blockIdx.x; index < works * p.tiles; index += gridDim.x) {
      const FewRowsWork w = work(index);
      const int tile = index % p.tiles, first_matrix = matrix_of(tile), few = w.count <= 8;
      const int column = (tile - p.matrices[first_matrix].first_tile) * kColumns;
      FewRowsScales<C, G, Layout::kWeightRows / 32> sources;
      if constexpr (C == Coding::kAffine) sources.find(p, first_matrix, w.group, column, kColumns);
      for (int step = 0; step < p.steps; ++step, ring.next(p.stages)) {
        const uint32_t stage = weights_at(ring.at), x = stage + Layout::kWeights, scales = x + Layout::kX;
        uint64_t* bar = &full[ring.at];
        mbar_wait(&empty[ring.at], ring.phase ^ 1);
        if constexpr (C == Coding::kAffine) sources.bring(p, scales, step);  // many copies: before the long ones
        if (lane == 0) {
          mbar_expect(bar, Layout::kWeights + (few ? 8 : ROWS) * kStep * 2);
#pragma unroll
          for (int m = 0; m < 1 + GATED; ++m)
            copy_weights(stage + m * kColumns * kRowBytes * kBlocks<C>, &p.maps[first_matrix + m], step, column, w.group, bar);
          tile_copy(x, &p.x_maps[!few], 0, w.row, step * kStep / 64, 0, bar);
        }
        if constexpr (C == Coding::kPlain) continue;
        if constexpr (C != Coding::kAffine) {
          if (step == 0) sources.find(p, first_matrix, w.group, column, kColumns);  // the long copies are on their way
          sources.bring(p, scales, step);
        }
        copies_arrive(bar);
      }
    }
  }

  // Multiplies by the weights of a piece. `WIDE` says that scales are large, which costs an instruction more.
  template <int N, bool WIDE>
  __device__ __forceinline__ void multiply_piece(const Piece<N>& piece, const Scales& scales, const Affine<WIDE>& affine, int i,
                                                 float (&sums)[TILES][N / 8][4]) const {
    const Decoder<C, G, WIDE> decoder{p.first, table};
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      uint32_t a[kLoad / 16][4];
      if constexpr (C == Coding::kPlain) {
#pragma unroll
        for (int k = 0; k < kLoad / 4; ++k) a[k / 4][k % 4] = piece.words[t][k / 4][k % 4];
      } else if constexpr (C == Coding::kAffine) {
#pragma unroll
        for (int k = 0; k < 16; ++k) {  // a word's pairs one after the other
          const int half = k / 8, high = k / 4 % 2, pair = k % 4;
          const AffineGroup<WIDE>& group = affine.groups[t][high][half % Affine<WIDE>::kGroups];
          a[half * 2 + pair / 2][pair % 2 * 2 + high] = group.pair(piece.words[t][0][half * 2 + high], pair);
        }
      } else {
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int high = 0; high < 2; ++high)
            decoder.decode(piece.words[t][0][half * 2 + high], scales.words[t][high], i * kLoad + half * (kLoad / 2), half, high, a);
      }
#pragma unroll
      for (int k = 0; k < kLoad / 16; ++k)
#pragma unroll
        for (int n = 0; n < N / 8; ++n)
          mma_bf16(sums[t][n], a[k][0], a[k][1], a[k][2], a[k][3], piece.x[n][k / 2][k % 2 * 2],
                   piece.x[n][k / 2][k % 2 * 2 + 1]);
    }
  }

  // Multiplies by a stage, whose first piece is there, and reads the next stage's first piece meanwhile.
  template <int N, bool WIDE>
  __device__ __forceinline__ void multiply_stage(FewRowsRing& ring, int step, const Places& places, Piece<N>& ahead,
                                                 Scales& scales_ahead, float (&sums)[TILES][N / 8][4]) const {
    const Scales scales = scales_ahead;
    const uint32_t stage = weights_at(ring.at);
    Affine<WIDE> affine;
    uint32_t seen = scales.seen();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Piece<N> piece = ahead;
      seen ^= piece.seen();  // of each: products may come later than the code has them
      if constexpr (C == Coding::kAffine)
        if (i * kLoad % G == 0 || G < kLoad) affine.load(p, stage, places, step, i), seen ^= affine.seen();
      if (i < 3) {
        ahead.load(stage, places, i + 1);
      } else {
        __syncwarp();  // all lanes have read the stage before one lets it go
        mbar_arrive_seen(&empty[ring.at], (threadIdx.x & 31) == 0, seen, static_cast<uint32_t>(p.groups) >> 24);
        ring.next(p.stages);
        if (step + 1 < p.steps) {
          mbar_wait(&full[ring.at], ring.phase);
          ahead.load(weights_at(ring.at), places, 0), scales_ahead.load(weights_at(ring.at), places);
        }
      }
      multiply_piece<N, WIDE>(piece, scales, affine, i, sums);
    }
  }

  template <int N>
  __device__ __forceinline__ void multiply(FewRowsRing& ring, float (&sums)[TILES][N / 8][4]) {
    const Places places;
    Piece<N> ahead;
    Scales scales;
    mbar_wait(&full[ring.at], ring.phase);
    ahead.load(weights_at(ring.at), places, 0), scales.load(weights_at(ring.at), places);
    for (int step = 0; step < p.steps; ++step) {
      if (kWideScales<C> && __any_sync(~0u, scales.wide(p, step)))
        multiply_stage<N, true>(ring, step, places, ahead, scales, sums);
      else
        multiply_stage<N, false>(ring, step, places, ahead, scales, sums);
    }
  }

  // Of a tile's sums, two columns of d_out of one row, rounded and with the addend.
  __device__ __forceinline__ uint32_t result(const float (&sums)[4], int half, bool there, const void* addend,
                                             int64_t at) const {
    const uint32_t v = transposed(bf16x2(sums[half * 2], sums[half * 2 + 1]));
    return addend && there ? plus_addend(v, addend, at, p.addends_wide) : v;
  }

  template <int N>
  __device__ __forceinline__ void finish(const FewRowsWork& w, int tile, float (&sums)[TILES][N / 8][4]) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const FewRowsMatrix& of = p.matrices[matrix_of(tile)];
#pragma unroll
    for (int t = 0; t < (GATED ? 1 : TILES); ++t) {
      const int first = (tile - of.first_tile) * kColumns + Stage::weight_row(t, warp);
      if (of.bias) {
        const int low = first + lane / 4, high = low + 8;
        const auto* bias = of.bias + static_cast<int64_t>(w.group) * of.d_out;
        const float a = low < of.d_out ? __bfloat162float(bias[low]) : 0, b = high < of.d_out ? __bfloat162float(bias[high]) : 0;
#pragma unroll
        for (int n = 0; n < N / 8; ++n) sums[t][n][0] += a, sums[t][n][1] += a, sums[t][n][2] += b, sums[t][n][3] += b;
      }
#pragma unroll
      for (int n = 0; n < N / 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = n * 8 + lane / 4, column = first + half * 8 + lane % 4 * 2;
          const bool there = row < w.count && column < of.d_out;
          const int64_t at = static_cast<int64_t>(w.row + row) * of.d_out + column;
          uint32_t v = result(sums[t][n], half, there, of.addend, at);
          if constexpr (GATED) {
            const uint32_t other = result(sums[1][n], half, there, p.matrices[1].addend, at);
            const float2 g = __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&v));
            const float2 u = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&other));
            v = bf16x2(silu_times(g.x, u.x), silu_times(g.y, u.y));
          }
          if (there) *reinterpret_cast<uint32_t*>(of.y + at) = v;
        }
    }
  }

  template <int N>
  __device__ __forceinline__ void one(const FewRowsWork& w, int tile, FewRowsRing& ring) {
    float sums[TILES][N / 8][4];
#pragma unroll
    for (int i = 0; i < TILES * N / 2; ++i) sums[i / (N / 2)][i / 4 % (N / 8)][i % 4] = 0;
    multiply<N>(ring, sums);
    finish<N>(w, tile, sums);
  }

  __device__ __forceinline__ void consume() {
    FewRowsRing ring;
    for (int index = blockIdx.x; index < works * p.tiles; index += gridDim.x) {
      const FewRowsWork w = work(index);
      const int tile = index % p.tiles;
      if (ROWS == 8 || w.count <= 8)
        one<8>(w, tile, ring);
      else if (ROWS > 16 && w.count <= 16)
        one<16>(w, tile, ring);
      else
        one<ROWS>(w, tile, ring);
    }
  }

  // Rows in no group.
  __device__ __forceinline__ void store_zeros(int row) {
    for (const FewRowsMatrix& of : p.matrices) {
      if (!of.y) continue;
      const int64_t first = static_cast<int64_t>(row) * of.d_out / 2, end = static_cast<int64_t>(p.rows) * of.d_out / 2;
      auto* y = reinterpret_cast<uint32_t*>(of.y);
      for (int64_t i = first + blockIdx.x * (W * 32) + threadIdx.x; i < end; i += gridDim.x * (W * 32)) y[i] = 0;
    }
  }
};

template <Coding C, int G, int ROWS, int W, int TILES, bool GATED, int PER_SM>
__global__ void __launch_bounds__(W * 32 + 32, PER_SM) few_rows_kernel(const __grid_constant__ FewRowsArgs p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ int found[2];
  FewRowsKernel<C, G, ROWS, W, TILES, GATED> kernel(p, shared);
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < p.stages; ++s) {
      mbar_init(&kernel.full[s], C == Coding::kPlain ? 1 : 1 + 32);  // the copy engine, scales by a warp
      mbar_init(&kernel.empty[s], W);
    }
    fence_barriers();
  }
  if (threadIdx.x == W * 32)
    for (int m = 0; m < 2; ++m) prefetch_map(&p.maps[m]), prefetch_map(&p.x_maps[m]);
  if constexpr (C == Coding::kTable)
    for (int i = threadIdx.x; i < 16 * kTableRepeats; i += blockDim.x)
      sts32(kernel.table - (threadIdx.x & 31) * 4 + i * 4, __float_as_uint(p.table[i / kTableRepeats]));
  wait_for_previous();
  let_next_begin();
  if (warp == W) {
    const int2 list = kernel.make_list();
    found[0] = list.x, found[1] = list.y;
  }
  __syncthreads();
  kernel.works = uniform(found[0]);
  if (warp < W) {
    kernel.store_zeros(found[1]);
    kernel.consume();
  } else {
    kernel.bring();
  }
}

}  // namespace lora_jax
