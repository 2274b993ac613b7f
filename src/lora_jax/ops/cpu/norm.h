// Norms of rows, whose results depend on the row alone: sums are kLanes sums along it, then sum_lanes.
//
// RMS norm: s / sqrt(mean(s^2) + eps) * weight of rows s, which are x or x + addend, rounded to their
// type; of padding rows sum and norm are zero. Layer norm: (x - mean) / sqrt(variance + eps) * weight
// + bias.
#pragma once
#include <cmath>
#include <vector>

#include "dot.h"
#include "parallel.h"

namespace lora_jax {

template <class T>
struct RmsNorm {
  const T *x, *addend, *weight;  // addend may be null
  T *sum, *out;                  // sum is written where there is an addend
  int64_t rows, real_rows, size;
  float eps;
};

constexpr int64_t kNormRows = 8;  // of a piece

// `wide` has room for a row of floats.
template <class T>
inline void norm_row(const RmsNorm<T>& g, int64_t row, float* wide) {
  const T *x = g.x + row * g.size, *addend = g.addend ? g.addend + row * g.size : nullptr;
  T* sum = g.sum + row * g.size;
  f32s squares = {};
  for (int64_t k = 0; k < g.size; k += kLanes) {
    const int64_t n = std::min<int64_t>(kLanes, g.size - k);
    f32s s = load(x + k, n);
    if (addend) {
      store(sum + k, s + load(addend + k, n), n);
      s = load(sum + k, n);
    }
    store(wide + k, s, n);
    squares = fma(s, s, squares);
  }
  const f32s scale = splat(1.0f / std::sqrt(sum_lanes(squares) / float(g.size) + g.eps));
  for (int64_t k = 0; k < g.size; k += kLanes) {
    const int64_t n = std::min<int64_t>(kLanes, g.size - k);
    store(g.out + row * g.size + k, load(wide + k, n) * scale * load(g.weight + k, n), n);
  }
}

template <class T>
void run_rms_norm(xla::ffi::ThreadPool& pool, const RmsNorm<T>& g) {
  int64_t pieces = (g.real_rows + kNormRows - 1) / kNormRows;
  parallel_for(pool, pieces, double(g.real_rows) * g.size / 3e3, [&](int64_t i) {
    std::vector<float> wide(g.size);
    for (int64_t row = i * kNormRows; row < std::min(g.real_rows, (i + 1) * kNormRows); ++row)
      norm_row(g, row, wide.data());
  });
  const int64_t first = g.real_rows * g.size, bytes = (g.rows - g.real_rows) * g.size * sizeof(T);
  std::memset(g.out + first, 0, bytes);
  if (g.addend) std::memset(g.sum + first, 0, bytes);
}

template <class T>
struct LayerNorm {
  const T *x, *weight, *bias;  // bias may be null
  T* out;
  int64_t rows, size;
  float eps;
};

// `wide` has room for a row of floats.
template <class T>
inline void layer_norm_row(const LayerNorm<T>& g, int64_t row, float* wide) {
  const T* x = g.x + row * g.size;
  f32s sum = {}, squares = {};
  for (int64_t k = 0; k < g.size; k += kLanes) sum += load(x + k, g.size - k);
  const f32s mean = splat(sum_lanes(sum) / float(g.size));
  for (int64_t k = 0; k < g.size; k += kLanes) {
    const f32s centred = keep(load(x + k, g.size - k) - mean, g.size - k, 0.0f);
    store(wide + k, centred, g.size - k);
    squares = fma(centred, centred, squares);
  }
  const f32s scale = splat(1.0f / std::sqrt(sum_lanes(squares) / float(g.size) + g.eps));
  for (int64_t k = 0; k < g.size; k += kLanes) {
    const int64_t n = g.size - k;
    const f32s bias = g.bias ? load(g.bias + k, n) : f32s{};
    store(g.out + row * g.size + k, fma(load(wide + k, n) * scale, load(g.weight + k, n), bias), n);
  }
}

template <class T>
void run_layer_norm(xla::ffi::ThreadPool& pool, const LayerNorm<T>& g) {
  parallel_for(pool, (g.rows + kNormRows - 1) / kNormRows, double(g.rows) * g.size / 3e3,
               [&](int64_t i) {
    std::vector<float> wide(g.size);
    for (int64_t row = i * kNormRows; row < std::min(g.rows, (i + 1) * kNormRows); ++row)
      layer_norm_row(g, row, wide.data());
  });
}

}  // namespace lora_jax
