// XLA FFI entry points of the CPU kernels: unpack buffers, call the kernel, report errors.
#include "attention.h"
#include "buffers.h"
#include "heads.h"
#include "image_attention.h"
#include "reroute.h"
#include "row_calls.h"

namespace lora_jax {

// The pages are written where they are results, or else where they lie: XLA takes them for
// arguments that nobody changes, and whoever reads them takes the call's q.
template <class T, ffi::DataType dtype>
ffi::Error PlaceHeadsCall(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k,
                          ffi::AnyBuffer v, F32 cos, F32 sin, ffi::AnyBuffer k_pages,
                          ffi::AnyBuffer v_pages, S32 places, ffi::Result<ffi::AnyBuffer> out,
                          ffi::RemainingRets pages) {
  if (!all_of<dtype>(q, k, v, k_pages, v_pages, *out)) return WrongTypes("place_heads");
  void* to[2] = {k_pages.untyped_data(), v_pages.untyped_data()};
  const ffi::AnyBuffer* from[2] = {&k_pages, &v_pages};
  for (size_t i = 0; i < pages.size() && i < 2; ++i) {
    auto written = pages.get<ffi::AnyBuffer>(i);
    if (!written || !all_of<dtype>(**written)) return WrongTypes("place_heads");
    if ((*written)->untyped_data() != to[i])
      std::memcpy((*written)->untyped_data(), to[i], from[i]->size_bytes());
    to[i] = (*written)->untyped_data();
  }
  PlaceHeads<T> g{data<T>(q), data<T>(k), data<T>(v), cos.typed_data(), sin.typed_data(),
                  places.typed_data(), data<T>(out), static_cast<T*>(to[0]),
                  static_cast<T*>(to[1])};
  g.tokens = q.dimensions()[0], g.q_heads = q.dimensions()[1], g.k_dim = q.dimensions()[2];
  g.kv_heads = k.dimensions()[1], g.v_dim = v.dimensions()[2];
  g.page_rows = k_pages.dimensions()[0] * k_pages.dimensions()[1];
  run_place_heads(pool, g);
  return ffi::Error::Success();
}

template <class D, ffi::DataType dtype, class P, ffi::DataType p_dtype>
ffi::Error AttentionCall(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                         S32 block_tables, S32 token_to_seq, S32 positions, S32 num_tokens,
                         F32 sinks, ffi::Result<ffi::AnyBuffer> out, float scale, int64_t window) {
  using T = typename D::T;
  if (!all_of<dtype>(q, *out) || !all_of<p_dtype>(k, v)) return WrongTypes("paged_attention");
  int64_t all = q.dimensions()[0];
  Attention<T, P> g;
  g.q = data<T>(q), g.k = data<P>(k), g.v = data<P>(v), g.out = data<T>(out);
  g.block_tables = block_tables.typed_data(), g.token_to_seq = token_to_seq.typed_data();
  g.positions = positions.typed_data(), g.sinks = data<float>(sinks);
  g.tokens = std::clamp<int64_t>(num_tokens.typed_data()[0], 0, all);
  g.seqs = block_tables.dimensions()[0], g.max_pages = block_tables.dimensions()[1];
  g.pages = k.dimensions()[0], g.page_size = k.dimensions()[1], g.kv_heads = k.dimensions()[2];
  g.q_heads = q.dimensions()[1], g.k_dim = q.dimensions()[2], g.v_dim = out->dimensions()[2];
  g.window = window, g.scale = scale;
  if (run_attention<D>(pool, g, all)) return ffi::Error::Success();
  return ffi::Error::InvalidArgument(
      "paged_attention: a token's sequence or position lies outside the block tables");
}

// q, k and v are arrays of their own, or k and v are empty and q has all three side by side.
template <class D, ffi::DataType dtype>
ffi::Error ImageAttentionCall(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k,
                              ffi::AnyBuffer v, F32 cos, F32 sin, ffi::Buffer<ffi::PRED> valid,
                              S32 num_patches, ffi::Result<ffi::AnyBuffer> out, float scale,
                              int64_t images) {
  using T = typename D::T;
  if (!all_of<dtype>(q, k, v, *out)) return WrongTypes("image_attention");
  ImageAttention<T> g{data<T>(q), data<T>(k), data<T>(v), data<float>(cos), data<float>(sin)};
  g.valid = valid.typed_data(), g.out = data<T>(out), g.patches = valid.dimensions()[0];
  g.images = images, g.heads = out->dimensions()[1], g.dim = g.k_dim = out->dimensions()[2];
  if (images < 1 || g.patches % images)
    return ffi::Error::InvalidArgument("image_attention: patches of whole images");
  g.num_patches = num_patches.typed_data()[0], g.stride = g.heads * g.dim, g.scale = scale;
  if (!g.k) g.k = g.q + g.stride, g.v = g.k + g.stride, g.stride *= 3;
  run_image_attention<D>(pool, g);
  return ffi::Error::Success();
}

// Rows of `to`, which is written though XLA takes it for an argument that nobody changes; nothing to
// do where there are none.
ffi::Error WriteRows(const ffi::AnyBuffer& to, const ffi::AnyBuffer& rows, S32& places) {
  if (!rows.size_bytes()) return ffi::Error::Success();
  auto d = to.dimensions();
  int64_t tokens = places.dimensions()[0], bytes = int64_t(rows.size_bytes()) / tokens;
  if (d.size() != 4 || d[2] * d[3] * int64_t(ffi::ByteWidth(to.element_type())) != bytes)
    return ffi::Error::InvalidArgument("write_pages: rows and pages differ");
  char* base = static_cast<char*>(const_cast<void*>(static_cast<const void*>(to.untyped_data())));
  const char* from = static_cast<const char*>(rows.untyped_data());
  for (int64_t t = 0; t < tokens; ++t) {
    int64_t place = places.typed_data()[t];
    if (place >= 0 && place < d[0] * d[1]) std::memcpy(base + place * bytes, from + t * bytes, bytes);
  }
  return ffi::Error::Success();
}

// The pages are written in place; q goes through, so that whoever takes it runs after the writes.
ffi::Error WritePagesCall(ffi::AnyBuffer q, ffi::AnyBuffer k_pages, ffi::AnyBuffer k,
                          ffi::AnyBuffer v_pages, ffi::AnyBuffer v, S32 places,
                          ffi::Result<ffi::AnyBuffer> out) {
  if (auto error = WriteRows(k_pages, k, places); error.failure()) return error;
  if (auto error = WriteRows(v_pages, v, places); error.failure()) return error;
  if (out->untyped_data() != q.untyped_data())
    std::memcpy(out->untyped_data(), q.untyped_data(), q.size_bytes());
  return ffi::Error::Success();
}

ffi::Error RowMapCall(S32 ids, S32 num_tokens, ffi::Result<S32> order, ffi::Result<S32> inverse,
                      ffi::Result<S32> group_sizes) {
  int64_t k = ids.dimensions()[1];
  row_map(ids.typed_data(), int64_t(ids.element_count()), num_tokens.typed_data()[0] * k,
          int32_t(group_sizes->element_count()), order->typed_data(), inverse->typed_data(),
          group_sizes->typed_data());
  return ffi::Error::Success();
}

ffi::Error RerouteCall(S32 ids, S32 token_to_slot, S32 table, S32 num_tokens,
                       ffi::Result<S32> order, ffi::Result<S32> inverse,
                       ffi::Result<S32> group_sizes) {
  int64_t k = ids.dimensions()[1];
  auto d = table.dimensions();
  Reroute group_of{ids.typed_data(), token_to_slot.typed_data(), table.typed_data(), k,
                   int32_t(d[0]),    int32_t(d[1])};
  sort_rows(group_of, int64_t(ids.element_count()), num_tokens.typed_data()[0] * k,
            int32_t(group_sizes->element_count()), order->typed_data(), inverse->typed_data(),
            group_sizes->typed_data());
  return ffi::Error::Success();
}

}  // namespace lora_jax

