// silu(gate) * up of rows in float32, rounded once; of padding rows zero.
#pragma once
#include "parallel.h"
#include "vector.h"

namespace lora_jax {

template <class T>
struct SiluTimes {
  const T *gate, *up;
  T* out;
  int64_t rows, real_rows, width;
};

constexpr int64_t kSiluPiece = 4096;  // elements

// gate / (1 + exp(-gate)) * up: the exponential is of what is not positive, so that it is finite.
inline f32s silu_times(f32s gate, f32s up) {
  const f32s small = exp_nonpositive(gate < f32s{} ? gate : -gate);
  const f32s over = gate < f32s{} ? gate * small : gate;
  return over / (splat(1.0f) + small) * up;
}

template <class T>
void run_silu_times(xla::ffi::ThreadPool& pool, const SiluTimes<T>& g) {
  const int64_t all = g.real_rows * g.width;
  parallel_for(pool, (all + kSiluPiece - 1) / kSiluPiece, double(all) / 1e3, [&](int64_t i) {
    const int64_t end = std::min(all, (i + 1) * kSiluPiece);
    for (int64_t k = i * kSiluPiece; k < end; k += kLanes) {
      const int64_t n = std::min<int64_t>(kLanes, end - k);
      store(g.out + k, silu_times(load(g.gate + k, n), load(g.up + k, n)), n);
    }
  });
  std::memset(g.out + all, 0, (g.rows - g.real_rows) * g.width * sizeof(T));
}

}  // namespace lora_jax
