// w += scaling * B^T A for all matrices of a module, in place, one pass over the weights.
//
// A tile is 64 rows of w by 64 columns a column warp. The copy engine brings tiles and B's part of
// them into a ring of stages and takes them out again, so that the bytes on their way depend on
// shared memory and not on registers: its rate is the floor. A's part, the 16-row operand of mma
// (two columns a lane, as in expand_block), stays in registers while a CTA walks down its columns;
// B's is the 8-column operand, one row of w per n.
#pragma once
#include "swizzled_map.cuh"

#include "ptx.cuh"

namespace lora_jax {

struct MergeArgs {
  __nv_bfloat16* w;             // [matrices, d_out, d_in]
  const __nv_bfloat16* a_pool;  // [a_rows, d_in]
  const __nv_bfloat16* b_pool;  // [b_rows, d_out]
  const int* sites;             // [matrices, 3]: a_row, b_row, rank
  const float* scaling;         // [matrices]
  int matrices, d_out, d_in, max_rank, b_rows;
};

struct MergePlan {
  MergeArgs args;
  CUtensorMap w_map, b_map;
  int unit_tiles;  // row tiles that are done one after the other before the next columns
};

constexpr int kMergeRows = 64;

// K: steps of 16 ranks. Warps share a tile out by COLUMNS of 64 and ROWS parts of its rows.
template <int K, int COLUMNS, int ROWS, int STAGES>
struct MergeShape {
  static constexpr int kWarps = COLUMNS * ROWS, kThreads = (kWarps + 1) * 32, kStages = STAGES;
  static constexpr int kWarpRows = kMergeRows / ROWS, kBox = kWarpRows * 128;
  static constexpr int kTile = kWarps * kBox, kStage = kTile + K * 16 * 128;
  static constexpr int kShared = STAGES * kStage + STAGES * 16;
};

template <class S>
struct MergeShared {
  alignas(1024) unsigned char stages[S::kStages][S::kStage];
  uint64_t full[S::kStages], empty[S::kStages];
};

// The CTA's share of all tiles, down the rows of a unit first, then over its columns.
template <class S>
struct MergeWalk {
  int row_tiles, chunks, unit_tiles, units, tile, end;
  __device__ MergeWalk(const MergePlan& p, int columns) : unit_tiles(p.unit_tiles) {
    row_tiles = (p.args.d_out + kMergeRows - 1) / kMergeRows, chunks = (p.args.d_in + columns - 1) / columns;
    units = (row_tiles + unit_tiles - 1) / unit_tiles;
    const int64_t tiles = static_cast<int64_t>(p.args.matrices) * units * chunks * unit_tiles;
    tile = static_cast<int>(tiles * blockIdx.x / gridDim.x), end = static_cast<int>(tiles * (blockIdx.x + 1) / gridDim.x);
  }
  __device__ __forceinline__ int column_tile() const { return tile / unit_tiles; }  // changes with A's part
  __device__ __forceinline__ int matrix() const { return tile / unit_tiles / chunks / units; }
  __device__ __forceinline__ int chunk() const { return tile / unit_tiles % chunks; }
  __device__ __forceinline__ int row() const {
    return (tile / unit_tiles / chunks % units * unit_tiles + tile % unit_tiles) * kMergeRows;
  }
};

template <class S>
struct MergeRing {
  int at = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next() {
    if (++at == S::kStages) at = 0, phase ^= 1;
  }
};

// Lane i brings the i-th warp's box of every tile, the lane after them B's part.
template <int K, int COLUMNS, int ROWS, int STAGES>
__device__ __forceinline__ void merge_produce(const MergePlan& p,
                                              MergeShared<MergeShape<K, COLUMNS, ROWS, STAGES>>& sm) {
  using S = MergeShape<K, COLUMNS, ROWS, STAGES>;
  const int lane = threadIdx.x & 31, blocks = p.args.d_in / 64;
  MergeRing<S> ring;
  for (MergeWalk<S> walk(p, COLUMNS * 64); walk.tile < walk.end; ++walk.tile) {
    const int* site = p.args.sites + walk.matrix() * 3;
    const int row = walk.row(), first = walk.chunk() * COLUMNS, block = first + lane / ROWS;
    if (row >= p.args.d_out || __ldg(site + 2) <= 0) continue;
    mbar_wait(&sm.empty[ring.at], ring.phase ^ 1);
    uint64_t* full = &sm.full[ring.at];
    if (lane == 0) mbar_expect(full, min(COLUMNS, blocks - first) * ROWS * S::kBox + K * 16 * 128);
    __syncwarp();
    const uint32_t stage = smem_u32(sm.stages[ring.at]);
    if (lane < S::kWarps && block < blocks)
      tile_copy(stage + lane * S::kBox, &p.w_map, 0, row + lane % ROWS * S::kWarpRows, block, walk.matrix(), full);
    if (lane == S::kWarps) tile_copy(stage + S::kTile, &p.b_map, row, __ldg(site + 1), 0, 0, full);
    ring.next();
  }
}

// A's part of 64 columns: a[k][i] holds columns g * 8 + 2i and the next, ranks 2q, 2q+1, 2q+8, 2q+9 of step k.
template <int K>
struct MergeFactor {
  uint32_t a[K][4][4];
  uint32_t live[K][2];  // masks of B: its rows past the rank are someone else's
  __device__ __forceinline__ void load(const MergeArgs& p, int first, int rank, int column) {
    const int g = (threadIdx.x & 31) >> 2, q = threadIdx.x & 3;
    auto at = [&](int k) {
      if (k >= rank) return make_uint4(0, 0, 0, 0);
      return __ldg(reinterpret_cast<const uint4*>(p.a_pool + static_cast<int64_t>(first + k) * p.d_in + column + g * 8));
    };
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int low = k * 16 + q * 2, high = low + 8;
      const uint4 r0 = at(low), r1 = at(low + 1), r2 = at(high), r3 = at(high + 1);
      auto pair = [&](uint32_t (&out)[4], uint32_t v0, uint32_t v1, uint32_t v2, uint32_t v3) {
        out[0] = __byte_perm(v0, v1, 0x5410), out[1] = __byte_perm(v0, v1, 0x7632);
        out[2] = __byte_perm(v2, v3, 0x5410), out[3] = __byte_perm(v2, v3, 0x7632);
      };
      pair(a[k][0], r0.x, r1.x, r2.x, r3.x);
      pair(a[k][1], r0.y, r1.y, r2.y, r3.y);
      pair(a[k][2], r0.z, r1.z, r2.z, r3.z);
      pair(a[k][3], r0.w, r1.w, r2.w, r3.w);
      live[k][0] = (low < rank ? 0xffffu : 0u) | (low + 1 < rank ? 0xffff0000u : 0u);
      live[k][1] = (high < rank ? 0xffffu : 0u) | (high + 1 < rank ? 0xffff0000u : 0u);
    }
  }
};

