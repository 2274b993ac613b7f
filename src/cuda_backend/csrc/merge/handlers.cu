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

// From arrays of one matrix each to as many others, in few launches.
static ffi::Error MergedApart(cudaStream_t stream, BF16 a_pool, BF16 b_pool, S32 sites, F32 scaling,
                              ffi::RemainingArgs w, ffi::RemainingRets out, int64_t max_rank) {
  auto data = [](const BF16& b) { return static_cast<__nv_bfloat16*>(b.untyped_data()); };
  const auto first = w.get<BF16>(0);
  if (!first) return first.error();
  const auto d = first->dimensions();
  std::vector<const void*> from(w.size());
  std::vector<void*> to(w.size());
  for (size_t i = 0; i < w.size(); ++i) {
    const auto one = w.get<BF16>(i);
    const auto made = out.get<BF16>(i);
    if (!one) return one.error();
    if (!made) return made.error();
    from[i] = one->untyped_data(), to[i] = (*made)->untyped_data();
  }
  const MergeArgs args{nullptr, nullptr, data(a_pool), data(b_pool), sites.typed_data(), scaling.typed_data(),
                       static_cast<int>(w.size()), static_cast<int>(d[0]), static_cast<int>(d[1]),
                       static_cast<int>(max_rank), static_cast<int>(b_pool.dimensions()[0])};
  const cudaError_t e = launch_merge_apart(args, from.data(), to.data(), stream);
  return status(e);
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_merge_apart, lora_jax::MergedApart,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<BF16>()
                                  .Arg<BF16>()
                                  .Arg<S32>()
                                  .Arg<F32>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("max_rank"),
                              {ffi::Traits::kCmdBufferCompatible});
