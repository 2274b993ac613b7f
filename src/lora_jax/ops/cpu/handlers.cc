// XLA FFI entry points of the CPU kernels: unpack buffers, call the kernel, report errors.
#include <memory>

#include "attention.h"
#include "buffers.h"
#include "gemm.h"
#include "heads.h"
#include "image_attention.h"
#include "lora.h"
#include "reroute.h"
#include "row_calls.h"

namespace lora_jax {

// Weights of one product: plain ones, codes with scales and zeros, or values with scales.
enum Form : int64_t { kPlain, kCoded, kScaled };
constexpr int64_t kFacts = 3;  // of a product: its form, and the rows and columns of its blocks

template <class D, ffi::DataType dtype>
struct Product {
  Gemm<D> gemm;
  std::unique_ptr<DecodedRows<D>> decoded;

  ffi::Error plain(const ffi::AnyBuffer& w) {
    if (!all_of<dtype>(w)) return WrongTypes("grouped_matmul");
    set_sizes(w.dimensions(), 1), gemm.w = data<typename D::T>(w);
    return ffi::Error::Success();
  }
  ffi::Error coded(const ffi::AnyBuffer& codes, const ffi::AnyBuffer& scales,
                   const ffi::AnyBuffer& zeros, const float* table) {
    if (!all_of<ffi::U8>(codes, zeros)) return WrongTypes("coded_gemm");
    set_sizes(codes.dimensions(), 2);
    auto rows = std::make_unique<CodedRows<D>>(table);
    rows->codes = data<uint8_t>(codes), rows->zeros = data<uint8_t>(zeros);
    rows->scales = {scales.untyped_data(), scales.element_type() == ffi::BF16};
    rows->d_in = gemm.d_in, rows->span = gemm.d_in / scales.dimensions()[2];
    if (rows->span % kWords)
      return ffi::Error::InvalidArgument("coded_gemm: groups of 32, 64, ... weights");
    decoded = std::move(rows);
    return ffi::Error::Success();
  }
  ffi::Error scaled(const ffi::AnyBuffer& values, const ffi::AnyBuffer& scales,
                    int64_t block_rows, int64_t block_cols) {
    if (!all_of<ffi::F8E4M3FN>(values) || !all_of<ffi::F32>(scales))
      return ffi::Error::InvalidArgument("scaled_gemm: values of float8_e4m3fn");
    set_sizes(values.dimensions(), 1);
    if (gemm.d_in % kValueStep || (block_cols % kValueStep && block_cols < gemm.d_in))
      return ffi::Error::InvalidArgument("scaled_gemm: d_in and blocks in multiples of 16");
    auto rows = std::make_unique<ScaledRows<D>>(gemm.d_in, block_cols);
    rows->values = data<uint8_t>(values), rows->scales = data<float>(scales);
    rows->d_out = gemm.d_out, rows->block_rows = block_rows;
    decoded = std::move(rows);
    return ffi::Error::Success();
  }

