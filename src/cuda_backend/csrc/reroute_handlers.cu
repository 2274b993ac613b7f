// XLA FFI entry points of row_map and reroute: one launch, two for more than a block of rows.
#include "reroute.cuh"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using S32 = ffi::Buffer<ffi::S32>;

namespace lora_jax {

static ffi::Error run(RerouteArgs args, cudaStream_t stream, S32& ids, S32& num_tokens, ffi::Result<S32>& order,
                      ffi::Result<S32>& inverse, ffi::Result<S32>& sizes, ffi::Result<S32>& counts,
                      ffi::Result<S32>& sorted) {
  args.ids = ids.typed_data(), args.num_tokens = num_tokens.typed_data();
  args.tokens = static_cast<int>(ids.dimensions()[0]), args.k = static_cast<int>(ids.dimensions()[1]);
  args.groups = static_cast<int>(sizes->element_count());
  args.order = order->typed_data(), args.inverse = inverse->typed_data(), args.sizes = sizes->typed_data();
  args.counts = counts->typed_data(), args.sorted = reinterpret_cast<uint32_t*>(sorted->typed_data());
  const cudaError_t e = launch_reroute(args, stream);
  return e == cudaSuccess ? ffi::Error::Success() : ffi::Error::Internal(cudaGetErrorString(e));
}

static ffi::Error Mapped(cudaStream_t stream, S32 ids, S32 num_tokens, ffi::Result<S32> order,
                         ffi::Result<S32> inverse, ffi::Result<S32> sizes, ffi::Result<S32> counts,
                         ffi::Result<S32> sorted) {
  RerouteArgs args{};
  args.experts = static_cast<int>(sizes->element_count());
  return run(args, stream, ids, num_tokens, order, inverse, sizes, counts, sorted);
}

static ffi::Error Rerouted(cudaStream_t stream, S32 ids, S32 token_to_slot, S32 table, S32 num_tokens,
                           ffi::Result<S32> order, ffi::Result<S32> inverse, ffi::Result<S32> sizes,
                           ffi::Result<S32> counts, ffi::Result<S32> sorted) {
  RerouteArgs args{};
  args.token_to_slot = token_to_slot.typed_data(), args.table = table.typed_data();
  args.slots = static_cast<int>(table.dimensions()[0]), args.experts = static_cast<int>(table.dimensions()[1]);
  return run(args, stream, ids, num_tokens, order, inverse, sizes, counts, sorted);
}

}  // namespace lora_jax

#define LORA_JAX_ON_STREAM ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>()
#define LORA_JAX_SORTED Ret<S32>().Ret<S32>().Ret<S32>().Ret<S32>().Ret<S32>()

XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_row_map, lora_jax::Mapped,
                              LORA_JAX_ON_STREAM.Arg<S32>().Arg<S32>().LORA_JAX_SORTED,
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_reroute, lora_jax::Rerouted,
                              LORA_JAX_ON_STREAM.Arg<S32>().Arg<S32>().Arg<S32>().Arg<S32>().LORA_JAX_SORTED,
                              {ffi::Traits::kCmdBufferCompatible});
