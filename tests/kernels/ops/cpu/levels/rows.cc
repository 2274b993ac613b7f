// Products, adapters, attention and norms for any CPU: are results right, and has a row the same bits
// alone as among others? Prints an op for each failure; the exit status says whether there is one.
#include <cmath>
#include <cstdio>
#include <numeric>

#include "attention.h"
#include "gemm.h"
#include "lora.h"
#include "norm.h"

using namespace lora_jax;

constexpr int64_t kMostRows = 61, kIn = 171, kOut = 45, kRank = 5;
bool failed = false;

template <class T>
std::vector<T> numbers(int64_t count, uint32_t seed) {
  std::vector<T> all(count);
  for (T& one : all) {
    seed = seed * 1664525u + 1013904223u;
    const float value = float(int32_t(seed)) / 2147483648.0f;
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if constexpr (sizeof(T) == 2)
      one = T(bits >> 16);
    else
      one = value;
  }
  return all;
}

// Whether `run(x, first row, rows, y)` gives rows alone what it gives all of them.
template <class T, class Run>
std::vector<T> same_alone(const char* op, int64_t rows, int64_t width, const Run& run) {
  std::vector<T> all(rows * width);
  run(0, rows, all.data());
  for (int64_t count : {1, 2, 4, 7, 13, 49})
    for (int64_t row = 0; row + count <= rows; row += 5) {
      std::vector<T> some(count * width);
      run(row, count, some.data());
      if (std::memcmp(some.data(), all.data() + row * width, some.size() * sizeof(T))) {
        std::printf("%s of %zu bytes: row %d in %d has other bits\n", op, sizeof(T), int(row), int(count));
        failed = true;
      }
    }
  return all;
}

void check(const char* op, size_t bytes, double got, double want, double size) {
  if (std::abs(got - want) <= (bytes == 2 ? 1.0 / 256 : 3e-6) * size) return;
  std::printf("%s of %zu bytes: %g instead of %g\n", op, bytes, got, want);
  failed = true;
}

template <class D>
void products(xla::ffi::ThreadPool& pool) {
  using T = typename D::T;
  auto x = numbers<T>(kMostRows * kIn, 1), w = numbers<T>(kOut * kIn, 2), bias = numbers<T>(kOut, 3);
  auto y = same_alone<T>("product", kMostRows, kOut, [&](int64_t row, int64_t count, T* out) {
    int32_t sizes[1] = {int32_t(count)};
    run_gemms<D>(pool, {{w.data(), nullptr, x.data() + row * kIn, bias.data(), sizes, out, count, 1,
                         kOut, kIn}});
  });
  for (int64_t row = 0; row < kMostRows; row += 7)
    for (int64_t col = 0; col < kOut; ++col) {
      double sum = to_f32(bias[col]);
      for (int64_t k = 0; k < kIn; ++k)
        sum += double(to_f32(x[row * kIn + k])) * to_f32(w[col * kIn + k]);
      check("product", sizeof(T), to_f32(y[row * kOut + col]), sum, 8);
    }
}

template <class D>
void adapters(xla::ffi::ThreadPool& pool) {
  using T = typename D::T;
  auto x = numbers<T>(kMostRows * kIn, 1), a = numbers<T>(kRank * kIn, 2), b = numbers<T>(kRank * kOut, 3);
  const int32_t entries[5] = {0, 0, kRank, 0, 0};
  const std::vector<int32_t> slots(kMostRows, 0), experts(kMostRows, 0);
  const float scaling = 0.5f;
  auto y = same_alone<T>("adapter", kMostRows, kOut, [&](int64_t row, int64_t count, T* out) {
    std::memset(out, 0, count * kOut * sizeof(T));
    run_loras<D, T, T>(pool, {{x.data() + row * kIn, a.data(), b.data(), entries, slots.data(),
                               experts.data(), &scaling, out, count, kIn, kOut, kRank, kRank, 1, kRank}});
  });
  for (int64_t row = 0; row < kMostRows; row += 7)
    for (int64_t col = 0; col < kOut; ++col) {
      double sum = 0;
      for (int64_t r = 0; r < kRank; ++r) {
        double h = 0;
        for (int64_t k = 0; k < kIn; ++k) h += double(to_f32(x[row * kIn + k])) * to_f32(a[r * kIn + k]);
        sum += scaling * h * to_f32(b[r * kOut + col]);
      }
      check("adapter", sizeof(T), to_f32(y[row * kOut + col]), sum, 16);
    }
}

