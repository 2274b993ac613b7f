// The custom call of csrc_nvshmem/forward.cuh; of a fixed shape, so that CUDA graphs may hold it.
#include "forward.cuh"

XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_nvshmem_forward_after, lora_jax::ForwardAfter,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<int64_t>("end"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
