// w += scaling * B^T A for all matrices of a module, in place, one pass over the weights.
//
// A CTA owns kWarps * 8 * J rows of one matrix and a chunk of its columns. B's part stays in
// registers (the n8 operand of mma, one row of w per n), A streams through shared memory 64 columns
// at a time (the m16 operand, two columns a lane as in expand_block), w goes from memory to
// registers one step ahead and back. So w is read and written once and A is read from L2 once for
// every kWarps * 8 * J rows: the copy engine's rate is the floor.
#pragma once
#include <cuda_runtime_api.h>

#include "ptx.cuh"

namespace lora_jax {

struct MergeArgs {
  __nv_bfloat16* w;             // [matrices, d_out, d_in]
  const __nv_bfloat16* a_pool;  // [a_rows, d_in]
  const __nv_bfloat16* b_pool;  // [b_rows, d_out]
  const int* sites;             // [matrices, 3]: a_row, b_row, rank
  const float* scaling;         // [matrices]
  int matrices, d_out, d_in, max_rank;
};

constexpr int kMergeWarps = 8, kMergeStages = 4, kMergeChunk = 2048;

// K: steps of 16 ranks; J: blocks of 8 rows a warp.
template <int K, int J>
struct Merge {
  static constexpr int kRows = kMergeWarps * J * 8, kStage = K * 16 * 128;
  static constexpr int kShared = kMergeStages * kStage;
  const MergeArgs& p;
  const __nv_bfloat16* a;  // first rank row
  int rank, column, steps;
  uint32_t stages;

  // Brings 64 columns of A into a stage, rows past the rank as zeros; always one group of copies.
  __device__ __forceinline__ void fetch(int step) const {
    if (step < steps) {
      const uint32_t stage = stages + step % kMergeStages * kStage;
      for (int i = threadIdx.x; i < K * 128; i += kMergeWarps * 32) {
        const int k = i >> 3, c = i & 7;
        const bool live = k < rank;
        const __nv_bfloat16* from = a + static_cast<int64_t>(live ? k : 0) * p.d_in + column + step * 64 + c * 8;
        copy_16(stage + k * 128 + ((c ^ (k & 7)) << 4), from, live ? 16 : 0);
      }
    }
    copies_commit();
  }

  // B^T for this warp's rows: hs[k][j] holds ranks 2q, 2q+1 and 2q+8, 2q+9 of row j * 8 + g.
  __device__ __forceinline__ void load_b(const __nv_bfloat16* b, int row, uint32_t (&hs)[K][J][2]) const {
    const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    const auto* bits = reinterpret_cast<const unsigned short*>(b);
    auto at = [&](int k, int r) -> uint32_t {
      return k < rank && r < p.d_out ? __ldg(bits + static_cast<int64_t>(k) * p.d_out + r) : 0u;
    };
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
      for (int j = 0; j < J; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int first = k * 16 + half * 8 + q * 2, r = row + j * 8 + g;
          hs[k][j][half] = at(first, r) | at(first + 1, r) << 16;
        }
  }

  // acc[i][j][e] is column g * 8 + 2i of row j * 8 + q * 2 + e, acc[i][j][e + 2] the column after it.
  __device__ __forceinline__ void multiply(int step, const uint32_t (&hs)[K][J][2], float (&acc)[4][J][4]) const {
    const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    const uint32_t stage = stages + step % kMergeStages * kStage;
    const uint32_t even = stage + q * 256 + ((g ^ (q * 2)) << 4), odd = stage + q * 256 + 128 + ((g ^ (q * 2 + 1)) << 4);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const uint32_t lo = k * 2048, hi = lo + 1024;
      const uint4 w0 = lds128(even + lo), w1 = lds128(odd + lo), w2 = lds128(even + hi), w3 = lds128(odd + hi);
      auto pair = [&](float (&out)[J][4], uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
        const uint32_t a0 = __byte_perm(r0, r1, 0x5410), a1 = __byte_perm(r0, r1, 0x7632);
        const uint32_t a2 = __byte_perm(r2, r3, 0x5410), a3 = __byte_perm(r2, r3, 0x7632);
#pragma unroll
        for (int j = 0; j < J; ++j) mma_bf16(out[j], a0, a1, a2, a3, hs[k][j][0], hs[k][j][1]);
      };
      pair(acc[0], w0.x, w1.x, w2.x, w3.x);
      pair(acc[1], w0.y, w1.y, w2.y, w3.y);
      pair(acc[2], w0.z, w1.z, w2.z, w3.z);
      pair(acc[3], w0.w, w1.w, w2.w, w3.w);
    }
  }
};

