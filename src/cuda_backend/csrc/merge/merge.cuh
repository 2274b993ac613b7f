// out = w + scaling * B^T A for all matrices of a module, in place or not, one pass over the weights.
//
// A tile is some rows of w by 64 columns a warp. The copy engine brings tiles and B's part of them into
// a ring of stages and takes them out again, so that the bytes on their way depend on shared memory and
// not on registers: its rate is the floor. It comes near it where a tile holds wide pieces of rows, and
// where CTAs side by side work on neighbouring columns of the same rows.
// A's part, the 16-row operand of mma (two columns a lane, as in expand_block), stays in registers
// while a CTA walks down its columns; B's is the 8-column operand, one row of w per n.
#pragma once
#include "device/ptx.cuh"
#include "device/swizzled_map.cuh"

namespace lora_jax {

struct MergeArgs {
  __nv_bfloat16* out;           // [matrices, d_out, d_in]
  const __nv_bfloat16* w;       // the same shape: out itself, or memory apart from it
  const __nv_bfloat16* a_pool;  // [a_rows, d_in]
  const __nv_bfloat16* b_pool;  // [b_rows, d_out]
  const int* sites;             // [matrices, 3]: a_row, b_row, rank
  const float* scaling;         // [matrices]
  int matrices, d_out, d_in, max_rank, b_rows;
};

// The matrices of a launch are one array, or MAPS arrays apart of one matrix each. Each array takes 256
// bytes of the kernel's parameters, of which there are 32,764.
template <int MAPS>
struct MergePlan {
  MergeArgs args;
  CUtensorMap out_maps[MAPS], w_maps[MAPS], b_map;
  int unit_rows;  // that a CTA works through before it takes up the next columns
};
constexpr int kMergeMaps = 48;

constexpr int kMergeWarps = 8, kMergeThreads = kMergeWarps * 32, kMergeLeastRows = 64;

// K: steps of 16 ranks. ROWS of a tile, in boxes of BOX.
template <int K, int ROWS, int BOX, int STAGES>
struct MergeShape {
  static constexpr int kK = K, kRows = ROWS, kBox = BOX, kStages = STAGES;
  static constexpr int kBoxes = ROWS / BOX, kBoxBytes = BOX * kMergeWarps * 128;
  static constexpr int kTile = kBoxes * kBoxBytes, kStage = kTile + K * 16 * 128;
  static_assert(ROWS <= 64 && 64 % ROWS == 0 && BOX % 8 == 0, "B comes in boxes of 64 rows, swizzled by 8");
};

template <class S>
struct MergeShared {
  alignas(1024) unsigned char stages[S::kStages][S::kStage];
  uint64_t full[S::kStages];
};

// What a CTA works through. Units of the same rows follow each other, so that CTAs side by side share
// DRAM pages.
template <class S>
struct MergeUnit {
  int matrix, block, begin, end;  // the first block of 64 columns; rows
  int map, inner;                 // the matrix's array, and its place there
  template <int MAPS>
  __device__ explicit MergeUnit(const MergePlan<MAPS>& p) {
    const int chunks = (p.args.d_in / 64 + kMergeWarps - 1) / kMergeWarps;
    const int parts = (p.args.d_out + p.unit_rows - 1) / p.unit_rows, unit = blockIdx.x;
    block = unit % chunks * kMergeWarps, matrix = unit / chunks / parts;
    begin = unit / chunks % parts * p.unit_rows, end = min(begin + p.unit_rows, p.args.d_out);
    map = MAPS == 1 ? 0 : matrix, inner = MAPS == 1 ? matrix : 0;
  }
};

// By one warp: lane i brings the i-th box of the tile, the lane after them B's part.
template <class S, int MAPS>
__device__ __forceinline__ void merge_load(const MergePlan<MAPS>& p, MergeShared<S>& sm, const MergeUnit<S>& unit,
                                           int row, int at) {
  if (row >= unit.end) return;
  const int lane = threadIdx.x & 31;
  const uint32_t stage = smem_u32(sm.stages[at]);
  uint64_t* full = &sm.full[at];
  if (lane == 0) mbar_expect(full, S::kStage);
  __syncwarp();
  if (lane < S::kBoxes)
    tile_copy(stage + lane * S::kBoxBytes, &p.w_maps[unit.map], 0, row + lane * S::kBox, unit.block, unit.inner, full);
  if (lane == S::kBoxes)
    tile_copy(stage + S::kTile, &p.b_map, row / 64 * 64, __ldg(p.args.sites + unit.matrix * 3 + 1), 0, 0, full);
}

// By the same warp, which then fills the stage that the store before has left.
template <class S, int MAPS>
__device__ __forceinline__ void merge_store(const MergePlan<MAPS>& p, MergeShared<S>& sm, const MergeUnit<S>& unit,
                                            int row, int at) {
  const int lane = threadIdx.x & 31;
  if (lane < S::kBoxes)
    tile_store(&p.out_maps[unit.map], row + lane * S::kBox, unit.block, unit.inner,
               smem_u32(sm.stages[at]) + lane * S::kBoxBytes);
  stores_commit();
  stores_wait<1>();
  __syncwarp();
  merge_load(p, sm, unit, row + (S::kStages - 1) * S::kRows, (at + S::kStages - 1) % S::kStages);
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
      const auto* from = p.a_pool + static_cast<int64_t>(first + k) * p.d_in + column + g * 8;
      return __ldg(reinterpret_cast<const uint4*>(from));
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

// Adds the product to 16 rows of a block of 64 columns. `b` is B's part of the tile and b_block the
// place of these rows among its 8-row blocks; at(r) is where row r, a multiple of 8, begins.
template <int K, class At>
__device__ __forceinline__ void merge_rows(const MergeFactor<K>& f, float scaling, uint32_t b, int b_block, At at) {
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3, r = lane & 7;
  const uint32_t from = b + ((lane >> 3 & 1) * 8 + r) * 128 + (((b_block + (lane >> 4)) ^ r) << 4);
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
      const uint32_t row = q * 2 + e, place = at(n * 8) + row * 128 + ((g ^ row) << 4);
      uint4 o = lds128(place);
      o.x = add_bf16x2(o.x, scaling * acc[0][n][e], scaling * acc[0][n][e + 2]);
      o.y = add_bf16x2(o.y, scaling * acc[1][n][e], scaling * acc[1][n][e + 2]);
      o.z = add_bf16x2(o.z, scaling * acc[2][n][e], scaling * acc[2][n][e + 2]);
      o.w = add_bf16x2(o.w, scaling * acc[3][n][e], scaling * acc[3][n][e + 2]);
      sts128(place, o);
    }
}

template <class S, int MAPS>
__global__ void __launch_bounds__(kMergeThreads, 1) merge_kernel(const __grid_constant__ MergePlan<MAPS> p) {
  extern __shared__ __align__(1024) unsigned char merge_raw[];
  auto& sm = *reinterpret_cast<MergeShared<S>*>(merge_raw);
  const int warp = threadIdx.x >> 5;
  const MergeUnit<S> unit(p);
  const int* site = p.args.sites + unit.matrix * 3;
  const int rank = min(__ldg(site + 2), p.args.max_rank);
  if (rank <= 0 && p.args.w == p.args.out) return;
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kStages; ++i) mbar_init(&sm.full[i], 1);
    fence_barriers();
  }
  __syncthreads();
  if (warp == 0)
    for (int i = 0; i < S::kStages - 1; ++i) merge_load(p, sm, unit, unit.begin + i * S::kRows, i);
  const float scaling = __ldg(p.args.scaling + unit.matrix);
  const int column = (unit.block + warp) * 64;
  MergeFactor<S::kK> factor;
  factor.load(p.args, __ldg(site), column < p.args.d_in ? rank : 0, column);
  int at = 0;
  uint32_t phase = 0;
  for (int row = unit.begin; row < unit.end; row += S::kRows) {
    mbar_wait(&sm.full[at], phase);
    const uint32_t stage = smem_u32(sm.stages[at]);
#pragma unroll 1
    for (int r = 0; r < S::kRows && rank > 0; r += 16)  // without a rank the tile is copied
      merge_rows<S::kK>(factor, scaling, stage + S::kTile, (row % 64 + r) / 8, [&](int more) {
        const int r8 = r + more;
        return stage + r8 / S::kBox * S::kBoxBytes + (warp * S::kBox + r8 % S::kBox) * 128;
      });
    fence_copies();
    __syncthreads();  // the tile is done
    if (warp == 0) merge_store(p, sm, unit, row, at);
    if (++at == S::kStages) at = 0, phase ^= 1;
  }
  if (warp == 0) stores_wait<0>();
}

