// y[t] = w[g] x[t] + bias[g] for rows sorted by group, of one w or of several. See dot.h for the order
// of the sums.
//
// Weights are plain, or rows that are decoded, a few rows of x in registers, many block by block
// (quantised.h).
#pragma once
#include <algorithm>
#include <vector>

#include "dot.h"
#include "parallel.h"
#include "quantised.h"

namespace lora_jax {

template <class D>
struct Gemm {
  using T = typename D::T;
  const T* w;                     // null if `decoded` is there
  const DecodedRows<D>* decoded;  // null if weights are plain
  const T *x, *bias;              // bias may be null
  const int32_t* group_sizes;
  T* y;
  int64_t rows, groups, d_out, d_in;
};

// A product and its rows as the dot products read them.
template <class D>
struct PackedGemm : Gemm<D> {
  const typename D::X* const* xs;
};

// Rows [row0, row1) of one group times columns [col0, col1) of its matrix in one of the products.
struct GemmItem {
  int64_t product, group, row0, row1, col0, col1;
};

constexpr int64_t kAccRows = 48;       // rows whose accumulators wait between blocks of K
constexpr int64_t kBlockBytes = 3072;  // of K per row: a block of kCols matrix rows stays in L1

// A product of few rows takes some 20 to 200 us: in pieces of 50 most ran on one core.
constexpr double kPieceMicros = 12.0;

// What multiplies a block of decoded weights, which are in the type of x: floats in the order that
// `pack` gives where rows of x are packed.
template <class D>
using Wide = std::conditional_t<PackedRows<D>::kCopies, DotF32, D>;

// kCols rows of a matrix, the first of their elements there being `first`; past the last of the
// matrix they repeat it.
template <class D>
struct Panel {
  const typename D::T* w[kCols];
  int64_t first;
  int64_t fetch;  // elements to the next panel; 0 if there is none
};

// Room for a block of a panel that is decoded.
template <class D>
struct Room {
  alignas(64) typename D::X w[kCols][kBlockBytes / sizeof(typename D::X) + kWords];
};

// The panel at column `col` of a group's matrix where it stands.
template <class D>
inline Panel<D> plain_panel(const PackedGemm<D>& g, int64_t group, int64_t col) {
  Panel<D> panel{{}, 0, 0};
  int64_t last = g.d_out - 1 - col;
  const typename D::T* w = g.w + (group * g.d_out + col) * g.d_in;
  for (int64_t c = 0; c < kCols; ++c) panel.w[c] = w + std::min(c, last) * g.d_in;
  if (last + 1 >= 2 * kCols) panel.fetch = kCols * g.d_in;
  return panel;
}

// The same of quantised weights, elements [k0, k1) decoded.
template <class D>
inline Panel<Wide<D>> decoded_panel(const PackedGemm<D>& g, Room<D>& room, int64_t group,
                                    int64_t col, int64_t k0, int64_t k1) {
  Panel<Wide<D>> panel{{}, k0, 0};
  int64_t last = g.d_out - 1 - col;
  for (int64_t c = 0; c <= std::min<int64_t>(kCols - 1, last); ++c)
    g.decoded->decode(group * g.d_out + col + c, k0, k1, room.w[c]);
  for (int64_t c = 0; c < kCols; ++c) panel.w[c] = room.w[std::min(c, last)];
  return panel;
}

#if defined(__AVX__) && !defined(__AVX512F__)
// As write_tile for kCols columns, half a vector: a copy of a fixed size is quicker.
template <class D>
inline void write_whole_tile(const Gemm<D>& g, int64_t group, int64_t row, int64_t m, int64_t col,
                             const float* sums) {
  using T = typename D::T;
  f32s bias = {};
  if (g.bias) {
    alignas(32) T of[kLanes] = {};
    std::memcpy(of, g.bias + group * g.d_out + col, kCols * sizeof(T));
    bias = load(of);
  }
  for (int64_t r = 0; r < m; ++r) {
    float half __attribute__((vector_size(4 * kCols)));
    std::memcpy(&half, sums + r * kCols, sizeof(half));
    T all[kLanes];
    store(all, __builtin_shufflevector(half, half, 0, 1, 2, 3, 0, 1, 2, 3) + bias);
    std::memcpy(g.y + (row + r) * g.d_out + col, all, kCols * sizeof(T));
  }
}
#endif

template <class D>
inline void write_tile(const Gemm<D>& g, int64_t group, int64_t row, int64_t m, int64_t col,
                       int64_t n, const float* sums) {
#if defined(__AVX__) && !defined(__AVX512F__)
  if (n == kCols) return write_whole_tile(g, group, row, m, col, sums);
#endif
  f32s bias = g.bias ? load(g.bias + group * g.d_out + col, n) : f32s{};
  for (int64_t r = 0; r < m; ++r)
    store(g.y + (row + r) * g.d_out + col, load(sums + r * kCols, n) + bias, n);
}

// One tile over one block of K: accumulators live in `acc` between blocks and are summed at last.
template <class P, class D, int M>
inline void run_tile(const PackedGemm<D>& g, const Panel<P>& panel, const GemmItem& item,
                     int64_t row, int64_t col, int64_t k0, int64_t k1, f32s* acc) {
  if (k0 == 0)
    for (int i = 0; i < kTile; ++i) acc[i] = f32s{};
  if (panel.fetch && row == item.row0)
    dot_rows<P, M, true>(g.xs + row, panel.w, panel.first, k0, k1, acc, panel.fetch);
  else
    dot_rows<P, M>(g.xs + row, panel.w, panel.first, k0, k1, acc);
  if (k1 < g.d_in) return;
  float sums[kTile];
  sum_tile<M>(acc, sums);
  write_tile(g, item.group, row, M, col, std::min<int64_t>(kCols, item.col1 - col), sums);
}

template <class P, class D>
inline void run_tiles(const PackedGemm<D>& g, const Panel<P>& panel, const GemmItem& item,
                      int64_t row0, int64_t row1, int64_t col, int64_t k0, int64_t k1, f32s* acc) {
  for (int64_t row = row0; row < row1; row += kRows, acc += kTile) switch (row1 - row) {
      case 1: run_tile<P, D, 1>(g, panel, item, row, col, k0, k1, acc); break;
      case 2: run_tile<P, D, 2>(g, panel, item, row, col, k0, k1, acc); break;
      default: run_tile<P, D, kRows>(g, panel, item, row, col, k0, k1, acc);
    }
}

// Elements of K per block: so many that a block of a panel stays in L1, or all where no other rows
// would find the block there again and nothing is decoded into it.
template <class D>
inline int64_t block_of(const PackedGemm<D>& g, int64_t rows) {
  int64_t step = g.decoded ? kWords : D::kStep;
  int64_t bytes = g.d_in * int64_t(g.decoded ? sizeof(typename D::X) : sizeof(typename D::T));
  int64_t blocks = std::max<int64_t>(1, (bytes + kBlockBytes - 1) / kBlockBytes);
  if (rows <= kRows && !g.decoded) blocks = 1;
  int64_t steps = (g.d_in + step - 1) / step;
  return (steps + blocks - 1) / blocks * step;
}

// Rows [row0, row1) of an item times one panel, block by block of K.
template <class D>
inline void run_rows(const PackedGemm<D>& g, Room<D>& room, const GemmItem& item,
                     int64_t row0, int64_t row1, int64_t col, int64_t block, f32s* acc) {
  int64_t k0 = 0;
  do {
    int64_t k1 = std::min(k0 + block, g.d_in);
    if (g.decoded)
      run_tiles(g, decoded_panel(g, room, item.group, col, k0, k1), item, row0, row1, col, k0, k1,
                acc);
    else
      run_tiles(g, plain_panel(g, item.group, col), item, row0, row1, col, k0, k1, acc);
    k0 = k1;
  } while (k0 < g.d_in);
}

// Lane products of a row and n <= kCols columns from `col` on.
template <class D>
inline void dot_columns(const PackedGemm<D>& g, const GemmItem& item, int64_t col, int64_t n,
                        f32s* acc) {
  if (g.decoded) return g.decoded->dot(1, g.xs + item.row0, item.group * g.d_out + col, n, acc);
  for (int64_t c = 0; c < kCols; ++c) acc[c] = f32s{};
  const Panel<D> panel = plain_panel(g, item.group, col);
  if (panel.fetch)
    dot_rows<D, 1, true>(g.xs + item.row0, panel.w, 0, 0, g.d_in, acc, panel.fetch);
  else
    dot_rows<D, 1>(g.xs + item.row0, panel.w, 0, 0, g.d_in, acc);
}

// An item of one row times plain weights or such that are decoded in registers: eight columns are
// summed and written at a time.
template <class D>
inline void run_one_row(const PackedGemm<D>& g, const GemmItem& item) {
  const typename D::T* bias = g.bias ? g.bias + item.group * g.d_out : nullptr;
  typename D::T* y = g.y + item.row0 * g.d_out;
  alignas(64) f32s acc[8] = {};
  for (int64_t col = item.col0; col < item.col1; col += 8) {
    int64_t n = std::min<int64_t>(8, item.col1 - col);
    for (int64_t c = 0; c < n; c += kCols)
      dot_columns(g, item, col + c, std::min<int64_t>(kCols, n - c), acc + c);
    float sums[8];
    sum_lanes_8(acc, sums);
    for (int64_t c = 0; c < n; c += kLanes) {
      f32s added = bias ? load(bias + col + c, n - c) : f32s{};
      store(y + col + c, load(sums + c, n - c) + added, n - c);
    }
  }
}

// All of an item's rows, at most kFewRows, times weights that are decoded in registers.
template <class D>
inline void run_few_rows(const PackedGemm<D>& g, const GemmItem& item) {
  int64_t rows = item.row1 - item.row0;
  alignas(64) f32s acc[kFewRows * kCols] = {};
  for (int64_t col = item.col0; col < item.col1; col += kCols) {
    int64_t n = std::min<int64_t>(kCols, item.col1 - col);
    g.decoded->dot(rows, g.xs + item.row0, item.group * g.d_out + col, n, acc);
    float sums[kFewRows * kCols];
    for (int64_t i = 0; i < rows * kCols; i += 8) sum_lanes_8(acc + i, sums + i);
    write_tile(g, item.group, item.row0, rows, col, n, sums);
  }
}

template <class D>
void run_gemm_item(const PackedGemm<D>& g, const GemmItem& item) {
  const int64_t rows = item.row1 - item.row0;
  const bool in_registers =
      g.decoded && rows <= kFewRows &&
      g.decoded->in_registers(item.group * g.d_out + item.col0, item.col1 - item.col0);
  if (rows == 1 && (!g.decoded || in_registers)) return run_one_row<D>(g, item);
  if (in_registers) return run_few_rows<D>(g, item);
  int64_t block = block_of<D>(g, item.row1 - item.row0);
  alignas(64) f32s acc[kAccRows / kRows * kTile];
  Room<D> room;
  for (int64_t col = item.col0; col < item.col1; col += kCols)
    for (int64_t row = item.row0; row < item.row1; row += kAccRows)
      run_rows<D>(g, room, item, row, std::min(row + kAccRows, item.row1), col, block, acc);
}

// Rough time of the whole op on one core, in microseconds: the longer of arithmetic and memory.
inline double gemm_micros(double rows, double matrices, double d_out, double d_in, double bytes) {
  return std::max(2.0 * rows * d_out * d_in / 90e3, matrices * d_out * d_in * bytes / 15e3);
}

// Splits the rows so that a piece's x stays in L2, and the columns into pieces of about kPieceMicros.
// Returns how long they take together; `used_rows` are those of groups.
template <class D>
double gemm_items(const Gemm<D>& g, int64_t product, std::vector<GemmItem>* items,
                  int64_t* used_rows) {
  int64_t row_bytes = std::max<int64_t>(1, g.d_in * sizeof(typename D::T));
  int64_t chunk = std::clamp<int64_t>((512 << 10) / row_bytes, kAccRows, 512) / kAccRows * kAccRows;
  double bytes = g.decoded ? g.decoded->bytes : sizeof(typename D::T), micros = 0;
  int64_t start = 0;
  for (int64_t group = 0; group < g.groups; ++group) {
    int64_t end = start + std::clamp<int64_t>(g.group_sizes[group], 0, g.rows - start);
    for (int64_t row = start; row < end; row += chunk) {
      int64_t row1 = std::min(row + chunk, end);
      double cost = gemm_micros(row1 - row, 1, g.d_out, g.d_in, bytes);
      int64_t pieces = std::max<int64_t>(1, int64_t(cost / kPieceMicros));
      int64_t cols = ((g.d_out + pieces - 1) / pieces + kCols - 1) / kCols * kCols;
      for (int64_t col = 0; col < g.d_out; col += cols)
        items->push_back({product, group, row, row1, col, std::min(col + cols, g.d_out)});
      micros += cost;
    }
    start = end;
  }
  *used_rows = start;
  return micros;
}

// Products of the same rows in the same groups, at least one.
template <class D>
void run_gemms(xla::ffi::ThreadPool& pool, const std::vector<Gemm<D>>& products) {
  double micros = 0;
  int64_t used_rows = 0;
  std::vector<GemmItem> items;
  for (size_t i = 0; i < products.size(); ++i)
    micros += gemm_items(products[i], int64_t(i), &items, &used_rows);
  const Gemm<D>& first = products.front();
  PackedRows<D> packed(used_rows, first.d_in);
  std::vector<const typename D::X*> xs(used_rows);
  double packing = PackedRows<D>::kCopies ? double(used_rows) * first.d_in / 4e3 : 0.0;
  int64_t pieces = (used_rows + kAccRows - 1) / kAccRows;
  parallel_for(pool, pieces, packing, [&](int64_t i) {
    for (int64_t row = i * kAccRows; row < std::min(used_rows, (i + 1) * kAccRows); ++row)
      xs[row] = packed.add(row, first.x + row * first.d_in);
  });
  std::vector<PackedGemm<D>> packed_products;
  for (const Gemm<D>& product : products) packed_products.push_back({product, xs.data()});
  parallel_for(pool, int64_t(items.size()), micros, [&](int64_t i) {
    run_gemm_item<D>(packed_products[items[i].product], items[i]);
  });
  for (const Gemm<D>& g : products)
    std::memset(g.y + used_rows * g.d_out, 0, (g.rows - used_rows) * g.d_out * sizeof(*g.y));
}

}  // namespace lora_jax