 private:
  void set_sizes(ffi::Span<const int64_t> d, int64_t per_byte) {
    gemm.w = nullptr, gemm.groups = d[0], gemm.d_out = d[1], gemm.d_in = d[2] * per_byte;
  }
};

// Products of x and several weights, whose buffers and then a bias follow each other in `rest`. A
// table has 16 values for each.
template <class D, ffi::DataType dtype>
ffi::Error GemmCall(ffi::ThreadPool pool, ffi::AnyBuffer x, S32 group_sizes,
                    ffi::RemainingArgs rest, ffi::RemainingRets ys, ffi::Span<const int64_t> facts,
                    ffi::Span<const float> tables) {
  const size_t count = ys.size();
  if (!count || facts.size() != kFacts * count || tables.size() != 16 * count)
    return ffi::Error::InvalidArgument("grouped_matmul: 3 facts and a table of 16 for each result");
  std::vector<Product<D, dtype>> products(count);
  std::vector<Gemm<D>> gemms;
  Rest args(rest);
  for (size_t i = 0; i < count; ++i) {
    const int64_t* fact = facts.begin() + kFacts * i;
    std::optional<ffi::AnyBuffer> parts[3];
    for (int64_t part = 0; part < (fact[0] == kPlain ? 1 : fact[0] == kCoded ? 3 : 2); ++part)
      if (!(parts[part] = args.next()))
        return ffi::Error::InvalidArgument("grouped_matmul: weights are missing");
    auto bias = args.next();
    auto y = ys.get<ffi::AnyBuffer>(i);
    if (!bias || !y) return ffi::Error::InvalidArgument("grouped_matmul: a bias is missing");
    if (!all_of<dtype>(x, *bias, **y)) return WrongTypes("grouped_matmul");
    Product<D, dtype>& product = products[i];
    ffi::Error error = fact[0] == kPlain ? product.plain(*parts[0])
                       : fact[0] == kCoded
                           ? product.coded(*parts[0], *parts[1], *parts[2], tables.begin() + 16 * i)
                           : product.scaled(*parts[0], *parts[1], fact[1], fact[2]);
    if (error.failure()) return error;
    Gemm<D>& g = product.gemm;
    g.decoded = product.decoded.get(), g.x = data<typename D::T>(x);
    g.bias = data<typename D::T>(*bias), g.group_sizes = group_sizes.typed_data();
    g.y = data<typename D::T>(*y), g.rows = x.dimensions()[0];
    gemms.push_back(g);
  }
  run_gemms<D>(pool, gemms);
  return ffi::Error::Success();
}

// Adds to every y, of the rest arguments, the adapters at its site of the table.
template <class D, ffi::DataType dtype, class Y, ffi::DataType y_dtype, class R,
          ffi::DataType r_dtype>
ffi::Error LoraCall(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer a_pool,
                    ffi::AnyBuffer b_pool, S32 entries, F32 scaling, S32 row_to_slot,
                    S32 row_to_expert, ffi::RemainingArgs rest, ffi::RemainingRets outs,
                    int64_t max_rank, ffi::Span<const int64_t> sites) {
  using T = typename D::T;
  if (!all_of<dtype>(x) || !all_of<r_dtype>(a_pool, b_pool)) return WrongTypes("lora_gemm");
  if (outs.size() != sites.size())
    return ffi::Error::InvalidArgument("lora_gemm: a site for each result");
  const int64_t slots = scaling.dimensions().back();
  std::vector<Lora<T, Y, R>> all;
  for (size_t i = 0; i < sites.size(); ++i) {
    auto y = rest.get<ffi::AnyBuffer>(i);
    auto out = outs.get<ffi::AnyBuffer>(i);
    if (!y || !out) return ffi::Error::InvalidArgument("lora_gemm: a y is missing");
    if (!all_of<y_dtype>(*y, **out)) return WrongTypes("lora_gemm");
    if ((*out)->untyped_data() != y->untyped_data())
      std::memcpy((*out)->untyped_data(), y->untyped_data(), y->size_bytes());
    all.push_back({data<T>(x), data<R>(a_pool), data<R>(b_pool),
                   entries.typed_data() + sites[i] * slots * 5, row_to_slot.typed_data(),
                   row_to_expert.typed_data(), scaling.typed_data() + sites[i] * slots,
                   data<Y>(*out), int64_t(x.dimensions()[0]), x.dimensions()[1],
                   y->dimensions()[1], a_pool.dimensions()[0], b_pool.dimensions()[0], slots,
                   max_rank});
  }
  if (run_loras<D, Y, R>(pool, all)) return ffi::Error::Success();
  return ffi::Error::InvalidArgument("lora_gemm: a slot's rows lie outside the pools");
}

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

#define LORA_JAX_GEMM(name, D, dtype)                                                   \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, (lora_jax::GemmCall<lora_jax::D, dtype>),         \
                                ffi::Ffi::Bind()                                        \
                                    .Ctx<ffi::ThreadPool>()                             \
                                    .Arg<ffi::AnyBuffer>()                              \
                                    .Arg<S32>()                                         \
                                    .RemainingArgs()                                    \
                                    .RemainingRets()                                    \
                                    .Attr<ffi::Span<const int64_t>>("facts")            \
                                    .Attr<ffi::Span<const float>>("tables"))
