// Products of rows by matrices, their parts, and what writes results.
#pragma once
#include <algorithm>
#include <type_traits>

#include "dot.h"
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

// Writes n sums of a row from column `col` on.
template <class D>
inline void write_sums(const Gemm<D>& g, int64_t group, int64_t row, int64_t col, int64_t n,
                       const float* sums) {
  const typename D::T* bias = g.bias ? g.bias + group * g.d_out + col : nullptr;
  typename D::T* y = g.y + row * g.d_out + col;
  for (int64_t c = 0; c < n; c += kLanes) {
    f32s added = bias ? load(bias + c, n - c) : f32s{};
    store(y + c, load(sums + c, n - c) + added, n - c);
  }
}

}  // namespace lora_jax
