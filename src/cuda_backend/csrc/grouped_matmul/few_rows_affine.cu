// Products for few rows of affine weights.
#include "grouped_matmul/few_rows_affine_launch.cuh"

namespace lora_jax {

cudaError_t few_rows_affine(const FewRowsCall& call, cudaStream_t stream) { return launch_affine(call, stream); }

}  // namespace lora_jax
