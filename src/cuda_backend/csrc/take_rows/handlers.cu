// XLA FFI entry point of take_rows: one launch, fit for CUDA graphs.
#include "device/ffi_buffers.cuh"
#include "take_rows/take_rows.cuh"

namespace lora_jax {

static ffi::Error TakeRows(cudaStream_t stream, ffi::AnyBuffer x, S32 row_to_row, S32 num_rows,
                           ffi::Result<ffi::AnyBuffer> y) {
  const auto d = y->dimensions();
  const int64_t rows = d[0], bytes = static_cast<int64_t>(y->size_bytes());
  if (rows < 1 || bytes % (16 * rows)) return ffi::Error::InvalidArgument("take_rows: rows are units of 16 bytes");
  return status(launch_take_rows(
      TakeRowsArgs{static_cast<const uint4*>(x.untyped_data()), row_to_row.typed_data(), num_rows.typed_data(),
                   static_cast<uint4*>(y->untyped_data()), static_cast<int>(rows), static_cast<int>(bytes / 16 / rows)},
      stream));
}

}  // namespace lora_jax

XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_take_rows, lora_jax::TakeRows,
                              LORA_JAX_ON_STREAM.Arg<ffi::AnyBuffer>().Arg<S32>().Arg<S32>().Ret<ffi::AnyBuffer>(),
                              {ffi::Traits::kCmdBufferCompatible});
