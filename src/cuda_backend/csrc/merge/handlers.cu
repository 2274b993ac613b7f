// XLA FFI entry points of merge, whose launches are fit for CUDA graphs.
#include <vector>

#include "device/ffi_buffers.cuh"
#include "merge/merge.cuh"

namespace lora_jax {

// From w to out, which may be one array, in one launch.
static ffi::Error Merged(cudaStream_t stream, BF16 w, BF16 a_pool, BF16 b_pool, S32 sites, F32 scaling,
                         ffi::Result<BF16> out, int64_t max_rank) {
  auto data = [](const BF16& b) { return static_cast<__nv_bfloat16*>(b.untyped_data()); };
  const auto d = w.dimensions();
  const MergeArgs args{static_cast<__nv_bfloat16*>(out->untyped_data()), data(w), data(a_pool), data(b_pool),
                       sites.typed_data(), scaling.typed_data(), static_cast<int>(d[0]), static_cast<int>(d[1]),
                       static_cast<int>(d[2]), static_cast<int>(max_rank),
                       static_cast<int>(b_pool.dimensions()[0])};
  const cudaError_t e = launch_merge(args, stream);
  return status(e);
}

// The tensor maps of arrays of one matrix each, for MergedPlaced: `addresses` of result and w in turn.
static ffi::Error Places(cudaStream_t stream, ffi::Result<ffi::Buffer<ffi::U8>> table,
                         ffi::Span<const int64_t> addresses, ffi::Span<const int64_t> shapes, int64_t max_rank) {
  std::vector<CUtensorMap> maps(addresses.size());
  for (size_t i = 0; i < addresses.size() / 2; ++i) {
    auto at = [&](size_t n) { return reinterpret_cast<void*>(static_cast<uintptr_t>(addresses[2 * i + n])); };
    const auto d_out = static_cast<int>(shapes[2 * i]), d_in = static_cast<int>(shapes[2 * i + 1]);
    const cudaError_t e = merge_places(&maps[2 * i], at(0), at(1), d_out, d_in, static_cast<int>(max_rank));
    if (e != cudaSuccess) return status(e);
  }
  const size_t bytes = maps.size() * sizeof(CUtensorMap);
  const cudaError_t e = cudaMemcpyAsync(table->untyped_data(), maps.data(), bytes, cudaMemcpyHostToDevice, stream);
  return status(e == cudaSuccess ? cudaStreamSynchronize(stream) : e);  // the host's copy ends here
}

// To where the table says, in one launch. `pools` are A's and B's of each group, `groups` its matrices,
// d_out and d_in. Programs that read the results take the token, which is left as it is.
static ffi::Error MergedPlaced(cudaStream_t stream, ffi::Buffer<ffi::U8> table, S32 sites, F32 scaling, S32,
                               ffi::RemainingArgs pools, ffi::Result<S32>, ffi::Span<const int64_t> groups,
                               int64_t max_rank) {
  MergeArgs args[kMergeGroups];
  const size_t count = groups.size() / 3;
  if (count > kMergeGroups) return status(cudaErrorInvalidValue);
  for (size_t i = 0; i < count; ++i) {
    const auto a_pool = pools.get<BF16>(2 * i), b_pool = pools.get<BF16>(2 * i + 1);
    if (!a_pool) return a_pool.error();
    if (!b_pool) return b_pool.error();
    auto at = [](const BF16& b) { return static_cast<const __nv_bfloat16*>(b.untyped_data()); };
    auto size = [&](int n) { return static_cast<int>(groups[3 * i + n]); };
    args[i] = {nullptr, nullptr, at(*a_pool), at(*b_pool), sites.typed_data(), scaling.typed_data(), size(0), size(1),
               size(2), static_cast<int>(max_rank), static_cast<int>(b_pool->dimensions()[0])};
  }
  const auto* maps = static_cast<const CUtensorMap*>(table.untyped_data());
  return status(launch_merge_placed(maps, args, static_cast<int>(count), stream));
}

}  // namespace lora_jax

XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_merge, lora_jax::Merged,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<BF16>()
                                  .Arg<BF16>()
                                  .Arg<BF16>()
                                  .Arg<S32>()
                                  .Arg<F32>()
                                  .Ret<BF16>()
                                  .Attr<int64_t>("max_rank"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_merge_places, lora_jax::Places,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ret<ffi::Buffer<ffi::U8>>()
                                  .Attr<ffi::Span<const int64_t>>("addresses")
                                  .Attr<ffi::Span<const int64_t>>("shapes")
                                  .Attr<int64_t>("max_rank"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_merge_placed, lora_jax::MergedPlaced,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Arg<S32>()
                                  .Arg<F32>()
                                  .Arg<S32>()
                                  .RemainingArgs()
                                  .Ret<S32>()
                                  .Attr<ffi::Span<const int64_t>>("groups")
                                  .Attr<int64_t>("max_rank"),
                              {ffi::Traits::kCmdBufferCompatible});
