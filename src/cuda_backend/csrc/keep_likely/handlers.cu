// XLA FFI entry point of keep_likely: one launch, fit for CUDA graphs.
#include "device/ffi_buffers.cuh"
#include "keep_likely/keep_likely.cuh"

namespace lora_jax {

static ffi::Error KeepLikely(cudaStream_t stream, F32 logits, F32 min_p, S32 top_k, F32 top_p,
                             ffi::Result<F32> least) {
  const auto d = logits.dimensions();
  const KeepLikelyArgs args{logits.typed_data(), min_p.typed_data(),       top_k.typed_data(),       top_p.typed_data(),
                            least->typed_data(), static_cast<int>(d[0]), static_cast<int>(d[1])};
  return status(launch_keep_likely(args, stream));
}

}  // namespace lora_jax

XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_keep_likely, lora_jax::KeepLikely,
                              LORA_JAX_ON_STREAM.Arg<F32>().Arg<F32>().Arg<S32>().Arg<F32>().Ret<F32>(),
                              {ffi::Traits::kCmdBufferCompatible});
