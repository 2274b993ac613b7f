// XLA FFI entry point of attention between the patches of one image; fit for CUDA graphs.
#include "device/ffi_buffers.cuh"
#include "image_attention/image_attention.cuh"

namespace lora_jax {

static ffi::Error TurnedAttention(cudaStream_t stream, BF16 qkv, F32 cos, F32 sin, S32 num_patches,
                                  ffi::Result<BF16> out, ffi::Result<BF16> heads_out, float scale) {
  const auto d = qkv.dimensions(), laid = heads_out->dimensions();  // [patches, 3, heads, 72]
  const int patches = static_cast<int>(d[0]), heads = static_cast<int>(d[2]), blocks = static_cast<int>(laid[2]);
  if (d[3] != kHeadDim) return ffi::Error::InvalidArgument("heads of another width than 72");
  if (blocks != image_blocks(patches)) return ffi::Error::InvalidArgument("another number of blocks");
  auto* laid_out = reinterpret_cast<unsigned char*>(data(heads_out));
  const ImageHeadsArgs turn{data(qkv), cos.typed_data(), sin.typed_data(), num_patches.typed_data(), laid_out,
                            patches,   heads,            blocks};
  const ImageAttentionArgs args{laid_out, data(out), num_patches.typed_data(), patches, heads, blocks,
                                scale * 1.4426950408889634f};
  const cudaError_t e = launch_image_heads(turn, stream);
  return status(e == cudaSuccess ? launch_image_attention(args, stream) : e);
}

}  // namespace lora_jax

XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_turned_attention, lora_jax::TurnedAttention,
                              LORA_JAX_ON_STREAM.Arg<BF16>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<S32>()
                                  .Ret<BF16>()
                                  .Ret<BF16>()
                                  .Attr<float>("scale"),
                              {ffi::Traits::kCmdBufferCompatible});
