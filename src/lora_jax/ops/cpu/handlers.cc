// XLA FFI entry points of the CPU kernels: unpack buffers, call the kernel, report errors.
#include "attention.h"
#include "gemm.h"
#include "lora.h"
#include "reroute.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using S32 = ffi::Buffer<ffi::S32>;
using F32 = ffi::Buffer<ffi::F32>;
using U8 = ffi::Buffer<ffi::U8>;

namespace lora_jax {

template <class T, ffi::DataType dtype>
const T* data(const ffi::Buffer<dtype>& b) {
  return b.element_count() ? static_cast<const T*>(b.untyped_data()) : nullptr;
}
template <class T>
const T* data(const ffi::AnyBuffer& b) {
  return b.element_count() ? static_cast<const T*>(b.untyped_data()) : nullptr;
}
template <class T>
T* data(ffi::Result<ffi::AnyBuffer>& b) {
  return static_cast<T*>(b->untyped_data());
}

// Calls of one op for several types take buffers of any type: XLA's code that unpacks arguments is
// then compiled once for all of them, a third less to compile. The calls check the types.
template <ffi::DataType dtype, class... Buffers>
bool all_of(const Buffers&... buffers) {
  return ((buffers.element_type() == dtype) && ...);
}
inline ffi::Error WrongTypes(const char* op) {
  return ffi::Error::InvalidArgument(std::string(op) + ": a buffer has another type than the call");
}

template <class D, ffi::DataType dtype>
ffi::Error RunGemm(ffi::ThreadPool& pool, const typename D::T* w,
                   const DecodedRows<D>* decoded, int64_t groups, int64_t d_out,
                   int64_t d_in, ffi::AnyBuffer& x, S32& group_sizes, ffi::AnyBuffer& bias,
                   ffi::Result<ffi::AnyBuffer>& y) {
  using T = typename D::T;
  if (!all_of<dtype>(x, bias, *y)) return WrongTypes("grouped_matmul");
  run_gemm<D>(pool, {w, decoded, data<T>(x), data<T>(bias), group_sizes.typed_data(), data<T>(y),
                     int64_t(x.dimensions()[0]), groups, d_out, d_in});
  return ffi::Error::Success();
}

template <class D, ffi::DataType dtype>
ffi::Error GemmCall(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, S32 group_sizes,
                    ffi::AnyBuffer bias, ffi::Result<ffi::AnyBuffer> y) {
  auto d = w.dimensions();
  if (!all_of<dtype>(w)) return WrongTypes("grouped_matmul");
  return RunGemm<D, dtype>(pool, data<typename D::T>(w), nullptr, d[0], d[1], d[2], x, group_sizes,
                           bias, y);
}

template <class D, ffi::DataType dtype>
ffi::Error CodedGemmCall(ffi::ThreadPool pool, ffi::AnyBuffer x, U8 codes,
                         ffi::AnyBuffer scales, U8 zeros, S32 group_sizes, ffi::AnyBuffer bias,
                         ffi::Result<ffi::AnyBuffer> y, ffi::Span<const float> table) {
  auto d = codes.dimensions();
  if (table.size() != 16) return ffi::Error::InvalidArgument("coded_gemm: a table of 16");
  CodedRows<D> rows(table.begin());
  rows.codes = data<uint8_t>(codes), rows.zeros = data<uint8_t>(zeros);
  rows.scales = {scales.untyped_data(), scales.element_type() == ffi::BF16};
  rows.d_in = 2 * d[2];
  rows.span = rows.d_in / scales.dimensions()[2];
  if (rows.span % kWords)
    return ffi::Error::InvalidArgument("coded_gemm: groups of 32, 64, ... weights");
  return RunGemm<D, dtype>(pool, nullptr, &rows, d[0], d[1], rows.d_in, x, group_sizes, bias, y);
}

template <class D, ffi::DataType dtype>
ffi::Error ScaledGemmCall(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer values, F32 scales,
                          S32 group_sizes, ffi::AnyBuffer bias, ffi::Result<ffi::AnyBuffer> y,
                          int64_t block_rows, int64_t block_cols) {
  auto d = values.dimensions();
  if (values.element_type() != ffi::F8E4M3FN)
    return ffi::Error::InvalidArgument("scaled_gemm: values of float8_e4m3fn");
  if (d[2] % kValueStep || (block_cols % kValueStep && block_cols < d[2]))
    return ffi::Error::InvalidArgument("scaled_gemm: d_in and blocks in multiples of 16");
  ScaledRows<D> rows(d[2], block_cols);
  rows.values = static_cast<const uint8_t*>(values.untyped_data());
  rows.scales = data<float>(scales), rows.d_out = d[1], rows.block_rows = block_rows;
  return RunGemm<D, dtype>(pool, nullptr, &rows, d[0], d[1], d[2], x, group_sizes, bias, y);
}

template <class D, ffi::DataType dtype, class Y, ffi::DataType y_dtype, class R,
          ffi::DataType r_dtype>
ffi::Error LoraCall(ffi::ThreadPool pool, ffi::AnyBuffer y, ffi::AnyBuffer x, ffi::AnyBuffer a_pool,
                    ffi::AnyBuffer b_pool, S32 entries, F32 scaling, S32 row_to_slot,
                    S32 row_to_expert, ffi::Result<ffi::AnyBuffer> out, int64_t max_rank) {
  using T = typename D::T;
  if (!all_of<dtype>(x) || !all_of<y_dtype>(y, *out) || !all_of<r_dtype>(a_pool, b_pool))
    return WrongTypes("lora_gemm");
  if (out->untyped_data() != y.untyped_data())
    std::memcpy(out->untyped_data(), y.untyped_data(), y.size_bytes());
  bool fits = run_lora<D, Y, R>(
      pool, {data<T>(x), data<R>(a_pool), data<R>(b_pool), entries.typed_data(),
             row_to_slot.typed_data(), row_to_expert.typed_data(), scaling.typed_data(),
             data<Y>(out), int64_t(x.dimensions()[0]), x.dimensions()[1], y.dimensions()[1],
             a_pool.dimensions()[0], b_pool.dimensions()[0], entries.dimensions()[0], max_rank});
  if (!fits) return ffi::Error::InvalidArgument("lora_gemm: a slot's rows lie outside the pools");
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
                                    .Arg<ffi::AnyBuffer>()                              \
                                    .Arg<S32>()                                         \
                                    .Arg<ffi::AnyBuffer>()                              \
                                    .Ret<ffi::AnyBuffer>())
#define LORA_JAX_CODED_GEMM(name, D, dtype)                                             \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, (lora_jax::CodedGemmCall<lora_jax::D, dtype>),    \
                                ffi::Ffi::Bind()                                        \
                                    .Ctx<ffi::ThreadPool>()                             \
                                    .Arg<ffi::AnyBuffer>()                              \
                                    .Arg<U8>()                                          \
                                    .Arg<ffi::AnyBuffer>()                              \
                                    .Arg<U8>()                                          \
                                    .Arg<S32>()                                         \
                                    .Arg<ffi::AnyBuffer>()                              \
                                    .Ret<ffi::AnyBuffer>()                              \
                                    .Attr<ffi::Span<const float>>("table"))
