// Launches of affine weights, which are compiled beside the others.
#pragma once
#include "grouped_matmul/few_rows_launch.cuh"

namespace lora_jax {

// Of any number of columns that share a scale: a multiple of 128 or of 64, all of a row, or 32.
inline cudaError_t launch_affine(const FewRowsCall& call, cudaStream_t stream) {
  const FewRowsArgs& p = call.args;
  if (p.scale_columns % 128 == 0 || p.scale_groups == 1) return launch_few_rows<Coding::kAffine, 128>(call, stream);
  if (p.scale_columns % 64 == 0) return launch_few_rows<Coding::kAffine, 64>(call, stream);
  return launch_few_rows<Coding::kAffine, 32>(call, stream);
}

}  // namespace lora_jax