// Tokens at positions 100 and later of one sequence, two query heads over one head of K and V.
template <class D>
void attention(xla::ffi::ThreadPool& pool) {
  using T = typename D::T;
  constexpr int64_t kDim = 24, kHeads = 2, kPage = 8, kFirst = 100, kPages = 24;
  auto q = numbers<T>(kMostRows * kHeads * kDim, 1), k = numbers<T>(kPages * kPage * kDim, 2),
       v = numbers<T>(kPages * kPage * kDim, 3);
  std::vector<int32_t> table(kPages), seqs(kMostRows, 0), positions(kMostRows);
  for (int64_t i = 0; i < kPages; ++i) table[i] = int32_t((i * 7) % kPages);
  std::iota(positions.begin(), positions.end(), int32_t(kFirst));
  auto y = same_alone<T>("attention", kMostRows, kHeads * kDim, [&](int64_t row, int64_t count, T* out) {
    run_attention<D, T>(pool, {q.data() + row * kHeads * kDim, k.data(), v.data(), table.data(), seqs.data(),
                               positions.data() + row, nullptr, out, count, 1, kPages, kPages, kPage,
                               kHeads, 1, kDim, kDim, 0, 0.3f}, count);
  });
  for (int64_t row = 0; row < kMostRows; row += 13)
    for (int64_t head = 0; head < kHeads; ++head) {
      double total = 0, sums[kDim] = {};
      for (int64_t s = 0; s <= positions[row]; ++s) {
        const int64_t at = (table[s / kPage] * kPage + s % kPage) * kDim;
        double score = 0;
        for (int64_t d = 0; d < kDim; ++d)
          score += double(to_f32(q[(row * kHeads + head) * kDim + d])) * to_f32(k[at + d]);
        const double share = std::exp(0.3f * score);
        total += share;
        for (int64_t d = 0; d < kDim; ++d) sums[d] += share * to_f32(v[at + d]);
      }
      for (int64_t d = 0; d < kDim; ++d)
        check("attention", sizeof(T), to_f32(y[(row * kHeads + head) * kDim + d]), sums[d] / total, 1);
    }
}

template <class D>
void norms(xla::ffi::ThreadPool& pool) {
  using T = typename D::T;
  auto x = numbers<T>(kMostRows * kIn, 1), addend = numbers<T>(kMostRows * kIn, 2), w = numbers<T>(kIn, 3);
  std::vector<T> sums(kMostRows * kIn);
  auto y = same_alone<T>("norm", kMostRows, kIn, [&](int64_t row, int64_t count, T* out) {
    run_rms_norm<T>(pool, {x.data() + row * kIn, addend.data() + row * kIn, w.data(), sums.data() + row * kIn,
                           out, count, count, kIn, 1e-6f});
  });
  for (int64_t row = 0; row < kMostRows; row += 7) {
    double squares = 0;
    for (int64_t k = 0; k < kIn; ++k) squares += std::pow(double(to_f32(sums[row * kIn + k])), 2);
    for (int64_t k = 0; k < kIn; ++k)
      check("norm", sizeof(T), to_f32(y[row * kIn + k]),
            to_f32(sums[row * kIn + k]) * to_f32(w[k]) / std::sqrt(squares / kIn + 1e-6), 4);
  }
}

int main() {
  for (int64_t threads : {1, 3}) {
    xla::ffi::ThreadPool pool{threads};
    products<DotF32>(pool), products<DotBF16>(pool);
    adapters<DotF32>(pool), adapters<DotBF16>(pool);
    attention<DotF32>(pool), attention<DotBF16>(pool);
    norms<DotF32>(pool), norms<DotBF16>(pool);
  }
  std::printf("%d lanes\n", kLanes);
  return failed;
}
