// y = silu(gate + its adapters) (up + its adapters) of many rows, whose h the kernels before have: of the rows of tiles
// a warp adds in registers and multiplies. Rows of items have their adapters already, others have none: they are
// multiplied alone, behind the tiles. The bits are those of the expand and of silu_times_kernel.
//
// Memory binds, so nothing is shared: a warp has 64 columns of a tile, B of gate and of up in registers, and asks for
// the next 8 rows of both products before it adds to the last ones.
#pragma once
#include "device/launch_early.cuh"
#include "device/silu.cuh"
#include "lora_gemm/prefill_expand.cuh"

namespace lora_jax {

constexpr int kGatedThreads = 256, kGatedColumns = 64;  // of a warp

// 8 rows of both products and their h, as they come: a lane has 8 columns of rows 2 q and the next.
template <int STEPS>
struct GatedRows {
  int64_t at[2];  // in units of 8 columns
  uint4 part[2][2];
  uint32_t h[2][STEPS][2];  // of row g, as mma wants it
};

template <int STEPS>
struct GatedTile {
  const TileArgs& p;
  Item tile;
  int column;
  Columns<STEPS> weights[2];
  int rank[2];

  __device__ __forceinline__ GatedTile(const TileArgs& p, const Item& tile, int column) : p(p), tile(tile), column(column) {
    const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int* entry = p.modules[m].entries + tile.slot * 5;
      rank[m] = min(__ldg(entry + 2), p.max_rank);
      const int64_t first = __ldg(entry + 1) + static_cast<int64_t>(tile.expert) * __ldg(entry + 4);
#pragma unroll
      for (int s = 0; s < STEPS; ++s)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int r = s * 16 + i / 2 * 8 + q * 2 + i % 2;
          int4 w{};
          if (r < rank[m]) w = load_now(reinterpret_cast<const int4*>(p.b_pool + (first + r) * p.d_out + column + g * 8));
          weights[m].a[s][i][0] = w.x, weights[m].a[s][i][1] = w.y, weights[m].a[s][i][2] = w.z, weights[m].a[s][i][3] = w.w;
        }
      weights[m].turn();
    }
  }

  // Which rows a lane has from `n` on; past the last one that.
  __device__ __forceinline__ int2 rows_at(int n) const {
    const int q = threadIdx.x & 3, last = tile.num_rows - 1;
    const int* order = p.row_order + tile.row_begin;
    return make_int2(__ldg(order + min(n + q * 2, last)), __ldg(order + min(n + q * 2 + 1, last)));
  }
  // Asks for rows from `n` on, whose numbers are `which`.
  __device__ __forceinline__ void ask(GatedRows<STEPS>& rows, const int2& which, int n) const {
    const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3, last = tile.num_rows - 1;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      rows.at[e] = (static_cast<int64_t>(e ? which.y : which.x) * p.d_out + column) / 8 + g;
#pragma unroll
      for (int m = 0; m < 2; ++m) load_last(rows.part[m][e], reinterpret_cast<const uint4*>(p.modules[m].y) + rows.at[e], true);
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const auto* h = reinterpret_cast<const int*>(h_row(p, m, tile.row_begin + min(n + g, last))) + q;
#pragma unroll
      for (int s = 0; s < STEPS; ++s)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          rows.h[m][s][half] = s * 16 + half * 8 < rank[m] ? load_now(h + s * 8 + half * 4) : 0;
    }
  }

  __device__ __forceinline__ void add(GatedRows<STEPS>& rows, int m) const {
    float acc[4][4] = {};
#pragma unroll
    for (int s = 0; s < STEPS; ++s)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t(&a)[4] = weights[m].a[s][i];
        mma_bf16(acc[i], a[0], a[1], a[2], a[3], rows.h[m][s][0], rows.h[m][s][1]);
      }
    uint4(&y)[2] = rows.part[m];
    auto two_columns = [&](int i, uint32_t& first, uint32_t& second) {
      first = add_pair(first, acc[i][0], acc[i][2]), second = add_pair(second, acc[i][1], acc[i][3]);
    };
    two_columns(0, y[0].x, y[1].x);
    two_columns(1, y[0].y, y[1].y);
    two_columns(2, y[0].z, y[1].z);
    two_columns(3, y[0].w, y[1].w);
  }

  __device__ __forceinline__ void run(__nv_bfloat16* y) const {
    const int q = threadIdx.x & 3;
    GatedRows<STEPS> next;
    ask(next, rows_at(0), 0);
    int2 which = rows_at(8);  // a turn ahead, so that none waits for its rows' numbers
#pragma unroll 1
    for (int n = 0; n < tile.num_rows; n += 8) {
      GatedRows<STEPS> rows = next;
      if (n + 8 < tile.num_rows) ask(next, which, n + 8);
      which = rows_at(n + 16);
#pragma unroll
      for (int m = 0; m < 2; ++m)
        if (rank[m] > 0) add(rows, m);
#pragma unroll
      for (int e = 0; e < 2; ++e)
        store_last(reinterpret_cast<uint4*>(y) + rows.at[e], silu_times_8(rows.part[0][e], rows.part[1][e]), n + q * 2 + e < tile.num_rows);
    }
  }
};

