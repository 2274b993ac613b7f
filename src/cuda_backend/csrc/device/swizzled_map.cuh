// Tensor maps of bfloat16 whose innermost 128 bytes are swizzled; every kernel here copies by them.
#pragma once
#include "device/tensor_map.cuh"

namespace lora_jax {

// Fills `map` for a tensor of RANK dimensions, the innermost first; `strides` are bytes of a step in
// each dimension but the innermost, `box` is what one copy brings, and `ahead` how much L2 fetches of
// memory at least.
template <int RANK>
cudaError_t swizzled_map(CUtensorMap* map, const void* base, const cuuint64_t (&dims)[RANK],
                         const cuuint64_t (&strides)[RANK - 1], const cuuint32_t (&box)[RANK],
                         CUtensorMapL2promotion ahead = CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                         CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B) {
  const EncodeTiled encode = encode_tiled();
  if (!encode) return cudaErrorNotSupported;
  cuuint32_t steps[RANK];
  for (cuuint32_t& step : steps) step = 1;
  const CUresult r = encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, RANK, const_cast<void*>(base), dims, strides, box,
                            steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, ahead,
                            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return r == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace lora_jax