// Adds the product to 16 rows of a warp's box; `block` is their place among B's 8-row blocks.
template <int K>
__device__ __forceinline__ void merge_rows(const MergeFactor<K>& f, float scaling, uint32_t b, int block, uint32_t box) {
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3, r = lane & 7;
  const uint32_t from = b + ((lane >> 3 & 1) * 8 + r) * 128 + (((block + (lane >> 4)) ^ r) << 4);
  float acc[4][2][4] = {};
#pragma unroll
  for (int k = 0; k < K; ++k) {
    uint32_t h[4];
    ldmatrix_trans(h, from + k * 2048);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const uint32_t lo = h[n * 2] & f.live[k][0], hi = h[n * 2 + 1] & f.live[k][1];
#pragma unroll
      for (int i = 0; i < 4; ++i) mma_bf16(acc[i][n], f.a[k][i][0], f.a[k][i][1], f.a[k][i][2], f.a[k][i][3], lo, hi);
    }
  }
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = n * 8 + q * 2 + e;
      const uint32_t at = box + row * 128 + ((g ^ (row & 7)) << 4);
      uint4 o = lds128(at);
      o.x = add_bf16x2(o.x, scaling * acc[0][n][e], scaling * acc[0][n][e + 2]);
      o.y = add_bf16x2(o.y, scaling * acc[1][n][e], scaling * acc[1][n][e + 2]);
      o.z = add_bf16x2(o.z, scaling * acc[2][n][e], scaling * acc[2][n][e + 2]);
      o.w = add_bf16x2(o.w, scaling * acc[3][n][e], scaling * acc[3][n][e + 2]);
      sts128(at, o);
    }
}