template <class S>
int merge_units(const MergeArgs& args, int unit_rows) {
  const int chunks = (args.d_in / 64 + kMergeWarps - 1) / kMergeWarps;
  return args.matrices * ((args.d_out + unit_rows - 1) / unit_rows) * chunks;
}
// Long units load A's part less often, but there must be several for each SM.
template <class S>
int merge_unit_rows(const MergeArgs& args, int sms) {
  int rows = 1024;
  while (rows > kMergeLeastRows && merge_units<S>(args, rows) < 4 * sms) rows /= 2;
  return rows;
}

// A CTA a unit: a persistent grid, which fills the ring across units, is 1 to 2% slower. `w` and `out`
// are the MAPS arrays, or the first ones of them.
template <class S, int MAPS>
cudaError_t launch_merge_shape(const MergeArgs& args, const void* const* w, void* const* out, int unit_rows,
                               cudaStream_t stream) {
  MergePlan<MAPS> p{args, {}, {}, {}, unit_rows};
  const int ctas = merge_units<S>(args, unit_rows), arrays = MAPS == 1 ? 1 : args.matrices;
  const cuuint64_t row = static_cast<cuuint64_t>(args.d_in) * 2, rows = static_cast<cuuint64_t>(args.d_out);
  const cuuint64_t w_dims[] = {64, rows, row / 128, static_cast<cuuint64_t>(MAPS == 1 ? args.matrices : 1)};
  const cuuint64_t w_strides[] = {row, 128, row * rows};
  const cuuint32_t w_box[] = {64, S::kBox, kMergeWarps, 1}, b_box[] = {64, S::kK * 16, 1, 1};
  const cuuint64_t b_dims[] = {rows, static_cast<cuuint64_t>(args.b_rows), 1, 1}, b_strides[] = {rows * 2, 16, 16};
  cudaError_t e = swizzled_map<4>(&p.b_map, args.b_pool, b_dims, b_strides, b_box);
  for (int i = 0; i < arrays && e == cudaSuccess; ++i) {
    e = swizzled_map<4>(&p.w_maps[i], w[i], w_dims, w_strides, w_box);
    if (e == cudaSuccess) e = swizzled_map<4>(&p.out_maps[i], out[i], w_dims, w_strides, w_box);
  }
  const auto kernel = merge_kernel<S, MAPS>;
  constexpr int bytes = sizeof(MergeShared<S>);
  if (e == cudaSuccess) e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (e != cudaSuccess) return e;
  kernel<<<ctas, kMergeThreads, bytes, stream>>>(p);
  return cudaGetLastError();
}

