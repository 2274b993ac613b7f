// y + s * (x A^T) B of each row's own adapter, where rank rows are int8 with a scale each (lora_jax/rank_rows.py).
//
// Every int8 is exact in bfloat16, so tensor cores multiply the values as they are, and both scales of a rank
// multiply its h, which is rounded to bfloat16 once, as it is without 8 bits. A rank row's tail of 16 bytes begins with
// its scale, so a row begins at a multiple of 16: a lane loads 16 values at once.
//
// One launch shrinks, a second one expands. The second begins with the first, and has weights and y on their way
// while it waits for h. Sums are in one order by the widths alone: a warp has every eighth piece of a part of x, then
// come warps, parts, and ranks by 16. So a row's bits depend on nothing but its own x, y and adapter.
#pragma once
#include "device/arithmetic.cuh"
#include "device/launch_early.cuh"
#include "lora_gemm/rank_rows.cuh"
#include "lora_gemm/units.cuh"

namespace lora_jax {

constexpr int kInt8Warps = 8;      // of a CTA
constexpr int kInt8Piece = 64;     // columns of x that a warp multiplies at a time
constexpr int kInt8Part = 2048;    // columns of x that a CTA multiplies
constexpr int kInt8Ranks = 16;     // of a step
constexpr int kInt8Columns = 128;  // of y that a warp adds to

struct Int8Args {
  Module modules[kMaxModules];
  const Item* items;
  const int *num_items, *row_order;
  const __nv_bfloat16* x;          // [rows, d_in]
  const int8_t *a_pool, *b_pool;   // [a_rows, d_in + tail], [b_rows, d_out + tail]
  float* sums;                     // [parts, modules, places, ranks]: of h, before it is rounded
  int num_modules, num_rows, num_slots, d_in, d_out, max_rank;
};

__host__ __device__ inline int int8_parts(int d_in) { return (d_in + kInt8Part - 1) / kInt8Part; }
__host__ __device__ inline int int8_ranks(int max_rank) { return (max_rank + kInt8Ranks - 1) / kInt8Ranks * kInt8Ranks; }

// What an item's rows multiply: the rank rows of its slot and expert.
struct Int8Site {
  Item item;
  const int8_t *a, *b;
  int rank;
  float scaling;
};
__device__ __forceinline__ Int8Site int8_site(const Int8Args& p, int module, int item) {
  const int4 of = load_now(reinterpret_cast<const int4*>(p.items) + item);
  const Module& m = p.modules[module];
  const int slot = min(static_cast<unsigned>(of.x), p.num_slots - 1u);
  const int* entry = m.entries + slot * 5;
  const int64_t a = load_now(entry), b = load_now(entry + 1), expert = of.y;
  const int rank = min(load_now(entry + 2), p.max_rank), a_stride = load_now(entry + 3), b_stride = load_now(entry + 4);
  return Int8Site{Item{of.x, of.y, of.z, of.w},
                  p.a_pool + (a + expert * a_stride) * (p.d_in + kInt8Tail),
                  p.b_pool + (b + expert * b_stride) * (p.d_out + kInt8Tail), rank, load_now(m.scaling + slot)};
}
__device__ __forceinline__ const int8_t* int8_row(const int8_t* rows, int row, int width) {
  return rows + static_cast<uint32_t>(row * (width + kInt8Tail));  // of one adapter: 32 bits suffice
}
__device__ __forceinline__ float int8_scale(const int8_t* rows, int row, int width) {
  return load_now(reinterpret_cast<const float*>(int8_row(rows, row, width) + width));
}
__device__ __forceinline__ float* int8_sums(const Int8Args& p, int part, int module, int place) {
  const int64_t row = (static_cast<int64_t>(part) * p.num_modules + module) * p.num_rows + place;
  return p.sums + row * int8_ranks(p.max_rank);
}

__device__ __forceinline__ int int8_word(const int4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Two int8, the low bytes of either half, as bfloat16: 128 and the low seven bits, less 128 or, below zero, 256.
__device__ __forceinline__ uint32_t int8_pair(uint32_t halves) {
  return subtract_bf16x2((halves & 0x007f007fu) | 0x43004300u, (halves & 0x00800080u) | 0x43004300u);
}
__device__ __forceinline__ uint32_t low_pair(int word) { return int8_pair(__byte_perm(word, 0, 0x4140)); }
__device__ __forceinline__ uint32_t high_pair(int word) { return int8_pair(__byte_perm(word, 0, 0x4342)); }

// ---------------------------------------------------------------- shrink
// One of the CTA's warps: adds the products of PIECES pieces from column `k` on, 8 apart. Lane 4 g + q has rank rows
// g and g + 8 and rows of x g, g + 8, ..., of a piece the 16 columns from 16 q on.
template <int GROUPS, int PIECES>
__device__ __forceinline__ void int8_shrink_pieces(const int8_t* const (&a)[2], const __nv_bfloat16* const (&x)[GROUPS],
                                                   int k, float (&acc)[GROUPS][4]) {
  int4 w[PIECES][2], v[PIECES][GROUPS][2];
#pragma unroll
  for (int s = 0; s < PIECES; ++s) {
    const int at = k + s * kInt8Warps * kInt8Piece;
#pragma unroll
    for (int r = 0; r < 2; ++r) w[s][r] = load_now(reinterpret_cast<const int4*>(a[r] + at));
#pragma unroll
    for (int j = 0; j < GROUPS; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) v[s][j][e] = load_now(reinterpret_cast<const int4*>(x[j] + at) + e);
  }
#pragma unroll
  for (int s = 0; s < PIECES; ++s)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int low = int8_word(w[s][0], i), high = int8_word(w[s][1], i);
      const uint32_t a0 = low_pair(low), a1 = low_pair(high), a2 = high_pair(low), a3 = high_pair(high);
#pragma unroll
      for (int j = 0; j < GROUPS; ++j) {
        const int4& four = v[s][j][i / 2];
        mma_bf16(acc[j], a0, a1, a2, a3, i % 2 ? four.z : four.x, i % 2 ? four.w : four.y);
      }
    }
}

// h of 16 rank rows from `first` on, of the rows of an item and one part of x. GROUPS: of 8 rows, at most.
template <int GROUPS, int PIECES>
__device__ __forceinline__ void int8_shrink_unit(const Int8Args& p, float* shared, int module, const Int8Site& site,
                                                 int first, int part) {
  constexpr int kStride = kInt8Ranks + 1, kRows = GROUPS * 8;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  const int end = min((part + 1) * kInt8Part, p.d_in);
  const int8_t* a[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) a[r] = int8_row(site.a, min(first + r * 8 + g, site.rank - 1), p.d_in) + q * 16;
  const __nv_bfloat16* x[GROUPS];
#pragma unroll
  for (int j = 0; j < GROUPS; ++j) {
    const int row = load_now(p.row_order + site.item.row_begin + min(j * 8 + g, site.item.num_rows - 1));
    x[j] = p.x + static_cast<int64_t>(row) * p.d_in + q * 16;
  }
  float acc[GROUPS][4] = {};
  constexpr int kTurn = kInt8Warps * kInt8Piece;
  int k = part * kInt8Part + warp * kInt8Piece;
#pragma unroll 1
  for (; k + (PIECES - 1) * kTurn < end; k += PIECES * kTurn) int8_shrink_pieces<GROUPS, PIECES>(a, x, k, acc);
#pragma unroll 1
  for (; PIECES > 1 && k < end; k += kTurn) int8_shrink_pieces<GROUPS, 1>(a, x, k, acc);
  float* mine = shared + warp * kRows * kStride;
#pragma unroll
  for (int j = 0; j < GROUPS; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) mine[(j * 8 + q * 2 + (e & 1)) * kStride + g + (e >> 1) * 8] = acc[j][e];
  __syncthreads();
  for (int i = threadIdx.x; i < site.item.num_rows * kInt8Ranks; i += kInt8Warps * 32) {
    const int row = i / kInt8Ranks, rank = first + i % kInt8Ranks;
    float sum = 0.f;
    if (rank < site.rank) {
#pragma unroll
      for (int w = 0; w < kInt8Warps; ++w) sum += shared[w * kRows * kStride + row * kStride + i % kInt8Ranks];
      sum *= site.scaling * int8_scale(site.a, rank, p.d_in) * int8_scale(site.b, rank, p.d_out);
    }
    int8_sums(p, part, module, site.item.row_begin + row)[rank] = sum;
  }
  __syncthreads();  // before the next unit's sums
}

// Unit by unit: items first, so that those of high ranks alone are spread over all CTAs.
static __global__ void __launch_bounds__(kInt8Warps * 32, 2) int8_shrink_kernel(const Int8Args p) {
  __shared__ float shared[kInt8Warps * kMaxRows * (kInt8Ranks + 1)];
  wait_for_previous();
  let_next_begin();  // which has to wait for h alone
  const int items = load_now(p.num_items), parts = int8_parts(p.d_in);
  const int of_group = items * p.num_modules * parts, units = of_group * (int8_ranks(p.max_rank) / kInt8Ranks);
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const int group = unit / of_group, rest = unit - group * of_group, each = rest / items, part = each / p.num_modules;
    const int module = each - part * p.num_modules, first = group * kInt8Ranks;
    const Int8Site site = int8_site(p, module, rest - each * items);
    if (first >= site.rank) continue;
    if (site.item.num_rows <= 8) int8_shrink_unit<1, 4>(p, shared, module, site, first, part);
    else if (site.item.num_rows <= 16) int8_shrink_unit<2, 2>(p, shared, module, site, first, part);
    else int8_shrink_unit<4, 1>(p, shared, module, site, first, part);
  }
}

