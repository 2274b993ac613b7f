// XLA FFI entry points of row_map and reroute: one launch, two for more than a block of rows.
#include <cuda_runtime_api.h>

#include "reroute.cuh"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using S32 = ffi::Buffer<ffi::S32>;

namespace lora_jax {

static cudaError_t launch(const RerouteArgs& args, cudaStream_t stream) {
  const int rows = args.tokens * args.k, blocks = (rows + kBlockRows - 1) / kBlockRows, groups = args.groups + 1;
  const int sorting = static_cast<int>(sizeof(RerouteShared)) + groups * 4, placing = groups * 12;
  cudaError_t e = cudaFuncSetAttribute(sort_block_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sorting);
  if (e != cudaSuccess) return e;
  sort_block_kernel<<<blocks, kScanThreads, sorting, stream>>>(args);
  if (blocks == 1) return cudaGetLastError();
  e = cudaFuncSetAttribute(place_blocks_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, placing);
  if (e != cudaSuccess) return e;
  place_blocks_kernel<<<blocks, kScanThreads, placing, stream>>>(args);
  return cudaGetLastError();
}

static ffi::Error run(RerouteArgs args, cudaStream_t stream, S32& ids, S32& num_tokens, ffi::Result<S32>& order,
                      ffi::Result<S32>& inverse, ffi::Result<S32>& sizes, ffi::Result<S32>& counts,
                      ffi::Result<S32>& sorted) {
  args.ids = ids.typed_data(), args.num_tokens = num_tokens.typed_data();
  args.tokens = static_cast<int>(ids.dimensions()[0]), args.k = static_cast<int>(ids.dimensions()[1]);
  args.groups = static_cast<int>(sizes->element_count());
  args.order = order->typed_data(), args.inverse = inverse->typed_data(), args.sizes = sizes->typed_data();
  args.counts = counts->typed_data(), args.sorted = reinterpret_cast<uint32_t*>(sorted->typed_data());
  const cudaError_t e = launch(args, stream);
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
