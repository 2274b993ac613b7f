// out = w + scaling * B^T A for all matrices of a module, in place or not, one pass over the weights.
//
// A tile is some rows of w by 64 columns a warp. The copy engine brings tiles and B's part of them into
// a ring of stages and takes them out again, so that the bytes on their way depend on shared memory and
// not on registers: its rate is the floor. It comes near it where a tile holds wide pieces of rows, and
// where CTAs side by side work on neighbouring columns of the same rows.
// A's part, the 16-row operand of mma (two columns a lane, as in expand_block), stays in registers
// while a CTA walks down its columns; B's is the 8-column operand, one row of w per n.
#pragma once
#include "device/arithmetic.cuh"
#include "device/launch_early.cuh"
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
struct MergeUnit {
  const CUtensorMap *w_map, *out_map, *b_map;
  const __nv_bfloat16* a_pool;
  int matrix, inner;      // among all, whose site it is; within its array
  int block, begin, end;  // the first block of 64 columns; rows
  int d_in;
};

// The number of 64-column pieces that a CTA's warps take at once, and of units of rows, in one matrix.
__host__ __device__ inline int merge_chunks(int d_in) { return (d_in / 64 + kMergeWarps - 1) / kMergeWarps; }
__host__ __device__ inline int merge_parts(int d_out, int unit_rows) { return (d_out + unit_rows - 1) / unit_rows; }

// Matrices of one array.
struct MergePlan {
  MergeArgs args;
  CUtensorMap out_map, w_map, b_map;
  int unit_rows;  // that a CTA works through before it takes up the next columns
  __device__ __forceinline__ const int* sites() const { return args.sites; }
  __device__ __forceinline__ const float* scaling() const { return args.scaling; }
  __device__ __forceinline__ int max_rank() const { return args.max_rank; }
  __device__ __forceinline__ bool is_in_place() const { return args.w == args.out; }
  __device__ __forceinline__ MergeUnit unit() const {
    const int chunks = merge_chunks(args.d_in), parts = merge_parts(args.d_out, unit_rows);
    const int at = blockIdx.x, matrix = at / chunks / parts, begin = at / chunks % parts * unit_rows;
    return {&w_map, &out_map, &b_map, args.a_pool, matrix, matrix, at % chunks * kMergeWarps, begin,
            min(begin + unit_rows, args.d_out), args.d_in};
  }
  __device__ __forceinline__ void acquire(const MergeUnit&) const {}
};

// Matrices of several shapes in arrays of one matrix each. Their tensor maps were made before and lie in
// the device's memory: a launch's parameters would not hold them.
struct MergeGroup {  // of one shape
  CUtensorMap b_map;
  const __nv_bfloat16* a_pool;
  int d_out, d_in, unit_rows, first_matrix, first_unit;
};
constexpr int kMergeGroups = 8;
struct MergePlaces {
  const CUtensorMap* maps;  // [matrices, 2]: of the result, of w
  const int* site_rows;     // [matrices, 3]
  const float* scalings;    // [matrices]
  int most_ranks, groups;
  MergeGroup group[kMergeGroups];
  __device__ __forceinline__ const int* sites() const { return site_rows; }
  __device__ __forceinline__ const float* scaling() const { return scalings; }
  __device__ __forceinline__ int max_rank() const { return most_ranks; }
  __device__ __forceinline__ bool is_in_place() const { return false; }
  __device__ __forceinline__ MergeUnit unit() const {
    int n = 0;
    while (n + 1 < groups && group[n + 1].first_unit <= static_cast<int>(blockIdx.x)) ++n;
    const MergeGroup& g = group[n];
    const int chunks = merge_chunks(g.d_in), parts = merge_parts(g.d_out, g.unit_rows);
    const int at = blockIdx.x - g.first_unit, matrix = g.first_matrix + at / chunks / parts;
    const int begin = at / chunks % parts * g.unit_rows;
    return {maps + 2 * matrix + 1, maps + 2 * matrix, &g.b_map, g.a_pool, matrix, 0, at % chunks * kMergeWarps, begin,
            min(begin + g.unit_rows, g.d_out), g.d_in};
  }
  // By each thread that copies: the maps were written to memory as data.
  __device__ __forceinline__ void acquire(const MergeUnit& unit) const {
    acquire_map(unit.w_map), acquire_map(unit.out_map);
  }
};

