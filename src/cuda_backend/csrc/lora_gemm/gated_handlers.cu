// XLA FFI entry point of an MLP's two products with their adapters, multiplied: one launch, fit for CUDA graphs.
#include "device/ffi_buffers.cuh"
#include "lora_gemm/call_states.cuh"
#include "lora_gemm/decode_gated.cuh"

namespace lora_jax {

// Tables are of all sites, [sites, slots, 5] and [sites, slots]; `sites` names gate's and up's. `h` is scratch.
static ffi::Error LoraGated(cudaStream_t stream, CallStateOwner* owner, BF16 x, BF16 a_pool, BF16 b_pool, S32 order,
                            S32 items, S32 num_items, BF16 gate, BF16 up, S32 entries, F32 scaling, S32 num_rows,
                            ffi::Result<BF16> h, ffi::Result<BF16> y, ffi::Span<const int64_t> sites, int64_t max_rank) {
  if (sites.size() != 2) return ffi::Error::InvalidArgument("lora_gated: a site of gate and one of up");
  GatedArgs args{};
  PairArgs& p = args.pair;
  p.items = reinterpret_cast<const Item*>(items.typed_data()), p.num_items = num_items.typed_data();
  p.row_order = order.typed_data(), p.num_rows = static_cast<int>(order.element_count());
  p.max_rank = static_cast<int>(max_rank), p.h_stride = (p.max_rank + 7) / 8 * 8;
  if (p.num_rows > kFewRows || p.max_rank > 64) return ffi::Error::InvalidArgument("lora_gated: too many rows or ranks");
  p.x = data(x), p.pools[0] = data(a_pool), p.pools[1] = data(b_pool), p.h = data(h);
  p.d_in = static_cast<int>(a_pool.dimensions()[1]), p.d_out = static_cast<int>(b_pool.dimensions()[1]);
  const int64_t slots = scaling.dimensions().back();
  const BF16* products[] = {&gate, &up};
  p.num_modules = 2, p.num_slots = static_cast<int>(slots);
  for (int m = 0; m < 2; ++m)
    p.modules[m] = Module{entries.typed_data() + sites[m] * slots * 5, scaling.typed_data() + sites[m] * slots,
                          const_cast<__nv_bfloat16*>(data(*products[m]))};
  p.shrink = p.expand = p.accumulate = p.small_items = true;
  args.y = data(y), args.num_rows = num_rows.typed_data();
  const cudaError_t e = owner->find(&p.state);
  return status(e == cudaSuccess ? launch_gated(args, stream) : e);
}

}  // namespace lora_jax

XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_lora_gated, lora_jax::LoraGated,
                              LORA_JAX_ON_STREAM.Ctx<ffi::State<lora_jax::CallStateOwner>>()
                                  .Arg<BF16>()
                                  .Arg<BF16>()
                                  .Arg<BF16>()
                                  .Arg<S32>()
                                  .Arg<S32>()
                                  .Arg<S32>()
                                  .Arg<BF16>()
                                  .Arg<BF16>()
                                  .Arg<S32>()
                                  .Arg<F32>()
                                  .Arg<S32>()
                                  .Ret<BF16>()
                                  .Ret<BF16>()
                                  .Attr<ffi::Span<const int64_t>>("sites")
                                  .Attr<int64_t>("max_rank"),
                              {ffi::Traits::kCmdBufferCompatible});