// By a CTA: a row that needs no adapter here; zeros for padding.
__device__ __forceinline__ void multiply_row(const GatedTileArgs& a, int row, int real) {
  const int columns = a.tiles.d_out / 8;
  const int64_t first = static_cast<int64_t>(row) * columns;
  const auto* gate = reinterpret_cast<const int4*>(a.tiles.modules[0].y) + first;
  const auto* up = reinterpret_cast<const int4*>(a.tiles.modules[1].y) + first;
  auto* y = reinterpret_cast<uint4*>(a.y) + first;
#pragma unroll 4
  for (int c = threadIdx.x; c < columns; c += kGatedThreads) {
    const int4 g = row < real ? load_now(gate + c) : int4{}, u = row < real ? load_now(up + c) : int4{};
    y[c] = silu_times_8(make_uint4(g.x, g.y, g.z, g.w), make_uint4(u.x, u.y, u.z, u.w));
  }
}

// The items' rows, of whose places each CTA has every n-th: its threads look at an item each.
__device__ __forceinline__ void multiply_items(const GatedTileArgs& a, int items, int real) {
  __shared__ int rows[kGatedThreads];
  __shared__ int count[1];
  const int ctas = gridDim.x, of_item = (kMaxRows + ctas - 1) / ctas, at_once = kGatedThreads / of_item;
  for (int first = 0; first < items; first += at_once) {
    if (threadIdx.x == 0) count[0] = 0;
    __syncthreads();
    const int i = first + threadIdx.x;
    if (static_cast<int>(threadIdx.x) < at_once && i < items) {
      const Item item = load_item(a.items + i);
      const int before = static_cast<int>(blockIdx.x) - item.row_begin % ctas;
      for (int n = before < 0 ? before + ctas : before; n < item.num_rows; n += ctas)
        rows[atomicAdd(count, 1)] = __ldg(a.tiles.row_order + item.row_begin + n);
    }
    __syncthreads();
    for (int n = 0; n < count[0]; ++n) multiply_row(a, rows[n], real);
    __syncthreads();
  }
}

template <int STEPS>
__global__ void __launch_bounds__(kGatedThreads, STEPS == 1 ? 2 : 1) gated_tiles_kernel(const __grid_constant__ GatedTileArgs a) {
  const TileArgs& p = a.tiles;
  constexpr int kWarps = kGatedThreads / 32;
  const int tiles = __ldg(p.cut), live = __ldg(p.cut + 2), real = __ldg(a.num_rows), warp = threadIdx.x / 32;
  const int groups = (p.d_out / kGatedColumns + kWarps - 1) / kWarps;  // of columns, a CTA's
  for (int unit = blockIdx.x; unit < tiles * groups; unit += gridDim.x) {
    const int tile = unit / groups, column = ((unit - tile * groups) * kWarps + warp) * kGatedColumns;
    if (column < p.d_out) GatedTile<STEPS>(p, load_tile(p, tile), column).run(a.y);
  }
  multiply_items(a, __ldg(a.num_items), real);
  for (int place = live + blockIdx.x; place < p.num_rows; place += gridDim.x) multiply_row(a, __ldg(p.row_order + place), real);
}

cudaError_t launch_gated_tiles(const GatedTileArgs& args, cudaStream_t stream) {
  int sms = 0;
  const cudaError_t e = count_sms(&sms);
  if (e != cudaSuccess) return e;
  if (args.tiles.max_rank <= 16) gated_tiles_kernel<1><<<sms * 2, kGatedThreads, 0, stream>>>(args);
  else gated_tiles_kernel<2><<<sms, kGatedThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace lora_jax
