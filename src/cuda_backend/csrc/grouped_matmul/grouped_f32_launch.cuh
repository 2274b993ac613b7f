// The choice between the kernels of grouped_f32.cuh and grouped_f32_tiles.cuh by the number of rows: bits are the same.
#pragma once
#include "grouped_matmul/grouped_f32_tiles.cuh"

namespace lora_jax {

enum class F32Form { kFew, kTiles16, kTiles32, kTiles64 };  // the numbers are a tile's rows

// Times of as many CTAs as SMs, relative to one another, measured on an H200 at 128 columns and d_in of 2048.
constexpr int64_t kFewTime = 7, kTiles16Time = 357, kTiles32Time = 480, kTiles64Time = 768;
constexpr int kF32Sms = 132, kFewColumns = 4;

// Most CTAs of an SM. A tile in which a group ends and another begins counts twice.
template <class X>
int64_t f32_waves(const GroupedF32Args<X>& p, int rows, int columns) {
  const int64_t tiles = (p.rows + rows - 1) / rows + min(p.groups, p.rows) - 1;
  return (tiles * ((p.d_out + columns - 1) / columns) + kF32Sms - 1) / kF32Sms;
}

template <class X>
F32Form f32_form(const GroupedF32Args<X>& p) {
  if (p.d_out == 1) return F32Form::kFew;
  F32Form form = F32Form::kFew;
  int64_t least = f32_waves(p, kF32Rows, kFewColumns) * kFewTime;
  const auto consider = [&](F32Form other, int rows, int64_t of_one) {
    const int64_t time = f32_waves(p, rows, kTileColumns) * of_one;
    if (time < least) form = other, least = time;
  };
  consider(F32Form::kTiles16, 16, kTiles16Time);
  consider(F32Form::kTiles32, 32, kTiles32Time);
  consider(F32Form::kTiles64, 64, kTiles64Time);
  return form;
}

template <class X, int C>
cudaError_t launch_f32_few(const GroupedF32Args<X>& p, cudaStream_t stream) {
  const int64_t ctas = static_cast<int64_t>((p.rows + kF32Rows - 1) / kF32Rows) * ((p.d_out + C - 1) / C);
  const auto kernel = grouped_f32_kernel<X, C>;
  kernel<<<static_cast<unsigned>(ctas), kF32Threads, 0, stream>>>(p);
  return cudaGetLastError();
}

template <class X, int R>
cudaError_t launch_f32_tiles(const GroupedF32Args<X>& p, cudaStream_t stream) {
  constexpr int bytes = kTileBytes<R>;
  const int64_t tiles = (p.rows + 8 * R - 1) / (8 * R), ctas = tiles * ((p.d_out + kTileColumns - 1) / kTileColumns);
  const auto kernel = grouped_f32_tiles_kernel<X, R>;
  const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (e != cudaSuccess) return e;
  kernel<<<static_cast<unsigned>(ctas), kTileThreads, bytes, stream>>>(p);
  return cudaGetLastError();
}

template <class X>
cudaError_t launch_grouped_f32_as(F32Form form, const GroupedF32Args<X>& p, cudaStream_t stream) {
  switch (form) {
    case F32Form::kTiles16: return launch_f32_tiles<X, 2>(p, stream);
    case F32Form::kTiles32: return launch_f32_tiles<X, 4>(p, stream);
    case F32Form::kTiles64: return launch_f32_tiles<X, 8>(p, stream);
    default: return p.d_out == 1 ? launch_f32_few<X, 1>(p, stream) : launch_f32_few<X, kFewColumns>(p, stream);
  }
}

template <class X>
cudaError_t launch_grouped_f32(const GroupedF32Args<X>& p, cudaStream_t stream) {
  return launch_grouped_f32_as(f32_form(p), p, stream);
}

}  // namespace lora_jax