#define LORA_JAX_LORA(name, D, dtype, Y, y_dtype, R, r_dtype)                           \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name,                                                   \
                                (lora_jax::LoraCall<lora_jax::D, dtype, Y, y_dtype, R, r_dtype>), \
                                ffi::Ffi::Bind()                                        \
                                    .Ctx<ffi::ThreadPool>()                             \
                                    .Arg<ffi::AnyBuffer>()                              \
                                    .Arg<ffi::AnyBuffer>()                              \
                                    .Arg<ffi::AnyBuffer>()                              \
                                    .Arg<S32>()                                         \
                                    .Arg<F32>()                                         \
                                    .Arg<S32>()                                         \
                                    .Arg<S32>()                                         \
                                    .RemainingArgs()                                    \
                                    .RemainingRets()                                    \
                                    .Attr<int64_t>("max_rank")                          \
                                    .Attr<ffi::Span<const int64_t>>("sites"))
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

LORA_JAX_GEMM(lora_jax_gemm_float32, DotF32, ffi::F32);
LORA_JAX_GEMM(lora_jax_gemm_bfloat16, DotBF16, ffi::BF16);
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
LORA_JAX_LORA(lora_jax_lora_float32, DotF32, ffi::F32, float, ffi::F32, float, ffi::F32);
LORA_JAX_LORA(lora_jax_lora_bfloat16, DotBF16, ffi::BF16, uint16_t, ffi::BF16, uint16_t,
              ffi::BF16);
LORA_JAX_LORA(lora_jax_lora_bfloat16_to_float32, DotBF16, ffi::BF16, float, ffi::F32, uint16_t,
              ffi::BF16);
LORA_JAX_LORA(lora_jax_lora_int8_float32, DotF32, ffi::F32, float, ffi::F32, int8_t, ffi::S8);
LORA_JAX_LORA(lora_jax_lora_int8_bfloat16, DotBF16, ffi::BF16, uint16_t, ffi::BF16, int8_t,
              ffi::S8);
LORA_JAX_LORA(lora_jax_lora_int8_bfloat16_to_float32, DotBF16, ffi::BF16, float, ffi::F32, int8_t,
              ffi::S8);
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

// Called without XLA, by processes that hold one adapter: the same rows as LoraCall, of one slot and
// on this thread. `y` [rows, d_out] is zero. False if the entry points outside its matrices.
extern "C" int32_t lora_jax_lora_rows(int32_t is_bfloat16, const void* x, const void* a,
                                      const void* b, const int32_t* entry, float scaling,
                                      const int32_t* slots, const int32_t* experts, float* y,
                                      const int64_t* sizes) {
  using namespace lora_jax;
  const auto run = [&](auto dot) {
    using D = decltype(dot);
    using T = typename D::T;
    Lora<T, float> g{static_cast<const T*>(x), static_cast<const T*>(a), static_cast<const T*>(b),
                     entry, slots, experts, &scaling, y, sizes[0], sizes[1], sizes[2], sizes[3],
                     sizes[4], 1, entry[2]};
    std::vector<int32_t> rows = adapter_rows(g);
    std::vector<LoraItem> items;
    double micros = 0;
    if (!lora_items(g, 0, rows, &items, &micros)) return 0;
    for (const LoraItem& item : items) run_lora_item<D>(g, item);
    return 1;
  };
  return is_bfloat16 ? run(DotBF16{}) : run(DotF32{});
}
