// XLA FFI entry point of layer_norm: one launch, fit for CUDA graphs.
#include "device/ffi_buffers.cuh"
#include "layer_norm/layer_norm.cuh"

namespace lora_jax {

static ffi::Error LayerNorm(cudaStream_t stream, BF16 x, BF16 weight, BF16 bias, ffi::Result<BF16> y, float eps) {
  const auto d = x.dimensions();
  const LayerNormArgs args{data(x), data(weight), data(bias), data(y), static_cast<int>(d[0]),
                           static_cast<int>(d[1]), eps};
  return status(launch_layer_norm(args, stream));
}

}  // namespace lora_jax

XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_layer_norm, lora_jax::LayerNorm,
                              LORA_JAX_ON_STREAM.Arg<BF16>()
                                  .Arg<BF16>()
                                  .Arg<BF16>()
                                  .Ret<BF16>()
                                  .Attr<float>("eps"),
                              {ffi::Traits::kCmdBufferCompatible});