#define LORA_JAX_RMS_NORM(name, T, dtype)                                               \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, (lora_jax::RmsNormCall<T, dtype>),                \
                                ffi::Ffi::Bind()                                        \
                                    .Ctx<ffi::ThreadPool>()                             \
                                    .Arg<ffi::AnyBuffer>()                              \
                                    .Arg<ffi::AnyBuffer>()                              \
                                    .Arg<ffi::AnyBuffer>()                              \
                                    .Arg<S32>()                                         \
                                    .Ret<ffi::AnyBuffer>()                              \
                                    .RemainingRets()                                    \
                                    .Attr<float>("eps"))
#define LORA_JAX_LAYER_NORM(name, T, dtype)                                             \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, (lora_jax::LayerNormCall<T, dtype>),              \
                                ffi::Ffi::Bind()                                        \
                                    .Ctx<ffi::ThreadPool>()                             \
                                    .Arg<ffi::AnyBuffer>()                              \
                                    .Arg<ffi::AnyBuffer>()                              \
                                    .Arg<ffi::AnyBuffer>()                              \
                                    .Ret<ffi::AnyBuffer>()                              \
                                    .Attr<float>("eps"))
#define LORA_JAX_IMAGE_ATTENTION(name, D, dtype)                                        \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, (lora_jax::ImageAttentionCall<lora_jax::D, dtype>), \
                                ffi::Ffi::Bind()                                        \
                                    .Ctx<ffi::ThreadPool>()                             \
                                    .Arg<ffi::AnyBuffer>()                              \
                                    .Arg<ffi::AnyBuffer>()                              \
                                    .Arg<ffi::AnyBuffer>()                              \
                                    .Arg<F32>()                                         \
                                    .Arg<F32>()                                         \
                                    .Arg<ffi::Buffer<ffi::PRED>>()                      \
                                    .Arg<S32>()                                         \
                                    .Ret<ffi::AnyBuffer>()                              \
                                    .Attr<float>("scale")                               \
                                    .Attr<int64_t>("images"))