// By one warp: lane i brings the i-th box of the tile, the lane after them B's part.
template <class S>
__device__ __forceinline__ void merge_load(const int* sites, MergeShared<S>& sm, const MergeUnit& unit, int row,
                                           int at) {
  if (row >= unit.end) return;
  const int lane = threadIdx.x & 31;
  const uint32_t stage = smem_u32(sm.stages[at]);
  uint64_t* full = &sm.full[at];
  if (lane == 0) mbar_expect(full, S::kStage);
  __syncwarp();
  if (lane < S::kBoxes)
    tile_copy(stage + lane * S::kBoxBytes, unit.w_map, 0, row + lane * S::kBox, unit.block, unit.inner, full);
  if (lane == S::kBoxes)
    tile_copy(stage + S::kTile, unit.b_map, row / 64 * 64, __ldg(sites + unit.matrix * 3 + 1), 0, 0, full);
}

// By the same warp, which then fills the stage that the store before has left.
template <class S>
__device__ __forceinline__ void merge_store(const int* sites, MergeShared<S>& sm, const MergeUnit& unit, int row,
                                            int at) {
  const int lane = threadIdx.x & 31;
  if (lane < S::kBoxes)
    tile_store(unit.out_map, row + lane * S::kBox, unit.block, unit.inner,
               smem_u32(sm.stages[at]) + lane * S::kBoxBytes);
  stores_commit();
  stores_wait<1>();
  __syncwarp();
  merge_load(sites, sm, unit, row + (S::kStages - 1) * S::kRows, (at + S::kStages - 1) % S::kStages);
}

// A's part of 64 columns: a[k][i] holds columns g * 8 + 2i and the next, ranks 2q, 2q+1, 2q+8, 2q+9 of step k.
template <int K>
struct MergeFactor {
  uint32_t a[K][4][4];
  uint32_t live[K][2];  // masks of B: its rows past the rank are someone else's
  __device__ __forceinline__ void load(const __nv_bfloat16* a_pool, int d_in, int first, int rank, int column) {
    const int g = (threadIdx.x & 31) >> 2, q = threadIdx.x & 3;
    auto at = [&](int k) {
      if (k >= rank) return make_uint4(0, 0, 0, 0);
      const auto* from = a_pool + static_cast<int64_t>(first + k) * d_in + column + g * 8;
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

template <class S, class Plan>
__global__ void __launch_bounds__(kMergeThreads, 1) merge_kernel(const __grid_constant__ Plan p) {
  extern __shared__ __align__(1024) unsigned char merge_raw[];
  auto& sm = *reinterpret_cast<MergeShared<S>*>(merge_raw);
  const int warp = threadIdx.x >> 5;
  const MergeUnit unit = p.unit();
  const int* site = p.sites() + unit.matrix * 3;
  const int rank = min(__ldg(site + 2), p.max_rank());
  if (rank <= 0 && p.is_in_place()) return;
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kStages; ++i) mbar_init(&sm.full[i], 1);
    fence_barriers();
  }
  __syncthreads();
  if (warp == 0) p.acquire(unit);
  if (warp == 0)
    for (int i = 0; i < S::kStages - 1; ++i) merge_load(p.sites(), sm, unit, unit.begin + i * S::kRows, i);
  const float scaling = __ldg(p.scaling() + unit.matrix);
  const int column = (unit.block + warp) * 64;
  MergeFactor<S::kK> factor;
  factor.load(unit.a_pool, unit.d_in, __ldg(site), column < unit.d_in ? rank : 0, column);
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
    if (warp == 0) merge_store(p.sites(), sm, unit, row, at);
    if (++at == S::kStages) at = 0, phase ^= 1;
  }
  if (warp == 0) stores_wait<0>();
}

// Long units load A's part less often, but there must be several for each SM.
inline int merge_unit_rows(const MergeArgs& args, int sms) {
  const int chunks = args.matrices * merge_chunks(args.d_in);
  int rows = 1024;
  while (rows > kMergeLeastRows && chunks * merge_parts(args.d_out, rows) < 4 * sms) rows /= 2;
  return rows;
}

// Calls `run` with the shape of tiles for adapters of up to so many ranks.
template <class Run>
cudaError_t with_merge_shape(int max_rank, Run run) {
  if (max_rank <= 16) return run(MergeShape<1, 64, 64, 3>{});
  if (max_rank <= 32) return run(MergeShape<2, 64, 64, 3>{});
  if (max_rank <= 64) return run(MergeShape<4, 64, 64, 3>{});
  return run(MergeShape<8, 32, 8, 4>{});
}