// ---------------------------------------------------------------- expand
// B of 16 rank rows from `first` on, of a warp's columns: lane 4 g + q has rows 2 q, 2 q + 1, and those 8 further, of
// the 128 columns the 16 from 16 g on.
__device__ __forceinline__ void int8_load_b(const Int8Args& p, const Int8Site& site, int first, int column,
                                            int4 (&w)[4]) {
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int row = first + q * 2 + (r & 1) + (r >> 1) * 8;
    const int8_t* from = int8_row(site.b, min(row, site.rank - 1), p.d_out) + column + g * 16;
    if (column + g * 16 < p.d_out) w[r] = load_now(reinterpret_cast<const int4*>(from));
  }
}
// h of 16 ranks of the row that lane 4 g + q multiplies by, row g: the parts' sums in order.
__device__ __forceinline__ void int8_load_h(const Int8Args& p, int module, int place, int first, uint32_t (&h)[2]) {
  const int parts = int8_parts(p.d_in), at = first + (threadIdx.x & 3) * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float lo = 0.f, hi = 0.f;
    for (int part = 0; part < parts; ++part) {
      const float2 sum = *reinterpret_cast<const float2*>(int8_sums(p, part, module, place) + at + half * 8);
      lo += sum.x, hi += sum.y;
    }
    h[half] = bf16x2(lo, hi);
  }
}
// Columns 16 g to 16 g + 15, of rows 2 q and 2 q + 1: acc[i][m] has bytes m and m + 2 of words i.
__device__ __forceinline__ void int8_multiply_b(const int4 (&w)[4], const uint32_t (&h)[2], float (&acc)[4][2][4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      auto pair = [&](int r, int byte) {
        return int8_pair(__byte_perm(int8_word(w[r], i), int8_word(w[r + 1], i), 0x0400 + 0x0101 * byte));
      };
      mma_bf16(acc[i][m], pair(0, m), pair(0, m + 2), pair(2, m), pair(2, m + 2), h[0], h[1]);
    }
}

