// XLA FFI entry points of grouped LoRA, and its rows without XLA.
#include "buffers.h"
#include "lora.h"

namespace lora_jax {

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

}  // namespace lora_jax

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
