// XLA FFI entry points of paged attention: the list of units, once a step, and the attention of a
// layer. They only enqueue work of a fixed shape, so XLA may put them into CUDA graphs.
#include "device/ffi_buffers.cuh"
#include "paged_attention/plain.cuh"

using U8 = ffi::Buffer<ffi::U8>;

namespace lora_jax {

static ffi::Error Units(cudaStream_t stream, S32 token_to_seq, S32 positions, S32 num_tokens,
                        ffi::Result<S32> units, ffi::Result<S32> part_tokens, ffi::Result<S32> num_units,
                        int64_t unit_tokens, int64_t many_tokens, int64_t chunk, int64_t window) {
  const AttentionUnitsArgs args{token_to_seq.typed_data(),
                                positions.typed_data(),
                                num_tokens.typed_data(),
                                static_cast<int>(positions.element_count()),
                                static_cast<int>(unit_tokens),
                                static_cast<int>(many_tokens),
                                static_cast<int>(chunk),
                                static_cast<int>(window),
                                static_cast<int>(part_tokens->dimensions()[0]),
                                reinterpret_cast<AttentionUnit*>(units->typed_data()),
                                reinterpret_cast<int2*>(part_tokens->typed_data()),
                                num_units->typed_data()};
  return status(launch_attention_units(args, stream));
}

// What both kinds of attention are told, of buffers of bfloat16 or of any type.
template <class Q, class Pages, class Out>
static AttentionArgs common_args(const Q& q, const Pages& k_pages, S32 block_tables, S32 num_tokens, F32 sinks,
                                 S32 units, S32 part_tokens, S32 num_units, Out& out, ffi::Result<F32>& part_o,
                                 ffi::Result<F32>& part_ml, float scale, int64_t chunk, int64_t window) {
  const auto qd = q.dimensions(), kd = k_pages.dimensions(), parts = part_ml->dimensions();
  AttentionArgs args{};
  args.q = static_cast<const __nv_bfloat16*>(q.untyped_data()), args.block_tables = block_tables.typed_data();
  args.num_tokens = num_tokens.typed_data(), args.sinks = sinks.element_count() ? sinks.typed_data() : nullptr;
  args.units = reinterpret_cast<const AttentionUnit*>(units.typed_data());
  args.part_tokens = reinterpret_cast<const int2*>(part_tokens.typed_data()), args.num_units = num_units.typed_data();
  args.out = static_cast<__nv_bfloat16*>(out->untyped_data()), args.part_o = part_o->typed_data();
  args.part_ml = reinterpret_cast<float2*>(part_ml->typed_data());
  args.tokens = static_cast<int>(qd[0]), args.q_heads = static_cast<int>(qd[1]), args.k_dim = static_cast<int>(qd[2]);
  args.kv_heads = static_cast<int>(kd[2]), args.page_size = static_cast<int>(kd[1]);
  args.v_dim = static_cast<int>(out->dimensions()[2]);
  args.max_pages = static_cast<int>(block_tables.dimensions()[1]);
  args.chunk = static_cast<int>(chunk), args.window = static_cast<int>(window);
  args.part_rows = static_cast<int>(parts[0]), args.max_chunks = static_cast<int>(parts[1]);
  args.scale_log2 = scale * 1.4426950408889634f;
  return args;
}

// `v_pages` and `sinks` of no elements mean that there are none. With `many` there are units of many
// neighbours, too.
static ffi::Error Attention(cudaStream_t stream, BF16 q, BF16 k_pages, BF16 v_pages, S32 block_tables, S32 num_tokens,
                            F32 sinks, S32 units, S32 part_tokens, S32 num_units, ffi::Result<BF16> out,
                            ffi::Result<F32> part_o, ffi::Result<F32> part_ml, float scale, int64_t chunk,
                            int64_t window, int64_t cta_heads, int64_t token_groups, int64_t many) {
  AttentionArgs args = common_args(q, k_pages, block_tables, num_tokens, sinks, units, part_tokens, num_units, out,
                                   part_o, part_ml, scale, chunk, window);
  args.cta_heads = static_cast<int>(cta_heads), args.token_groups = static_cast<int>(token_groups);
  const void* values = v_pages.element_count() ? v_pages.untyped_data() : nullptr;
  return status(launch_paged(args, k_pages.untyped_data(), values, k_pages.dimensions()[0], many != 0, stream));
}

// The same of pages in 8 bits.
static ffi::Error CodedAttention(cudaStream_t stream, BF16 q, U8 k_pages, U8 v_pages, S32 block_tables, S32 num_tokens,
                                 F32 sinks, S32 units, S32 part_tokens, S32 num_units, ffi::Result<BF16> out,
                                 ffi::Result<F32> part_o, ffi::Result<F32> part_ml, float scale, int64_t chunk,
                                 int64_t window, int64_t cta_heads, int64_t token_groups) {
  const bool latent = v_pages.element_count() == 0;
  AttentionArgs args = common_args(q, k_pages, block_tables, num_tokens, sinks, units, part_tokens, num_units, out,
                                   part_o, part_ml, scale, chunk, window);
  args.cta_heads = static_cast<int>(cta_heads), args.token_groups = static_cast<int>(token_groups);
  args.k_rows = k_pages.typed_data(), args.v_rows = latent ? nullptr : v_pages.typed_data();
  const cudaError_t e = launch_attention(args, latent, stream);
  return status(e == cudaSuccess ? launch_combine<__nv_bfloat16>(args, stream) : e);
}

// The same of float32 or bfloat16, by the plain kernel; `rows` of a unit.
static ffi::Error PlainAttention(cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer k_pages, ffi::AnyBuffer v_pages,
                                 S32 block_tables, S32 num_tokens, F32 sinks, S32 units, S32 part_tokens,
                                 S32 num_units, ffi::Result<ffi::AnyBuffer> out, ffi::Result<F32> part_o,
                                 ffi::Result<F32> part_ml, float scale, int64_t chunk, int64_t window, int64_t rows) {
  PlainArgs args{};
  args.p = common_args(q, k_pages, block_tables, num_tokens, sinks, units, part_tokens, num_units, out, part_o,
                       part_ml, scale, chunk, window);
  args.k_pages = k_pages.untyped_data(), args.v_pages = v_pages.element_count() ? v_pages.untyped_data() : nullptr;
  const bool wide = q.element_type() == ffi::F32;
  return status(wide ? launch_plain_attention<float>(args, static_cast<int>(rows), stream)
                     : launch_plain_attention<__nv_bfloat16>(args, static_cast<int>(rows), stream));
}

}  // namespace lora_jax

XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_attention_units, lora_jax::Units,
                              LORA_JAX_ON_STREAM.Arg<S32>()
                                  .Arg<S32>()
                                  .Arg<S32>()
                                  .Ret<S32>()
                                  .Ret<S32>()
                                  .Ret<S32>()
                                  .Attr<int64_t>("unit_tokens")
                                  .Attr<int64_t>("many_tokens")
                                  .Attr<int64_t>("chunk")
                                  .Attr<int64_t>("window"),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_paged_attention, lora_jax::Attention,
                              LORA_JAX_ON_STREAM.Arg<BF16>()
                                  .Arg<BF16>()
                                  .Arg<BF16>()
                                  .Arg<S32>()
                                  .Arg<S32>()
                                  .Arg<F32>()
                                  .Arg<S32>()
                                  .Arg<S32>()
                                  .Arg<S32>()
                                  .Ret<BF16>()
                                  .Ret<F32>()
                                  .Ret<F32>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("chunk")
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("cta_heads")
                                  .Attr<int64_t>("token_groups")
                                  .Attr<int64_t>("many"),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_coded_attention, lora_jax::CodedAttention,
                              LORA_JAX_ON_STREAM.Arg<BF16>()
                                  .Arg<U8>()
                                  .Arg<U8>()
                                  .Arg<S32>()
                                  .Arg<S32>()
                                  .Arg<F32>()
                                  .Arg<S32>()
                                  .Arg<S32>()
                                  .Arg<S32>()
                                  .Ret<BF16>()
                                  .Ret<F32>()
                                  .Ret<F32>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("chunk")
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("cta_heads")
                                  .Attr<int64_t>("token_groups"),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_plain_attention, lora_jax::PlainAttention,
                              LORA_JAX_ON_STREAM.Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<S32>()
                                  .Arg<S32>()
                                  .Arg<F32>()
                                  .Arg<S32>()
                                  .Arg<S32>()
                                  .Arg<S32>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<F32>()
                                  .Ret<F32>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("chunk")
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("rows"),
                              {ffi::Traits::kCmdBufferCompatible});