// Each warp works in place on its own box and sends it back itself.
template <int K, int COLUMNS, int ROWS, int STAGES>
__device__ __forceinline__ void merge_consume(const MergePlan& p,
                                              MergeShared<MergeShape<K, COLUMNS, ROWS, STAGES>>& sm) {
  using S = MergeShape<K, COLUMNS, ROWS, STAGES>;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  MergeRing<S> ring;
  MergeFactor<K> factor;
  int known = -1, rank = 0, sent = -1;  // sent: the stage that the last store leaves
  float scaling = 0;
  for (MergeWalk<S> walk(p, COLUMNS * 64); walk.tile < walk.end; ++walk.tile) {
    const int row = walk.row(), matrix = walk.matrix(), block = walk.chunk() * COLUMNS + warp / ROWS;
    const bool mine = block * 64 < p.args.d_in;
    if (walk.column_tile() != known) {
      known = walk.column_tile();
      rank = min(__ldg(p.args.sites + matrix * 3 + 2), p.args.max_rank);
      scaling = __ldg(p.args.scaling + matrix);
      factor.load(p.args, __ldg(p.args.sites + matrix * 3), mine ? rank : 0, block * 64);
    }
    if (row >= p.args.d_out || rank <= 0) continue;
    mbar_wait(&sm.full[ring.at], ring.phase);
    const uint32_t stage = smem_u32(sm.stages[ring.at]), box = stage + warp * S::kBox;
    const int first = warp % ROWS * S::kWarpRows;
#pragma unroll 1
    for (int r = 0; r < S::kWarpRows; r += 16)
      merge_rows<K>(factor, scaling, stage + S::kTile, (first + r) / 8, box + r * 128);
    fence_copies();
    __syncwarp();
    if (lane == 0) {
      if (mine) tile_store(&p.w_map, row + first, block, matrix, box);
      stores_commit();
      stores_wait<1>();
      if (sent >= 0) mbar_arrive(&sm.empty[sent]);
    }
    sent = ring.at;
    ring.next();
  }
  if (lane == 0) stores_wait<0>();
}

template <int K, int COLUMNS, int ROWS, int STAGES>
__global__ void __launch_bounds__(MergeShape<K, COLUMNS, ROWS, STAGES>::kThreads)
    merge_kernel(const __grid_constant__ MergePlan p) {
  using S = MergeShape<K, COLUMNS, ROWS, STAGES>;
  extern __shared__ __align__(1024) unsigned char merge_raw[];
  auto& sm = *reinterpret_cast<MergeShared<S>*>(merge_raw);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      mbar_init(&sm.full[i], 1);
      mbar_init(&sm.empty[i], S::kWarps);
    }
    fence_barriers();
  }
  __syncthreads();
  if (threadIdx.x >> 5 == S::kWarps) merge_produce(p, sm);
  else merge_consume(p, sm);
}

template <int K, int COLUMNS, int ROWS, int STAGES>
cudaError_t launch_merge_shape(const MergeArgs& args, int ctas, int unit_rows, cudaStream_t stream) {
  using S = MergeShape<K, COLUMNS, ROWS, STAGES>;
  MergePlan p{args, {}, {}, (min(unit_rows, args.d_out) + kMergeRows - 1) / kMergeRows};
  const cuuint64_t row = static_cast<cuuint64_t>(args.d_in) * 2, rows = static_cast<cuuint64_t>(args.d_out);
  const cuuint64_t w_dims[] = {64, rows, row / 128, static_cast<cuuint64_t>(args.matrices)};
  const cuuint64_t w_strides[] = {row, 128, row * rows};
  const cuuint32_t w_box[] = {64, S::kWarpRows, 1, 1}, b_box[] = {kMergeRows, K * 16, 1, 1};
  const cuuint64_t b_dims[] = {rows, static_cast<cuuint64_t>(args.b_rows), 1, 1}, b_strides[] = {rows * 2, 16, 16};
  cudaError_t e = swizzled_map<4>(&p.w_map, args.w, w_dims, w_strides, w_box);
  if (e == cudaSuccess) e = swizzled_map<4>(&p.b_map, args.b_pool, b_dims, b_strides, b_box);
  const auto kernel = merge_kernel<K, COLUMNS, ROWS, STAGES>;
  constexpr int bytes = sizeof(MergeShared<S>);
  if (e == cudaSuccess) e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (e != cudaSuccess) return e;
  kernel<<<ctas, S::kThreads, bytes, stream>>>(p);
  return cudaGetLastError();
}

template <int K, int COLUMNS, int ROWS, int STAGES>
cudaError_t launch_merge_on(const MergeArgs& args, cudaStream_t stream) {
  int device = 0, sms = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  return e == cudaSuccess ? launch_merge_shape<K, COLUMNS, ROWS, STAGES>(args, sms, 1 << 30, stream) : e;
}

inline cudaError_t launch_merge(const MergeArgs& args, cudaStream_t stream) {
  if (args.max_rank <= 16) return launch_merge_on<1, 8, 1, 3>(args, stream);
  if (args.max_rank <= 32) return launch_merge_on<2, 8, 1, 3>(args, stream);
  if (args.max_rank <= 64) return launch_merge_on<4, 8, 1, 3>(args, stream);
  return launch_merge_on<8, 4, 1, 4>(args, stream);
}

}  // namespace lora_jax
