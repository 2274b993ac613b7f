// Many rows times panels of eight columns that are copied, or decoded, block by block of K to where
// they stay in L1. The sums are those of dot.h.
#pragma once
#include "products.h"

namespace lora_jax {

constexpr int64_t kPanel = 8;          // columns, a multiple of kCols
constexpr int64_t kPanelBytes = 3072;  // of K per column in a block
constexpr int64_t kPanelAccRows = 96;  // rows whose sums wait between blocks

// What multiplies a block, which is in the type of x: floats in the order that `pack` gives where
// rows of x are packed.
template <class D>
using Wide = std::conditional_t<PackedRows<D>::kCopies, DotF32, D>;

// Room for a block. The distance of its columns is known to the compiler and is no power of two.
template <class X>
struct PanelRoom {
  static constexpr int64_t kStride = (kPanelBytes + 128) / sizeof(X);
  alignas(64) X w[kPanel][kStride];
};

// acc[r * kPanel + c] += lane products of x[r] and column c over [0, end), whole steps; with kFresh
// the sums begin. In a function of its own the sums are in registers alone.
template <class P, int M, bool kFresh>
__attribute__((noinline)) void panel_tile(const typename P::X* const* x, int64_t k0, int64_t end,
                                          const typename P::T* w, f32s* acc) {
  constexpr int64_t kStride = PanelRoom<typename P::T>::kStride;
  const typename P::X* xp[M];
#pragma GCC unroll 3
  for (int r = 0; r < M; ++r) xp[r] = x[r] + k0;
  f32s a[M][kCols];
#pragma GCC unroll 3
  for (int r = 0; r < M; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < kCols; ++c) a[r][c] = kFresh ? f32s{} : acc[r * kPanel + c];
  for (int64_t k = 0; k < end; k += P::kStep) {
    typename P::V xv[M];
#pragma GCC unroll 3
    for (int r = 0; r < M; ++r) xv[r] = P::load_x(xp[r] + k, 0);
#pragma GCC unroll 8
    for (int c = 0; c < kCols; ++c) {
      typename P::V wv = P::load_w(w + c * kStride + k, 0);
      in_register(wv);
#pragma GCC unroll 3
      for (int r = 0; r < M; ++r) a[r][c] = P::fma(a[r][c], xv[r], wv);
    }
  }
#pragma GCC unroll 3
  for (int r = 0; r < M; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < kCols; ++c) acc[r * kPanel + c] = a[r][c];
}

// The rest of a step, n elements of x; columns have zeros behind theirs.
template <class P, int M>
__attribute__((noinline)) void panel_rest(const typename P::X* const* x, int64_t k, int64_t n,
                                          const typename P::T* w, f32s* acc) {
  for (int c = 0; c < kCols; ++c)
    for (int r = 0; r < M; ++r) {
      f32s& sum = acc[r * kPanel + c];
      sum = P::fma(sum, P::load_x(x[r] + k, 0, n),
                   P::load_w(w + c * PanelRoom<typename P::T>::kStride, 0));
    }
}

// acc += lane products of M rows and n columns over `elements` of K from k0 on.
template <class P, int M>
inline void panel_block(const typename P::X* const* x, int64_t k0, int64_t elements, int64_t n,
                        const PanelRoom<typename P::T>& room, f32s* acc) {
  const int64_t rest = elements % P::kStep, end = elements - rest;
  for (int64_t c = 0; c < n; c += kCols) {
    if (k0)
      panel_tile<P, M, false>(x, k0, end, room.w[c], acc + c);
    else
      panel_tile<P, M, true>(x, k0, end, room.w[c], acc + c);
    if (rest) panel_rest<P, M>(x, k0 + end, rest, room.w[c] + end, acc + c);
  }
}

// Where a block of the next panel lies: it is brought into L2 on the way, some lines at a time.
struct NextBlock {
  const char* column = nullptr;
  int64_t columns = 0, distance = 0, bytes = 0, at = 0;  // bytes of a column, and those fetched
  void fetch(int64_t lines) {
    for (; lines > 0 && columns; --lines) {
      __builtin_prefetch(column + at, 0, 2);
      if ((at += 64) < bytes) continue;
      at = 0, column += distance, --columns;
    }
  }
};

// Columns of an item's matrix as panels.
template <class D>
class Panels {
 public:
  using X = typename D::X;

  Panels(const PackedGemm<D>& g, const GemmItem& item) : g_(g), item_(item) {
    const int64_t step = g.decoded ? kWords : D::kStep;
    const int64_t bytes = g.d_in * int64_t(sizeof(X));
    blocks_ = std::max<int64_t>(1, (bytes + kPanelBytes - 1) / kPanelBytes);
    size_ = ((g.d_in + step - 1) / step + blocks_ - 1) / blocks_ * step;
  }