// Adds up to 8 rows of an item, from `from` on, to 128 columns of y. `wait` where h may still be to come.
__device__ __forceinline__ void int8_expand_rows(const Int8Args& p, int module, const Int8Site& site, int column,
                                                 int from, bool wait) {
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3, rows = site.item.num_rows - from;
  int4 w[2][4] = {};
  int8_load_b(p, site, 0, column, w[0]);
  uint4* out[2];
  uint4 y[2][2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int row = load_now(p.row_order + site.item.row_begin + from + min(q * 2 + e, rows - 1));
    out[e] = reinterpret_cast<uint4*>(p.modules[module].y + static_cast<int64_t>(row) * p.d_out + column + g * 16);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (column + g * 16 < p.d_out) y[e][i] = load_own(out[e] + i);
  }
  if (wait) wait_for_previous();
  float acc[4][2][4] = {};
  const int place = site.item.row_begin + from + min(g, rows - 1);
#pragma unroll 1
  for (int first = 0; first < site.rank; first += 2 * kInt8Ranks) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const int at = first + s * kInt8Ranks;
      if (at >= site.rank) break;
      if (at + kInt8Ranks < site.rank) int8_load_b(p, site, at + kInt8Ranks, column, w[s ^ 1]);
      uint32_t h[2];
      int8_load_h(p, module, place, at, h);
      int8_multiply_b(w[s], h, acc);
    }
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if (q * 2 + e >= rows || column + g * 16 >= p.d_out) continue;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto& near = acc[i * 2], &far = acc[i * 2 + 1];
      out[e][i] = make_uint4(add_bf16x2(y[e][i].x, near[0][e], near[1][e]), add_bf16x2(y[e][i].y, near[0][e + 2], near[1][e + 2]),
                             add_bf16x2(y[e][i].z, far[0][e], far[1][e]), add_bf16x2(y[e][i].w, far[0][e + 2], far[1][e + 2]));
    }
  }
}

// By warps; neighbouring columns go to other CTAs, so that few items are spread over all of them.
static __global__ void __launch_bounds__(kInt8Warps * 32, 2) int8_expand_kernel(const Int8Args p) {
  const int items = load_now(p.num_items), blocks = (p.d_out + kInt8Columns - 1) / kInt8Columns;
  const int of_module = items * blocks, ctas = gridDim.x;
  bool wait = true;
  for (int unit = (threadIdx.x >> 5) * ctas + blockIdx.x; unit < of_module * p.num_modules; unit += kInt8Warps * ctas) {
    const int module = unit / of_module, rest = unit - module * of_module, item = rest / blocks;
    const Int8Site site = int8_site(p, module, item);
    if (site.rank <= 0) continue;
    for (int from = 0; from < site.item.num_rows; from += 8) {
      int8_expand_rows(p, module, site, (rest - item * blocks) * kInt8Columns, from, wait);
      wait = false;
    }
  }
  if (wait) wait_for_previous();  // who follows waits for this kernel alone
}

// ---------------------------------------------------------------- both
inline cudaError_t launch_int8(const Int8Args& p, cudaStream_t stream) {
  int sms = 0;
  cudaError_t e = count_sms(&sms);
  if (e == cudaSuccess) e = launch_early(int8_shrink_kernel, sms * 2, kInt8Warps * 32, 0, stream, p);
  return e == cudaSuccess ? launch_early(int8_expand_kernel, sms * 2, kInt8Warps * 32, 0, stream, p) : e;
}

}  // namespace lora_jax
