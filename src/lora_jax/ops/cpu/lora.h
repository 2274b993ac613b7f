// y[t] += scaling * (x[t] A^T) B for rows of many adapters, in place, of one y or of several.
//
// Rows are brought together by (slot, expert), up to 12 at a time, so that a rank row is fetched
// once for all of them. Per output element: the dot products of dot.h, times the scaling, then a
// chain over the rank rows in order, then one addition to y and one rounding.
//
// A rank row in 8 bits has its scale, a float, in the tail behind its values, which are read as
// they are: every type holds them exactly, and both scales of a rank multiply its h.
#pragma once
#include <algorithm>
#include <vector>

#include "dot.h"
#include "parallel.h"

namespace lora_jax {

constexpr int64_t kChunkRows = 12;
constexpr int64_t kInt8Tail = 16;  // bytes behind a row's int8 values: their scale, and nothing
// Rows of a tile of B, so many that the sums of four vectors each stay in registers.
constexpr int64_t kExpandRows = kLanes == 8 ? 3 : 4;
constexpr int64_t kStripsAhead = 4;  // columns of B are fetched this many strips before their use
template <class T>
constexpr int64_t kLineElements = 64 / sizeof(T);

// A rank row of R in its pool: how far the next one is, and what its values are multiplied by.
template <class R>
struct RankRow {
  static constexpr bool kScaled = false;
  static int64_t stride(int64_t width) { return width; }
};
template <>
struct RankRow<int8_t> {
  static constexpr bool kScaled = true;
  static int64_t stride(int64_t width) { return width + kInt8Tail; }
  static float scale(const int8_t* row, int64_t width) {
    float value;
    std::memcpy(&value, row + width, sizeof(value));
    return value;
  }
};

// Rows hold T, pools hold R: T or int8_t. Results hold Y: T, or float for sums that are rounded
// elsewhere.
template <class T, class Y = T, class R = T>
struct Lora {
  using Row = R;
  const T* x;
  const R *a_pool, *b_pool;
  const int32_t *entries, *row_to_slot, *row_to_expert;
  const float* scaling;
  Y* y;
  int64_t rows, d_in, d_out, a_rows, b_rows, slots, max_rank;
};

// Up to kChunkRows rows that share one A and one B, of one y.
struct LoraItem {
  int64_t product;
  const int32_t* rows;
  int64_t count, a_row, b_row, rank;
  float scaling;
};

// Stable counting sort of `rows` by key(row) < num_keys.
template <class Key>
inline void counting_sort(std::vector<int32_t>& rows, int64_t num_keys, const Key& key) {
  std::vector<int32_t> next(num_keys + 1, 0), sorted(rows.size());
  for (int32_t row : rows) ++next[key(row) + 1];
  for (int64_t i = 0; i < num_keys; ++i) next[i + 1] += next[i];
  for (int32_t row : rows) sorted[next[key(row)]++] = row;
  rows.swap(sorted);
}

// Returns the rows that have an adapter, sorted by (slot, expert).
template <class G>
std::vector<int32_t> adapter_rows(const G& g) {
  std::vector<int32_t> rows;
  int64_t experts = 1;
  for (int32_t row = 0; row < g.rows; ++row) {
    int64_t slot = g.row_to_slot[row];
    if (slot < 0 || slot >= g.slots || g.entries[slot * 5 + 2] <= 0) continue;
    rows.push_back(row);
    experts = std::max<int64_t>(experts, g.row_to_expert[row] + 1);
  }
  if (experts > 1)
    counting_sort(rows, experts, [&](int32_t r) { return std::max(g.row_to_expert[r], 0); });
  counting_sort(rows, g.slots, [&](int32_t r) { return g.row_to_slot[r]; });
  return rows;
}

// Adds the items of rows and how long they take; false if a slot points outside its pools.
template <class G>
bool lora_items(const G& g, int64_t product, const std::vector<int32_t>& rows,
                std::vector<LoraItem>* items, double* micros) {
  int64_t num = int64_t(rows.size());
  for (int64_t i = 0, end; i < num; i = end) {
    int32_t slot = g.row_to_slot[rows[i]], expert = g.row_to_expert[rows[i]];
    const int32_t* entry = g.entries + slot * 5;
    bool shared = entry[3] == 0 && entry[4] == 0;  // all experts use one pair of matrices
    for (end = i + 1; end < num && end < i + kChunkRows; ++end) {
      if (g.row_to_slot[rows[end]] != slot) break;
      if (!shared && g.row_to_expert[rows[end]] != expert) break;
    }
    int64_t rank = std::min<int64_t>(entry[2], g.max_rank);
    int64_t a_row = entry[0] + int64_t(expert) * entry[3];
    int64_t b_row = entry[1] + int64_t(expert) * entry[4];
    if (a_row < 0 || a_row + rank > g.a_rows || b_row < 0 || b_row + rank > g.b_rows) return false;
    items->push_back({product, rows.data() + i, end - i, a_row, b_row, rank, g.scaling[slot]});
    double weights = double(rank) * (g.d_in + g.d_out);
    *micros += std::max(weights * (end - i) / 25e3, weights * sizeof(typename G::Row) / 15e3);
  }
  return true;
}

// Writes `width` values of a row in 8 bits as T.
template <class T>
void widen(const int8_t* row, int64_t width, T* out) {
  for (int64_t k = 0; k < width; k += kLanes)
    store(out + k, load(row + k, width - k), std::min<int64_t>(kLanes, width - k));
}

// h[r * rank + j] = scaling * x[row r] . A[j], times the scales of A[j] and B[j] if they have some.
template <class D, class G>
void shrink(const G& g, const LoraItem& item, float* h) {
  using T = typename D::T;
  using Rows = RankRow<typename G::Row>;
  const int64_t a_stride = Rows::stride(g.d_in), b_stride = Rows::stride(g.d_out);
  std::vector<T> wide(Rows::kScaled ? kCols * g.d_in : 0);
  float scales[kCols];
  const typename D::X* x[kChunkRows];
  const T* a[kCols];
  float sums[kTile];
  PackedRows<D> packed(item.count, g.d_in);
  for (int64_t r = 0; r < item.count; ++r) x[r] = packed.add(r, g.x + item.rows[r] * g.d_in);
  for (int64_t j = 0; j < item.rank; j += kCols) {
    for (int64_t c = 0; c < kCols; ++c) {
      int64_t at = std::min(j + c, item.rank - 1);
      const auto* row = g.a_pool + (item.a_row + at) * a_stride;
      if constexpr (Rows::kScaled) {
        widen(row, g.d_in, wide.data() + c * g.d_in);
        a[c] = wide.data() + c * g.d_in;
        const auto* b = g.b_pool + (item.b_row + at) * b_stride;
        scales[c] = Rows::scale(row, g.d_in) * Rows::scale(b, g.d_out);
      } else {
        a[c] = row;
      }
    }
    int64_t cols = std::min<int64_t>(kCols, item.rank - j);
    for (int64_t r = 0; r < item.count; r += kRows) {
      int64_t m = std::min<int64_t>(kRows, item.count - r);
      if (!Rows::kScaled && r == 0 && m == 1 && j + 2 * kCols <= item.rank) {
        f32s acc[kTile] = {};
        dot_rows<D, 1, true, true>(x, a, 0, g.d_in, acc, kCols * g.d_in);
        sum_tile<1>(acc, sums);
      } else {
        dot_tile<D>(m, x + r, a, g.d_in, sums);
      }
      for (int64_t i = 0; i < m; ++i)
        for (int64_t c = 0; c < cols; ++c) {
          float value = item.scaling * sums[i * kCols + c];
          h[(r + i) * item.rank + j + c] = Rows::kScaled ? value * scales[c] : value;
        }
    }
  }
}

// y[row] += sum_j h[row][j] B[j] for M rows and S vectors of columns; n columns in the last vector.
template <int M, int S, class G>
inline void expand_tile(const G& g, const LoraItem& item, const float* h, int64_t row, int64_t col,
                        int64_t n) {
  using R = typename G::Row;
  f32s acc[M][S] = {};
  const int64_t stride = RankRow<R>::stride(g.d_out);
  const R* b = g.b_pool + item.b_row * stride + col;
  for (int64_t j = 0; j < item.rank; ++j, b += stride) {
    if (S > 1 && row == 0)  // a strip is too short for the hardware to see where it goes on
      for (int64_t i = 0; i < S * kLanes; i += kLineElements<R>)
        __builtin_prefetch(b + kStripsAhead * S * kLanes + i, 0, 3);
    for (int s = 0; s < S; ++s) {
      f32s bv = s + 1 < S ? load(b + s * kLanes) : load(b + s * kLanes, n);
      for (int r = 0; r < M; ++r) acc[r][s] = fma(splat(h[r * item.rank + j]), bv, acc[r][s]);
    }
  }
  for (int r = 0; r < M; ++r) {
    auto* y = g.y + item.rows[row + r] * g.d_out + col;
    for (int s = 0; s < S; ++s) {
      int64_t lanes = s + 1 < S ? kLanes : n;
      store(y + s * kLanes, load(y + s * kLanes, lanes) + acc[r][s], lanes);
    }
  }
}

template <int S, class G>
inline void expand_rows(const G& g, const LoraItem& item, const float* h, int64_t col, int64_t n) {
  for (int64_t row = 0; row < item.count; row += kExpandRows) {
    const float* hr = h + row * item.rank;
    switch (std::min(kExpandRows, item.count - row)) {
      case 1: expand_tile<1, S>(g, item, hr, row, col, n); break;
      case 2: expand_tile<2, S>(g, item, hr, row, col, n); break;
      case 3: expand_tile<3, S>(g, item, hr, row, col, n); break;
      default: expand_tile<kExpandRows, S>(g, item, hr, row, col, n);
    }
  }
}

template <class D, class G>
void run_lora_item(const G& g, const LoraItem& item) {
  std::vector<float> h(item.count * item.rank);
  shrink<D>(g, item, h.data());
  constexpr int64_t kStrip = 4 * kLanes;
  int64_t col = 0;
  for (; col + kStrip <= g.d_out; col += kStrip)
    expand_rows<4>(g, item, h.data(), col, kLanes);
  for (; col < g.d_out; col += kLanes)
    expand_rows<1>(g, item, h.data(), col, std::min<int64_t>(kLanes, g.d_out - col));
}

// Sums into several y, of the same rows and pools.
template <class D, class Y, class R>
bool run_loras(xla::ffi::ThreadPool& pool, const std::vector<Lora<typename D::T, Y, R>>& all) {
  std::vector<std::vector<int32_t>> rows(all.size());
  std::vector<LoraItem> items;
  double micros = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    rows[i] = adapter_rows(all[i]);
    if (!lora_items(all[i], int64_t(i), rows[i], &items, &micros)) return false;
  }
  parallel_for(pool, int64_t(items.size()), micros,
               [&](int64_t i) { run_lora_item<D>(all[items[i].product], items[i]); });
  return true;
}

}  // namespace lora_jax