  // All of the item's rows times all of its columns.
  void run() {
    const int64_t rows = blocks_ == 1 ? item_.row1 - item_.row0 : kPanelAccRows;
    for (int64_t col = item_.col0; col < item_.col1; col += kPanel)
      for (int64_t row = item_.row0; row < item_.row1; row += rows)
        run_rows(row, std::min(row + rows, item_.row1), col);
  }

 private:
  // Rows [row0, row1) times a panel.
  void run_rows(int64_t row0, int64_t row1, int64_t col) {
    const int64_t n = std::min(kPanel, item_.col1 - col);
    int64_t k0 = 0;
    do {
      const int64_t k1 = std::min(k0 + size_, g_.d_in);
      copy(col, n, k0, k1);
      NextBlock next = next_block(row0, col, k0, k1);
      const int64_t lines = next.columns * (next.bytes / 64 + 1) / ((row1 - row0) / kRows + 1) + 1;
      // Packed rows are whole steps.
      const int64_t whole = (k1 - k0 + D::kStep - 1) / D::kStep * D::kStep;
      const int64_t elements = PackedRows<D>::kCopies ? whole : k1 - k0;
      f32s* acc = acc_;
      for (int64_t row = row0; row < row1; row += kRows) {
        const int64_t m = std::min<int64_t>(kRows, row1 - row);
        next.fetch(lines);
        multiply(m, row, k0, elements, n, acc);
        if (k1 == g_.d_in) write(m, row, col, n, acc);
        if (blocks_ > 1) acc += kRows * kPanel;
      }
      k0 = k1;
    } while (k0 < g_.d_in);
  }

  void multiply(int64_t m, int64_t row, int64_t k0, int64_t elements, int64_t n, f32s* acc) const {
    switch (m) {
      case 1: return panel_block<Wide<D>, 1>(g_.xs + row, k0, elements, n, room_, acc);
      case 2: return panel_block<Wide<D>, 2>(g_.xs + row, k0, elements, n, room_, acc);
      default: return panel_block<Wide<D>, kRows>(g_.xs + row, k0, elements, n, room_, acc);
    }
  }

  void write(int64_t m, int64_t row, int64_t col, int64_t n, const f32s* acc) const {
    for (int64_t r = 0; r < m; ++r) {
      alignas(64) float sums[kPanel];
      sum_lanes_8(acc + r * kPanel, sums);
      write_sums(g_, item_.group, row + r, col, n, sums);
    }
  }

  // Elements [k0, k1) of n columns to the room, zeros to the end of a step behind them, and
  // zeros for columns that the matrix does not have.
  void copy(int64_t col, int64_t n, int64_t k0, int64_t k1) {
    for (int64_t c = n; c % kCols; ++c) std::fill_n(room_.w[c], PanelRoom<X>::kStride, X{});
    for (int64_t c = 0; c < n; ++c) {
      const int64_t row = item_.group * g_.d_out + col + c;
      X* to = room_.w[c];
      if (g_.decoded) {
        g_.decoded->decode(row, k0, k1, to);
      } else if constexpr (PackedRows<D>::kCopies) {
        D::pack(g_.w + row * g_.d_in + k0, k1 - k0, to);
      } else {
        std::memcpy(to, g_.w + row * g_.d_in + k0, (k1 - k0) * sizeof(X));
      }
      // What packs rows does this too.
      if (!PackedRows<D>::kCopies)
        std::fill(to + (k1 - k0), to + (k1 - k0 + D::kStep - 1) / D::kStep * D::kStep, X{});
    }
  }

  NextBlock next_block(int64_t row0, int64_t col, int64_t k0, int64_t k1) const {
    if (g_.decoded || row0 != item_.row0 || col + kPanel >= g_.d_out) return {};
    using T = typename D::T;
    const T* first = g_.w + (item_.group * g_.d_out + col + kPanel) * g_.d_in + k0;
    return {reinterpret_cast<const char*>(first), std::min(kPanel, g_.d_out - col - kPanel),
            g_.d_in * int64_t(sizeof(T)), (k1 - k0) * int64_t(sizeof(T))};
  }

  const PackedGemm<D>& g_;
  const GemmItem& item_;
  int64_t blocks_, size_;  // of K, and the elements of one
  PanelRoom<X> room_;
  alignas(64) f32s acc_[kPanelAccRows * kPanel];
};

}  // namespace lora_jax
