// The choice between tiles of f32_parts.cuh by the number of rows: bits are the same.
#pragma once
#include "grouped_matmul/f32_parts.cuh"

namespace lora_jax {

enum class PartsForm { kRows8, kRows16, kRows32, kRows64 };  // the numbers are a tile's rows

using PartsTile8 = PartsTile<1, 1, 1, 1, 4>;
using PartsTile16 = PartsTile<1, 2, 1, 1, 4>;
using PartsTile32 = PartsTile<2, 2, 2, 1, 1>;
using PartsTile64 = PartsTile<4, 2, 4, 2, 1>;

// Times of as many CTAs as SMs, relative to one another, measured on an H200 at 128 columns and d_in of 2048.
constexpr int64_t kParts16Time = 40, kParts32Time = 50, kParts64Time = 135;
constexpr int kPartsSms = 132;

template <class Tile>
int64_t parts_ctas(const F32PartsArgs& p) {
  const int64_t tiles = (p.rows + Tile::kRows - 1) / Tile::kRows;
  return tiles * ((p.d_out + Tile::kColumns - 1) / Tile::kColumns);
}

inline PartsForm parts_form(const F32PartsArgs& p) {
  if (p.rows <= PartsTile8::kRows) return PartsForm::kRows8;
  const auto time = [](int64_t ctas, int64_t of_one) { return (ctas + kPartsSms - 1) / kPartsSms * of_one; };
  const int64_t few = time(parts_ctas<PartsTile16>(p), kParts16Time);
  const int64_t some = time(parts_ctas<PartsTile32>(p), kParts32Time);
  const int64_t many = time(parts_ctas<PartsTile64>(p), kParts64Time);
  if (few <= some && few <= many) return PartsForm::kRows16;
  return some <= many ? PartsForm::kRows32 : PartsForm::kRows64;
}

template <class Tile>
cudaError_t launch_f32_parts_of(const F32PartsArgs& p, cudaStream_t stream) {
  const auto kernel = f32_parts_kernel<Tile>;
  const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kBytes);
  if (e != cudaSuccess) return e;
  kernel<<<static_cast<unsigned>(parts_ctas<Tile>(p)), Tile::kThreads, Tile::kBytes, stream>>>(p);
  return cudaGetLastError();
}

inline cudaError_t launch_f32_parts_as(PartsForm form, const F32PartsArgs& p, cudaStream_t stream) {
  switch (form) {
    case PartsForm::kRows8: return launch_f32_parts_of<PartsTile8>(p, stream);
    case PartsForm::kRows32: return launch_f32_parts_of<PartsTile32>(p, stream);
    case PartsForm::kRows64: return launch_f32_parts_of<PartsTile64>(p, stream);
    default: return launch_f32_parts_of<PartsTile16>(p, stream);
  }
}

inline cudaError_t launch_f32_parts(const F32PartsArgs& p, cudaStream_t stream) {
  return launch_f32_parts_as(parts_form(p), p, stream);
}

}  // namespace lora_jax
