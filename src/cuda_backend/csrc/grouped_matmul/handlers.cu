// XLA FFI entry point of the float32 grouped matmul: one launch, fit for CUDA graphs.
#include "device/ffi_buffers.cuh"
#include "grouped_matmul/grouped_f32.cuh"

namespace lora_jax {

// An empty bias is none.
static ffi::Error GroupedF32(cudaStream_t stream, F32 x, F32 w, S32 sizes, F32 bias, ffi::Result<F32> y) {
  const auto d = w.dimensions();
  const float* given = bias.element_count() ? bias.typed_data() : nullptr;
  const GroupedF32Args args{x.typed_data(), w.typed_data(), sizes.typed_data(), given, y->typed_data(),
                            static_cast<int>(x.dimensions()[0]), static_cast<int>(d[0]), static_cast<int>(d[1]),
                            static_cast<int>(d[2])};
  const cudaError_t e = launch_grouped_f32(args, stream);
  return status(e);
}

}  // namespace lora_jax

XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_grouped_f32, lora_jax::GroupedF32,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<S32>()
                                  .Arg<F32>()
                                  .Ret<F32>(),
                              {ffi::Traits::kCmdBufferCompatible});
