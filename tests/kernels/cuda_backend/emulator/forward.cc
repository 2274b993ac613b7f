// csrc_nvshmem/forward.cu for XLA's CPU platform, over the emulated kernel and the nvshmem.h in include.
#include "forward.cuh"

namespace lora_jax {
constexpr auto on_cpu_forward_after = [](auto... args) { return ForwardAfter(nullptr, args...); };
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_nvshmem_forward_after, lora_jax::on_cpu_forward_after,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<int64_t>("end"));
