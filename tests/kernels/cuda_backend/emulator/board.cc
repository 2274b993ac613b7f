// The wait for the host as a custom call of XLA's CPU platform, over the emulated kernels; what
// csrc/host_board/handlers.cu is for a GPU.
#include "device/ffi_buffers.cuh"
#include "host_board/host_board.cuh"

namespace lora_jax {

inline ffi::Error on_cpu_read_board(ffi::Buffer<ffi::U32> where, S32 number, ffi::AnyBuffer, ffi::Result<S32> values,
                                    ffi::Result<S32> state) {
  const BoardArgs args{where.typed_data(), number.typed_data(), values->typed_data(), state->typed_data(),
                       static_cast<int64_t>(values->element_count())};
  return status(launch_board(args, nullptr));
}

extern "C" void set_board_patience(double seconds) { kBoardPatience = static_cast<uint64_t>(seconds * 1e9); }

}  // namespace lora_jax

XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_read_board, lora_jax::on_cpu_read_board,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::U32>>()
                                  .Arg<S32>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<S32>()
                                  .Ret<S32>());
