// XLA FFI entry point of the float32 grouped matmul: one launch, fit for CUDA graphs.
#include "device/ffi_buffers.cuh"
#include "grouped_matmul/f32_parts_launch.cuh"
#include "grouped_matmul/grouped_f32_launch.cuh"

namespace lora_jax {

template <class X>
static ffi::Error GroupedF32As(cudaStream_t stream, ffi::AnyBuffer& x, F32& w, S32& sizes, F32& bias, float* y) {
  const auto d = w.dimensions();
  const float* given = bias.element_count() ? bias.typed_data() : nullptr;
  const GroupedF32Args<X> args{static_cast<const X*>(x.untyped_data()), w.typed_data(), sizes.typed_data(), given, y,
                               static_cast<int>(x.dimensions()[0]), static_cast<int>(d[0]), static_cast<int>(d[1]),
                               static_cast<int>(d[2])};
  if constexpr (sizeof(X) == 2)
    if (args.groups == 1 && args.d_in % kPartsUnit == 0)
      return status(launch_f32_parts({args.x, args.w, args.sizes, given, y, args.rows, args.d_out, args.d_in}, stream));
  return status(launch_grouped_f32(args, stream));
}

// x is float32 or bfloat16; an empty bias is none.
static ffi::Error GroupedF32(cudaStream_t stream, ffi::AnyBuffer x, F32 w, S32 sizes, F32 bias, ffi::Result<F32> y) {
  if (x.element_type() == ffi::BF16) return GroupedF32As<__nv_bfloat16>(stream, x, w, sizes, bias, y->typed_data());
  return GroupedF32As<float>(stream, x, w, sizes, bias, y->typed_data());
}

}  // namespace lora_jax

XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_grouped_f32, lora_jax::GroupedF32,
                              LORA_JAX_ON_STREAM.Arg<ffi::AnyBuffer>()
                                  .Arg<F32>()
                                  .Arg<S32>()
                                  .Arg<F32>()
                                  .Ret<F32>(),
                              {ffi::Traits::kCmdBufferCompatible});