template <class S, int MAPS>
cudaError_t launch_merge_on(const MergeArgs& args, const void* const* w, void* const* out, cudaStream_t stream) {
  int device = 0, sms = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  if (e != cudaSuccess) return e;
  return launch_merge_shape<S, MAPS>(args, w, out, merge_unit_rows<S>(args, sms), stream);
}

template <int MAPS>
cudaError_t launch_merge_maps(const MergeArgs& args, const void* const* w, void* const* out, cudaStream_t stream) {
  if (args.max_rank <= 16) return launch_merge_on<MergeShape<1, 64, 64, 3>, MAPS>(args, w, out, stream);
  if (args.max_rank <= 32) return launch_merge_on<MergeShape<2, 64, 64, 3>, MAPS>(args, w, out, stream);
  if (args.max_rank <= 64) return launch_merge_on<MergeShape<4, 64, 64, 3>, MAPS>(args, w, out, stream);
  return launch_merge_on<MergeShape<8, 32, 8, 4>, MAPS>(args, w, out, stream);
}

// Of one array of matrices.
inline cudaError_t launch_merge(const MergeArgs& args, cudaStream_t stream) {
  const void* w = args.w;
  void* out = args.out;
  return launch_merge_maps<1>(args, &w, &out, stream);
}

// Of args.matrices arrays of one matrix each, into arrays apart; args.w and args.out are not read.
inline cudaError_t launch_merge_apart(const MergeArgs& args, const void* const* w, void* const* out,
                                      cudaStream_t stream) {
  for (int first = 0; first < args.matrices; first += kMergeMaps) {
    MergeArgs some = args;
    some.matrices = min(kMergeMaps, args.matrices - first), some.sites += first * 3, some.scaling += first;
    some.out = nullptr, some.w = args.a_pool;  // not in place
    const cudaError_t e = launch_merge_maps<kMergeMaps>(some, w + first, out + first, stream);
    if (e != cudaSuccess) return e;
  }
  return cudaSuccess;
}

}  // namespace lora_jax
