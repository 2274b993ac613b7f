// XLA FFI entry point of a dense map with what follows it; fit for CUDA graphs.
#include "dense_matmul/dense_matmul.cuh"
#include "device/ffi_buffers.cuh"

namespace lora_jax {

static ffi::Error DenseMatmul(cudaStream_t stream, BF16 x, BF16 w, S32 num_rows, BF16 bias, BF16 addend,
                              ffi::Result<BF16> y, bool gelu) {
  DenseArgs args{};
  args.bias = data(bias), args.addend = data(addend), args.num_rows = num_rows.typed_data(), args.y = data(y);
  args.rows = static_cast<int>(x.dimensions()[0]), args.d_in = static_cast<int>(x.dimensions()[1]);
  args.d_out = static_cast<int>(w.dimensions()[0]);
  return status(launch_dense_matmul(args, x.untyped_data(), w.untyped_data(), gelu, stream));
}

}  // namespace lora_jax

XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_dense_matmul, lora_jax::DenseMatmul,
                              LORA_JAX_ON_STREAM.Arg<BF16>()
                                  .Arg<BF16>()
                                  .Arg<S32>()
                                  .Arg<BF16>()
                                  .Arg<BF16>()
                                  .Ret<BF16>()
                                  .Attr<bool>("gelu"),
                              {ffi::Traits::kCmdBufferCompatible});
