// XLA FFI entry point of silu_times: one launch, fit for CUDA graphs.
#include "device/ffi_buffers.cuh"
#include "silu_times/silu_times.cuh"

namespace lora_jax {

static ffi::Error SiluTimes(cudaStream_t stream, BF16 gate, BF16 up, S32 num_rows, ffi::Result<BF16> y) {
  const auto d = gate.dimensions();
  if (d[1] % 8 || !d[0] || !d[1]) return ffi::Error::InvalidArgument("silu_times: rows are units of 8 values");
  const auto* gates = static_cast<const uint4*>(gate.untyped_data());
  const auto* ups = static_cast<const uint4*>(up.untyped_data());
  return status(launch_silu_times(
      {gates, ups, num_rows.typed_data(), static_cast<uint4*>(y->untyped_data()), d[0], d[1] / 8}, stream));
}

}  // namespace lora_jax

XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_silu_times, lora_jax::SiluTimes,
                              LORA_JAX_ON_STREAM.Arg<BF16>().Arg<BF16>().Arg<S32>().Ret<BF16>(),
                              {ffi::Traits::kCmdBufferCompatible});