// The tensor map of matrices [matrices, d_out, d_in] that lie at `base`.
template <class S>
cudaError_t merge_map(S, CUtensorMap* map, const void* base, int matrices, int d_out, int d_in) {
  const cuuint64_t row = static_cast<cuuint64_t>(d_in) * 2, rows = static_cast<cuuint64_t>(d_out);
  const cuuint64_t dims[] = {64, rows, row / 128, static_cast<cuuint64_t>(matrices)};
  const cuuint64_t strides[] = {row, 128, row * rows};
  const cuuint32_t box[] = {64, S::kBox, kMergeWarps, 1};
  return swizzled_map<4>(map, base, dims, strides, box);
}
template <class S>
cudaError_t merge_b_map(S, CUtensorMap* map, const __nv_bfloat16* b_pool, int b_rows, int d_out) {
  const cuuint64_t rows = static_cast<cuuint64_t>(d_out);
  const cuuint64_t dims[] = {rows, static_cast<cuuint64_t>(b_rows), 1, 1}, strides[] = {rows * 2, 16, 16};
  const cuuint32_t box[] = {64, S::kK * 16, 1, 1};
  return swizzled_map<4>(map, b_pool, dims, strides, box);
}

// A CTA a unit: a persistent grid, which fills the ring across units, is 1 to 2% slower.
template <class S, class Plan>
cudaError_t launch_merge_plan(S, const Plan& p, int ctas, cudaStream_t stream) {
  const auto kernel = merge_kernel<S, Plan>;
  constexpr int bytes = sizeof(MergeShared<S>);
  const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (e != cudaSuccess) return e;
  kernel<<<ctas, kMergeThreads, bytes, stream>>>(p);
  return cudaGetLastError();
}

// Of one array of matrices.
inline cudaError_t launch_merge(const MergeArgs& args, cudaStream_t stream) {
  int sms = 0;
  const cudaError_t found = count_sms(&sms);
  if (found != cudaSuccess) return found;
  return with_merge_shape(args.max_rank, [&](auto shape) {
    MergePlan p{args, {}, {}, {}, merge_unit_rows(args, sms)};
    cudaError_t e = merge_b_map(shape, &p.b_map, args.b_pool, args.b_rows, args.d_out);
    if (e == cudaSuccess) e = merge_map(shape, &p.w_map, args.w, args.matrices, args.d_out, args.d_in);
    if (e == cudaSuccess) e = merge_map(shape, &p.out_map, args.out, args.matrices, args.d_out, args.d_in);
    if (e != cudaSuccess) return e;
    const int ctas = args.matrices * merge_chunks(args.d_in) * merge_parts(args.d_out, p.unit_rows);
    return launch_merge_plan(shape, p, ctas, stream);
  });
}

// The maps of a result and of w, which are matrices [d_out, d_in], for MergePlaces.
inline cudaError_t merge_places(CUtensorMap* maps, void* out, const void* w, int d_out, int d_in, int max_rank) {
  return with_merge_shape(max_rank, [&](auto shape) {
    const cudaError_t e = merge_map(shape, maps, out, 1, d_out, d_in);
    return e == cudaSuccess ? merge_map(shape, maps + 1, w, 1, d_out, d_in) : e;
  });
}

// Of `count` groups, each the matrices of one shape; their sites and maps follow each other. The last
// group, of the smallest matrices, is cut into short units, with which all SMs end at about one time.
inline cudaError_t launch_merge_placed(const CUtensorMap* maps, const MergeArgs* groups, int count,
                                       cudaStream_t stream) {
  if (count < 1 || count > kMergeGroups) return cudaErrorInvalidValue;
  MergePlaces p{maps, groups[0].sites, groups[0].scaling, groups[0].max_rank, count, {}};
  int matrices = 0, units = 0;
  const cudaError_t placed = with_merge_shape(p.most_ranks, [&](auto shape) {
    for (int i = 0; i < count; ++i) {
      const MergeArgs& args = groups[i];
      MergeGroup& g = p.group[i];
      g.a_pool = args.a_pool, g.d_out = args.d_out, g.d_in = args.d_in;
      g.first_matrix = matrices, g.first_unit = units, g.unit_rows = i + 1 < count ? 1024 : 256;
      const cudaError_t e = merge_b_map(shape, &g.b_map, args.b_pool, args.b_rows, args.d_out);
      if (e != cudaSuccess) return e;
      matrices += args.matrices;
      units += args.matrices * merge_chunks(args.d_in) * merge_parts(args.d_out, g.unit_rows);
    }
    return cudaSuccess;
  });
  if (placed != cudaSuccess) return placed;
  return with_merge_shape(p.most_ranks, [&](auto shape) { return launch_merge_plan(shape, p, units, stream); });
}

}  // namespace lora_jax
