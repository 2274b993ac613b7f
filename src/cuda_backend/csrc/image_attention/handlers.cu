// XLA FFI entry point of attention between the patches of one image; fit for CUDA graphs.
#include "image_attention/image_attention.cuh"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using S32 = ffi::Buffer<ffi::S32>;
using BF16 = ffi::Buffer<ffi::BF16>;

namespace lora_jax {

static ffi::Error ImageAttention(cudaStream_t stream, BF16 q, BF16 k, BF16 v, S32 num_patches, ffi::Result<BF16> out,
                                 float scale) {
  const auto d = q.dimensions();
  if (d[2] != kHeadDim) return ffi::Error::InvalidArgument("heads of another width than 72");
  ImageAttentionArgs args{};
  args.out = static_cast<__nv_bfloat16*>(out->untyped_data()), args.num_patches = num_patches.typed_data();
  args.patches = static_cast<int>(d[0]), args.heads = static_cast<int>(d[1]);
  args.scale_log2 = scale * 1.4426950408889634f;
  const cudaError_t e =
      launch_image_attention(args, q.untyped_data(), k.untyped_data(), v.untyped_data(), stream);
  return e == cudaSuccess ? ffi::Error::Success() : ffi::Error::Internal(cudaGetErrorString(e));
}

}  // namespace lora_jax

XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_image_attention, lora_jax::ImageAttention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<BF16>()
                                  .Arg<BF16>()
                                  .Arg<BF16>()
                                  .Arg<S32>()
                                  .Ret<BF16>()
                                  .Attr<float>("scale"),
                              {ffi::Traits::kCmdBufferCompatible});
