// y[t] = w[g] x[t] + bias[g] for rows sorted by group, of one w or of several. See dot.h for the order
// of the sums.
//
// Weights are plain, or rows that are decoded, for a few rows of x in registers (quantised.h). For
// many rows panels are decoded, or copied, block by block (panels.h).
#pragma once
#include <algorithm>
#include <vector>

#include "panels.h"
#include "parallel.h"

namespace lora_jax {

constexpr int64_t kAccRows = 48;       // rows whose accumulators wait between blocks of K
constexpr int64_t kBlockBytes = 3072;  // of K per row: a block of kCols matrix rows stays in L1

// A product of few rows takes some 20 to 200 us: in pieces of 50 most ran on one core.
constexpr double kPieceMicros = 12.0;
// Pieces for each thread where that makes longer ones: a piece's next panel is fetched by its core.
constexpr int64_t kPieces = 16;

// Rows from which on plain weights are copied to where they stay in L1, if a column is one block
// there: copies of more blocks took as long as they saved. Measured with AVX2 alone.
constexpr int64_t kCopiedRows = kLanes == 8 ? 48 : INT64_MAX;

// kCols rows of a matrix; past the last of the matrix they repeat it.
template <class D>
struct Panel {
  const typename D::T* w[kCols];
  int64_t fetch;  // elements to the next panel; 0 if there is none
};

// The panel at column `col` of a group's matrix where it stands.
template <class D>
inline Panel<D> plain_panel(const PackedGemm<D>& g, int64_t group, int64_t col) {
  Panel<D> panel{{}, 0};
  int64_t last = g.d_out - 1 - col;
  const typename D::T* w = g.w + (group * g.d_out + col) * g.d_in;
  for (int64_t c = 0; c < kCols; ++c) panel.w[c] = w + std::min(c, last) * g.d_in;
  if (last + 1 >= 2 * kCols) panel.fetch = kCols * g.d_in;
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
template <class D, int M>
inline void run_tile(const PackedGemm<D>& g, const Panel<D>& panel, const GemmItem& item,
                     int64_t row, int64_t col, int64_t k0, int64_t k1, f32s* acc) {
  const bool fetch = panel.fetch && row == item.row0;
  if (fetch && k0 == 0)
    dot_rows<D, M, true, true>(g.xs + row, panel.w, k0, k1, acc, panel.fetch);
  else if (fetch)
    dot_rows<D, M, true>(g.xs + row, panel.w, k0, k1, acc, panel.fetch);
  else if (k0 == 0)
    dot_rows<D, M, false, true>(g.xs + row, panel.w, k0, k1, acc);
  else
    dot_rows<D, M>(g.xs + row, panel.w, k0, k1, acc);
  if (k1 < g.d_in) return;
  float sums[kTile];
  sum_tile<M>(acc, sums);
  write_tile(g, item.group, row, M, col, std::min<int64_t>(kCols, item.col1 - col), sums);
}

template <class D>
inline void run_tiles(const PackedGemm<D>& g, const Panel<D>& panel, const GemmItem& item,
                      int64_t row0, int64_t row1, int64_t col, int64_t k0, int64_t k1, f32s* acc) {
  for (int64_t row = row0; row < row1; row += kRows, acc += kTile) switch (row1 - row) {
      case 1: run_tile<D, 1>(g, panel, item, row, col, k0, k1, acc); break;
      case 2: run_tile<D, 2>(g, panel, item, row, col, k0, k1, acc); break;
      default: run_tile<D, kRows>(g, panel, item, row, col, k0, k1, acc);
    }
}

// Elements of K per block: so many that a block of a panel stays in L1, or all where no other rows
// would find the block there again.
template <class D>
inline int64_t block_of(const PackedGemm<D>& g, int64_t rows) {
  const int64_t bytes = g.d_in * int64_t(sizeof(typename D::T));
  int64_t blocks = std::max<int64_t>(1, (bytes + kBlockBytes - 1) / kBlockBytes);
  if (rows <= kRows) blocks = 1;
  return ((g.d_in + D::kStep - 1) / D::kStep + blocks - 1) / blocks * D::kStep;
}

// Rows [row0, row1) of an item times one panel where it stands, block by block of K.
template <class D>
inline void run_rows(const PackedGemm<D>& g, const GemmItem& item, int64_t row0, int64_t row1,
                     int64_t col, int64_t block, f32s* acc) {
  const Panel<D> panel = plain_panel(g, item.group, col);
  int64_t k0 = 0;
  do {
    int64_t k1 = std::min(k0 + block, g.d_in);
    run_tiles(g, panel, item, row0, row1, col, k0, k1, acc);
    k0 = k1;
  } while (k0 < g.d_in);
}

// Lane products of a row and n <= kCols columns from `col` on.
template <class D>
inline void dot_columns(const PackedGemm<D>& g, const GemmItem& item, int64_t col, int64_t n,
                        f32s* acc) {
  if (g.decoded) return g.decoded->dot(1, g.xs + item.row0, item.group * g.d_out + col, n, acc);
  const Panel<D> panel = plain_panel(g, item.group, col);
  if (panel.fetch)
    dot_rows<D, 1, true, true>(g.xs + item.row0, panel.w, 0, g.d_in, acc, panel.fetch);
  else
    dot_rows<D, 1, false, true>(g.xs + item.row0, panel.w, 0, g.d_in, acc);
}

// An item of one row: dot(col, n, acc) makes the lane products of n <= 8 columns, which are summed and
// written at a time.
template <class D, class Dot>
inline void run_by_eight(const PackedGemm<D>& g, const GemmItem& item, const Dot& dot) {
  alignas(64) f32s acc[8] = {};
  for (int64_t col = item.col0; col < item.col1; col += 8) {
    int64_t n = std::min<int64_t>(8, item.col1 - col);
    dot(col, n, acc);
    float sums[8];
    sum_lanes_8(acc, sums);
    write_sums(g, item.group, item.row0, col, n, sums);
  }
}

// An item of one row times plain weights or such that are decoded in registers.
template <class D>
inline void run_one_row(const PackedGemm<D>& g, const GemmItem& item) {
  if constexpr (kPairsFor<D>)
    if (g.decoded && g.decoded->in_pairs()) {
      const TwiceRow x(g.xs[item.row0], g.d_in);
      return run_by_eight(g, item, [&](int64_t col, int64_t n, f32s* acc) {
        g.decoded->dot_in_pairs(x.get(), item.group * g.d_out + col, n, acc);
      });
    }
  run_by_eight(g, item, [&](int64_t col, int64_t n, f32s* acc) {
    for (int64_t c = 0; c < n; c += kCols)
      dot_columns(g, item, col + c, std::min<int64_t>(kCols, n - c), acc + c);
  });
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

// An item's rows, kQuadRows at a time, times at least eight columns of codes in quads.
template <class D>
inline void run_in_quads(const PackedGemm<D>& g, const GemmItem& item) {
  alignas(64) f32s acc[kQuadRows * kQuadColumns] = {};
  for (int64_t row = item.row0; row < item.row1; row += kQuadRows) {
    const int64_t rows = std::min(kQuadRows, item.row1 - row);
    for (int64_t col = item.col0; col < item.col1; col += kQuadColumns) {
      col = std::min(col, item.col1 - 8);  // some columns twice
      const int64_t n = std::min(kQuadColumns, item.col1 - col);
      g.decoded->dot_quads(rows, g.xs + row, item.group * g.d_out + col, n, acc);
      for (int64_t r = 0; r < rows; ++r) {
        alignas(64) float sums[kQuadColumns];
        for (int64_t c = 0; c < n; c += 8) sum_lanes_8(acc + r * kQuadColumns + c, sums + c);
        write_sums(g, item.group, row + r, col, n, sums);
      }
    }
  }
}

template <class D>
void run_gemm_item(const PackedGemm<D>& g, const GemmItem& item) {
  const int64_t rows = item.row1 - item.row0;
  if (g.decoded && rows <= kMostQuadRows && item.col1 - item.col0 >= 8 && g.decoded->in_quads())
    return run_in_quads(g, item);
  const bool in_registers =
      g.decoded && rows <= kFewRows &&
      g.decoded->in_registers(item.group * g.d_out + item.col0, item.col1 - item.col0);
  if (rows == 1 && (!g.decoded || in_registers)) return run_one_row<D>(g, item);
  if (in_registers) return run_few_rows<D>(g, item);
  const bool one_block = g.d_in * int64_t(sizeof(typename D::X)) <= kPanelBytes;
  if (g.decoded || (rows >= kCopiedRows && one_block)) {
    Panels<D>(g, item).run();
    return;
  }
  const int64_t block = block_of<D>(g, rows);
  alignas(64) f32s acc[kAccRows / kRows * kTile];
  for (int64_t col = item.col0; col < item.col1; col += kCols)
    for (int64_t row = item.row0; row < item.row1; row += kAccRows)
      run_rows<D>(g, item, row, std::min(row + kAccRows, item.row1), col, block, acc);
}

// Rough time of the whole op on one core, in microseconds: the longer of arithmetic and memory.
inline double gemm_micros(double rows, double matrices, double d_out, double d_in, double bytes) {
  return std::max(2.0 * rows * d_out * d_in / 90e3, matrices * d_out * d_in * bytes / 15e3);
}

// Rows of a group, the first being `start`.
template <class D>
inline int64_t group_rows(const Gemm<D>& g, int64_t group, int64_t start) {
  return std::clamp<int64_t>(g.group_sizes[group], 0, g.rows - start);
}

// Bytes that a weight takes as long as.
template <class D>
inline double weight_bytes(const Gemm<D>& g) {
  return g.decoded ? g.decoded->bytes : sizeof(typename D::T);
}

// How long a product takes on one core; `used_rows` are those of groups.
template <class D>
inline double gemm_micros(const Gemm<D>& g, int64_t* used_rows) {
  double matrices = 0;
  *used_rows = 0;
  for (int64_t group = 0; group < g.groups; ++group) {
    int64_t rows = group_rows(g, group, *used_rows);
    matrices += rows > 0;
    *used_rows += rows;
  }
  return gemm_micros(double(*used_rows), matrices, g.d_out, g.d_in, weight_bytes(g));
}

// Splits the rows so that a piece's x stays in L2, and the columns into pieces that take about so
// long. Whole panels: another thread would copy the rest of one again.
template <class D>
void gemm_items(const Gemm<D>& g, int64_t product, double piece_micros,
                std::vector<GemmItem>* items) {
  int64_t row_bytes = std::max<int64_t>(1, g.d_in * sizeof(typename D::X));
  int64_t chunk = std::clamp<int64_t>((512 << 10) / row_bytes, kAccRows, 512) / kAccRows * kAccRows;
  for (int64_t group = 0, start = 0; group < g.groups; ++group) {
    int64_t end = start + group_rows(g, group, start);
    for (int64_t row = start; row < end; row += chunk) {
      int64_t row1 = std::min(row + chunk, end);
      double cost = gemm_micros(row1 - row, 1, g.d_out, g.d_in, weight_bytes(g));
      int64_t pieces = std::max<int64_t>(1, int64_t(cost / piece_micros));
      int64_t cols = ((g.d_out + pieces - 1) / pieces + kPanel - 1) / kPanel * kPanel;
      for (int64_t col = 0; col < g.d_out; col += cols)
        items->push_back({product, group, row, row1, col, std::min(col + cols, g.d_out)});
    }
    start = end;
  }
}

// Products of the same rows in the same groups, at least one.
template <class D>
void run_gemms(xla::ffi::ThreadPool& pool, const std::vector<Gemm<D>>& products) {
  double micros = 0;
  int64_t used_rows = 0;
  std::vector<GemmItem> items;
  for (const Gemm<D>& g : products) micros += gemm_micros(g, &used_rows);
  const double piece = std::max(kPieceMicros, micros / double(kPieces * pool.num_threads()));
  for (size_t i = 0; i < products.size(); ++i) gemm_items(products[i], int64_t(i), piece, &items);
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