#define LORA_JAX_SILU_TIMES(name, T, dtype)                                             \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, (lora_jax::SiluTimesCall<T, dtype>),              \
                                ffi::Ffi::Bind()                                        \
                                    .Ctx<ffi::ThreadPool>()                             \
                                    .Arg<ffi::AnyBuffer>()                              \
                                    .Arg<ffi::AnyBuffer>()                              \
                                    .Arg<S32>()                                         \
                                    .Ret<ffi::AnyBuffer>())
#define LORA_JAX_PLACE_HEADS(name, T, dtype)                                            \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, (lora_jax::PlaceHeadsCall<T, dtype>),             \
                                ffi::Ffi::Bind()                                        \
                                    .Ctx<ffi::ThreadPool>()                             \
                                    .Arg<ffi::AnyBuffer>()                              \
                                    .Arg<ffi::AnyBuffer>()                              \
                                    .Arg<ffi::AnyBuffer>()                              \
                                    .Arg<F32>()                                         \
                                    .Arg<F32>()                                         \
                                    .Arg<ffi::AnyBuffer>()                              \
                                    .Arg<ffi::AnyBuffer>()                              \
                                    .Arg<S32>()                                         \
                                    .Ret<ffi::AnyBuffer>()                              \
                                    .RemainingRets())
#define LORA_JAX_ATTENTION(name, D, dtype, P, p_dtype)                                  \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name,                                                   \
                                (lora_jax::AttentionCall<lora_jax::D, dtype, P, p_dtype>), \
                                ffi::Ffi::Bind()                                        \
                                    .Ctx<ffi::ThreadPool>()                             \
                                    .Arg<ffi::AnyBuffer>()                              \
                                    .Arg<ffi::AnyBuffer>()                              \
                                    .Arg<ffi::AnyBuffer>()                              \
                                    .Arg<S32>()                                         \
                                    .Arg<S32>()                                         \
                                    .Arg<S32>()                                         \
                                    .Arg<S32>()                                         \
                                    .Arg<F32>()                                         \
                                    .Ret<ffi::AnyBuffer>()                              \
                                    .Attr<float>("scale")                               \
                                    .Attr<int64_t>("window"))

LORA_JAX_RMS_NORM(lora_jax_rms_norm_float32, float, ffi::F32);
LORA_JAX_RMS_NORM(lora_jax_rms_norm_bfloat16, uint16_t, ffi::BF16);
LORA_JAX_LAYER_NORM(lora_jax_layer_norm_float32, float, ffi::F32);
LORA_JAX_LAYER_NORM(lora_jax_layer_norm_bfloat16, uint16_t, ffi::BF16);
LORA_JAX_IMAGE_ATTENTION(lora_jax_image_attention_float32, DotF32, ffi::F32);
LORA_JAX_IMAGE_ATTENTION(lora_jax_image_attention_bfloat16, DotBF16, ffi::BF16);
LORA_JAX_SILU_TIMES(lora_jax_silu_times_float32, float, ffi::F32);
LORA_JAX_SILU_TIMES(lora_jax_silu_times_bfloat16, uint16_t, ffi::BF16);
LORA_JAX_PLACE_HEADS(lora_jax_place_heads_float32, float, ffi::F32);
LORA_JAX_PLACE_HEADS(lora_jax_place_heads_bfloat16, uint16_t, ffi::BF16);
LORA_JAX_ATTENTION(lora_jax_attention_float32, DotF32, ffi::F32, float, ffi::F32);
LORA_JAX_ATTENTION(lora_jax_attention_bfloat16, DotBF16, ffi::BF16, uint16_t, ffi::BF16);
LORA_JAX_ATTENTION(lora_jax_attention_8_bits_float32, DotF32, ffi::F32, uint8_t, ffi::U8);
LORA_JAX_ATTENTION(lora_jax_attention_8_bits_bfloat16, DotBF16, ffi::BF16, uint8_t, ffi::U8);
XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_write_pages, lora_jax::WritePagesCall,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<S32>()
                                  .Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    lora_jax_row_map, lora_jax::RowMapCall,
    ffi::Ffi::Bind().Arg<S32>().Arg<S32>().Ret<S32>().Ret<S32>().Ret<S32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    lora_jax_reroute, lora_jax::RerouteCall,
    ffi::Ffi::Bind().Arg<S32>().Arg<S32>().Arg<S32>().Arg<S32>().Ret<S32>().Ret<S32>().Ret<S32>());
