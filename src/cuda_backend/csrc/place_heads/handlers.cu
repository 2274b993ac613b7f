// XLA FFI entry point of place_heads: one launch, fit for CUDA graphs.
#include "device/ffi_buffers.cuh"
#include "place_heads/place_heads.cuh"

namespace lora_jax {

// The pages are written whether they are results' memory or not.
static ffi::Error PlaceHeadsOn(cudaStream_t stream, BF16 q, BF16 k, BF16 v, F32 cos, F32 sin, BF16 q_scale,
                               BF16 k_scale, S32 token_to_place, BF16 k_pages, BF16 v_pages,
                               ffi::Result<BF16> turned, float eps) {
  const auto d = q.dimensions(), pages = k_pages.dimensions();
  const PlaceHeadsArgs args{data(q), data(k), data(v), cos.typed_data(), sin.typed_data(), data(q_scale),
                            data(k_scale), token_to_place.typed_data(), data(turned),
                            const_cast<__nv_bfloat16*>(data(k_pages)), const_cast<__nv_bfloat16*>(data(v_pages)),
                            static_cast<int>(d[0]), static_cast<int>(d[1]), static_cast<int>(k.dimensions()[1]),
                            pages[0] * pages[1], eps};
  return status(launch_place_heads(args, static_cast<int>(d[2]), stream));
}

// The pages are the results' memory too.
static ffi::Error PlaceHeads(cudaStream_t stream, BF16 q, BF16 k, BF16 v, F32 cos, F32 sin, BF16 q_scale,
                             BF16 k_scale, S32 token_to_place, BF16 k_pages, BF16 v_pages,
                             ffi::Result<BF16> turned, ffi::Result<BF16>, ffi::Result<BF16>, float eps) {
  return PlaceHeadsOn(stream, q, k, v, cos, sin, q_scale, k_scale, token_to_place, k_pages, v_pages, turned, eps);
}

}  // namespace lora_jax

XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_place_heads, lora_jax::PlaceHeads,
                              LORA_JAX_ON_STREAM.Arg<BF16>()
                                  .Arg<BF16>()
                                  .Arg<BF16>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<BF16>()
                                  .Arg<BF16>()
                                  .Arg<S32>()
                                  .Arg<BF16>()
                                  .Arg<BF16>()
                                  .Ret<BF16>()
                                  .Ret<BF16>()
                                  .Ret<BF16>()
                                  .Attr<float>("eps"),
                              {ffi::Traits::kCmdBufferCompatible});

// The pages stay the caller's: XLA takes them for arguments that nobody changes. Whatever reads them must
// take `turned`.
XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_place_heads_in_place, lora_jax::PlaceHeadsOn,
                              LORA_JAX_ON_STREAM.Arg<BF16>()
                                  .Arg<BF16>()
                                  .Arg<BF16>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<BF16>()
                                  .Arg<BF16>()
                                  .Arg<S32>()
                                  .Arg<BF16>()
                                  .Arg<BF16>()
                                  .Ret<BF16>()
                                  .Attr<float>("eps"),
                              {ffi::Traits::kCmdBufferCompatible});
