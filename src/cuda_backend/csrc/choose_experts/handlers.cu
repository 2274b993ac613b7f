// XLA FFI entry point of choose_experts: one launch, fit for CUDA graphs.
#include "device/ffi_buffers.cuh"
#include "choose_experts/choose_experts.cuh"

namespace lora_jax {

static ffi::Error ChooseExperts(cudaStream_t stream, F32 logits, ffi::Result<F32> weights, ffi::Result<S32> ids,
                                bool softmax_first, bool normed, float scale) {
  const auto d = logits.dimensions();
  const ChooseExpertsArgs args{logits.typed_data(), weights->typed_data(), ids->typed_data(),
                               static_cast<int>(d[0]), static_cast<int>(d[1]),
                               static_cast<int>(ids->dimensions()[1]), softmax_first, normed, scale};
  return status(launch_choose_experts(args, stream));
}

}  // namespace lora_jax

XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_choose_experts, lora_jax::ChooseExperts,
                              LORA_JAX_ON_STREAM.Arg<F32>()
                                  .Ret<F32>()
                                  .Ret<S32>()
                                  .Attr<bool>("softmax_first")
                                  .Attr<bool>("normed")
                                  .Attr<float>("scale"),
                              {ffi::Traits::kCmdBufferCompatible});
