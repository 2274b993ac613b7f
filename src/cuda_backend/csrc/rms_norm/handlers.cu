// XLA FFI entry point of rms_norm: one launch, fit for CUDA graphs.
#include "device/ffi_buffers.cuh"
#include "rms_norm/rms_norm.cuh"

namespace lora_jax {

static ffi::Error RmsNorm(cudaStream_t stream, BF16 x, BF16 addend, BF16 weight, ffi::Result<BF16> sum,
                          ffi::Result<BF16> y, float eps) {
  const auto d = x.dimensions();
  const RmsNormArgs args{data(x), data(addend), data(weight), data(sum), data(y),
                         static_cast<int>(d[0]), static_cast<int>(d[1]), eps};
  return status(launch_rms_norm(args, stream));
}

}  // namespace lora_jax

XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_rms_norm, lora_jax::RmsNorm,
                              LORA_JAX_ON_STREAM.Arg<BF16>()
                                  .Arg<BF16>()
                                  .Arg<BF16>()
                                  .Ret<BF16>()
                                  .Ret<BF16>()
                                  .Attr<float>("eps"),
                              {ffi::Traits::kCmdBufferCompatible});
