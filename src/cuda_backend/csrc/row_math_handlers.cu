// XLA FFI entry points of what a layer computes row by row: one launch each, fit for CUDA graphs.
#include "choose_experts.cuh"
#include "place_heads.cuh"
#include "rms_norm.cuh"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using S32 = ffi::Buffer<ffi::S32>;
using F32 = ffi::Buffer<ffi::F32>;
using BF16 = ffi::Buffer<ffi::BF16>;

namespace lora_jax {

static ffi::Error status(cudaError_t e) {
  return e == cudaSuccess ? ffi::Error::Success() : ffi::Error::Internal(cudaGetErrorString(e));
}
// Of no elements: none.
static const __nv_bfloat16* data(const BF16& b) {
  return b.element_count() ? static_cast<const __nv_bfloat16*>(b.untyped_data()) : nullptr;
}
static __nv_bfloat16* data(ffi::Result<BF16>& b) {
  return b->element_count() ? static_cast<__nv_bfloat16*>(b->untyped_data()) : nullptr;
}

static ffi::Error RmsNorm(cudaStream_t stream, BF16 x, BF16 addend, BF16 weight, ffi::Result<BF16> sum,
                          ffi::Result<BF16> y, float eps) {
  const auto d = x.dimensions();
  const RmsNormArgs args{data(x), data(addend), data(weight), data(sum), data(y),
                         static_cast<int>(d[0]), static_cast<int>(d[1]), eps};
  return status(launch_rms_norm(args, stream));
}

static ffi::Error ChooseExperts(cudaStream_t stream, F32 logits, ffi::Result<F32> weights, ffi::Result<S32> ids,
                                bool softmax_first, bool normed, float scale) {
  const auto d = logits.dimensions();
  const ChooseExpertsArgs args{logits.typed_data(), weights->typed_data(), ids->typed_data(),
                               static_cast<int>(d[0]), static_cast<int>(d[1]),
                               static_cast<int>(ids->dimensions()[1]), softmax_first, normed, scale};
  return status(launch_choose_experts(args, stream));
}

// The pages are the results' memory too.
static ffi::Error PlaceHeads(cudaStream_t stream, BF16 q, BF16 k, BF16 v, F32 cos, F32 sin, BF16 q_scale,
                             BF16 k_scale, S32 token_to_place, BF16, BF16, ffi::Result<BF16> turned,
                             ffi::Result<BF16> k_pages, ffi::Result<BF16> v_pages, float eps) {
  const auto d = q.dimensions(), pages = k_pages->dimensions();
  const PlaceHeadsArgs args{data(q), data(k), data(v), cos.typed_data(), sin.typed_data(), data(q_scale),
                            data(k_scale), token_to_place.typed_data(), data(turned), data(k_pages), data(v_pages),
                            static_cast<int>(d[0]), static_cast<int>(d[1]), static_cast<int>(k.dimensions()[1]),
                            pages[0] * pages[1], eps};
  return status(launch_place_heads(args, static_cast<int>(d[2]), stream));
}

}  // namespace lora_jax

#define LORA_JAX_ON_STREAM ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>()

XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_rms_norm, lora_jax::RmsNorm,
                              LORA_JAX_ON_STREAM.Arg<BF16>()
                                  .Arg<BF16>()
                                  .Arg<BF16>()
                                  .Ret<BF16>()
                                  .Ret<BF16>()
                                  .Attr<float>("eps"),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_choose_experts, lora_jax::ChooseExperts,
                              LORA_JAX_ON_STREAM.Arg<F32>()
                                  .Ret<F32>()
                                  .Ret<S32>()
                                  .Attr<bool>("softmax_first")
                                  .Attr<bool>("normed")
                                  .Attr<float>("scale"),
                              {ffi::Traits::kCmdBufferCompatible});
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
