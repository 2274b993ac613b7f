// XLA FFI entry point of the host's board: two launches, fit for CUDA graphs.
#include "device/ffi_buffers.cuh"
#include "host_board/host_board.cuh"

namespace lora_jax {

// What has to be computed before the wait is an argument too; it is not read.
static ffi::Error ReadBoard(cudaStream_t stream, ffi::Buffer<ffi::U32> where, S32 number, ffi::AnyBuffer,
                            ffi::Result<S32> values, ffi::Result<S32> state) {
  const BoardArgs args{where.typed_data(), number.typed_data(), values->typed_data(), state->typed_data(),
                       static_cast<int64_t>(values->element_count())};
  return status(launch_board(args, stream));
}

}  // namespace lora_jax

XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_read_board, lora_jax::ReadBoard,
                              LORA_JAX_ON_STREAM.Arg<ffi::Buffer<ffi::U32>>()
                                  .Arg<S32>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<S32>()
                                  .Ret<S32>(),
                              {ffi::Traits::kCmdBufferCompatible});