template <int K, int J>
__global__ void __launch_bounds__(kMergeWarps * 32, 1) merge_kernel(const MergeArgs p) {
  using M = Merge<K, J>;
  extern __shared__ __align__(128) unsigned char merge_raw[];
  const int blocks = (p.d_out + M::kRows - 1) / M::kRows, chunks = (p.d_in + kMergeChunk - 1) / kMergeChunk;
  const int matrix = blockIdx.x / (blocks * chunks), chunk = blockIdx.x / blocks % chunks;
  const int rank = min(__ldg(p.sites + matrix * 3 + 2), p.max_rank);
  if (rank <= 0) return;
  const int column = chunk * kMergeChunk, steps = (min(kMergeChunk, p.d_in - column)) / 64;
  const M m{p, p.a_pool + static_cast<int64_t>(__ldg(p.sites + matrix * 3)) * p.d_in, rank, column, steps,
            smem_u32(merge_raw)};
  for (int s = 0; s < kMergeStages - 1; ++s) m.fetch(s);
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  const int row = blockIdx.x % blocks * M::kRows + (threadIdx.x >> 5) * J * 8;
  __nv_bfloat16* w = p.w + (static_cast<int64_t>(matrix) * p.d_out + row + q * 2) * p.d_in + column + g * 8;
  auto place = [&](int step, int j, int e) {
    return reinterpret_cast<uint4*>(w + static_cast<int64_t>(j * 8 + e) * p.d_in + step * 64);
  };
  auto lives = [&](int j, int e) { return row + j * 8 + q * 2 + e < p.d_out; };
  uint4 next[J][2];
  auto load_w = [&](int step) {
#pragma unroll
    for (int j = 0; j < J; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (lives(j, e)) next[j][e] = __ldcs(place(step, j, e));
  };
  load_w(0);
  uint32_t hs[K][J][2];
  m.load_b(p.b_pool + static_cast<int64_t>(__ldg(p.sites + matrix * 3 + 1)) * p.d_out, row, hs);
  const float scaling = __ldg(p.scaling + matrix);
  for (int step = 0; step < steps; ++step) {
    copies_wait<kMergeStages - 2>();
    __syncthreads();  // the stage is there for all, and all have left the one that is filled next
    m.fetch(step + kMergeStages - 1);
    uint4 now[J][2];
#pragma unroll
    for (int j = 0; j < J; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) now[j][e] = next[j][e];
    if (step + 1 < steps) load_w(step + 1);
    float acc[4][J][4] = {};
    m.multiply(step, hs, acc);
#pragma unroll
    for (int j = 0; j < J; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        uint4 o = now[j][e];
        o.x = add_bf16x2(o.x, scaling * acc[0][j][e], scaling * acc[0][j][e + 2]);
        o.y = add_bf16x2(o.y, scaling * acc[1][j][e], scaling * acc[1][j][e + 2]);
        o.z = add_bf16x2(o.z, scaling * acc[2][j][e], scaling * acc[2][j][e + 2]);
        o.w = add_bf16x2(o.w, scaling * acc[3][j][e], scaling * acc[3][j][e + 2]);
        if (lives(j, e)) __stcs(place(step, j, e), o);
      }
  }
}

template <int K, int J>
cudaError_t launch_merge_ranks(const MergeArgs& p, cudaStream_t stream) {
  using M = Merge<K, J>;
  const int64_t blocks = (p.d_out + M::kRows - 1) / M::kRows, chunks = (p.d_in + kMergeChunk - 1) / kMergeChunk;
  const auto kernel = merge_kernel<K, J>;
  cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, M::kShared);
  if (e != cudaSuccess) return e;
  kernel<<<static_cast<unsigned>(p.matrices * blocks * chunks), kMergeWarps * 32, M::kShared, stream>>>(p);
  return cudaGetLastError();
}

inline cudaError_t launch_merge(const MergeArgs& p, cudaStream_t stream) {
  if (p.max_rank <= 16) return launch_merge_ranks<1, 4>(p, stream);
  if (p.max_rank <= 32) return launch_merge_ranks<2, 4>(p, stream);
  if (p.max_rank <= 64) return launch_merge_ranks<4, 4>(p, stream);
  return launch_merge_ranks<8, 2>(p, stream);
}

}  // namespace lora_jax