#define LORA_JAX_SCALED_GEMM(name, D, dtype)                                            \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, (lora_jax::ScaledGemmCall<lora_jax::D, dtype>),   \
                                ffi::Ffi::Bind()                                        \
                                    .Ctx<ffi::ThreadPool>()                             \
                                    .Arg<ffi::AnyBuffer>()                              \
                                    .Arg<ffi::AnyBuffer>()                              \
                                    .Arg<F32>()                                         \
                                    .Arg<S32>()                                         \
                                    .Arg<ffi::AnyBuffer>()                              \
                                    .Ret<ffi::AnyBuffer>()                              \
                                    .Attr<int64_t>("block_rows")                        \
                                    .Attr<int64_t>("block_cols"))
#define LORA_JAX_LORA(name, D, dtype, Y, y_dtype, R, r_dtype)                           \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name,                                                   \
                                (lora_jax::LoraCall<lora_jax::D, dtype, Y, y_dtype, R, r_dtype>), \
                                ffi::Ffi::Bind()                                        \
                                    .Ctx<ffi::ThreadPool>()                             \
                                    .Arg<ffi::AnyBuffer>()                              \
                                    .Arg<ffi::AnyBuffer>()                              \
                                    .Arg<ffi::AnyBuffer>()                              \
                                    .Arg<ffi::AnyBuffer>()                              \
                                    .Arg<S32>()                                         \
                                    .Arg<F32>()                                         \
                                    .Arg<S32>()                                         \
                                    .Arg<S32>()                                         \
                                    .Ret<ffi::AnyBuffer>()                              \
                                    .Attr<int64_t>("max_rank"))
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
LORA_JAX_CODED_GEMM(lora_jax_coded_gemm_float32, DotF32, ffi::F32);
LORA_JAX_CODED_GEMM(lora_jax_coded_gemm_bfloat16, DotBF16, ffi::BF16);
LORA_JAX_SCALED_GEMM(lora_jax_scaled_gemm_float32, DotF32, ffi::F32);
LORA_JAX_SCALED_GEMM(lora_jax_scaled_gemm_bfloat16, DotBF16, ffi::BF16);
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
    double micros;
    if (!lora_items(g, rows, &items, &micros)) return 0;
    for (const LoraItem& item : items) run_lora_item<D>(g, item);
    return 1;
  };
  return is_bfloat16 ? run(DotBF16{}) : run(DotF32{});
}
