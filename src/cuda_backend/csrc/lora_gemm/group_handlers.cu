// XLA FFI entry points of launches that serve few rows of few adapters by groups alone, fit for CUDA graphs: an MLP's two
// products with their adapters, multiplied, and maps of one x whose widths differ.
#include "device/ffi_buffers.cuh"
#include "lora_gemm/call_states.cuh"
#include "lora_gemm/group_launch.cuh"

namespace lora_jax {

// What both have in common; false where there are too many rows or ranks.
static bool group_args(PairArgs& p, BF16& x, BF16& a_pool, S32& order, S32& items, S32& num_items, F32& scaling, int64_t max_rank) {
  p.items = reinterpret_cast<const Item*>(items.typed_data()), p.num_items = num_items.typed_data();
  p.row_order = order.typed_data(), p.num_rows = static_cast<int>(order.element_count());
  p.max_rank = static_cast<int>(max_rank), p.h_stride = (p.max_rank + 7) / 8 * 8;
  p.x = data(x), p.pools[0] = data(a_pool), p.d_in = static_cast<int>(a_pool.dimensions()[1]);
  p.num_slots = static_cast<int>(scaling.dimensions().back());
  p.shrink = p.expand = p.accumulate = p.small_items = true;
  return p.num_rows <= kFewRows && p.max_rank <= 64;
}
static Module module_of(S32& entries, F32& scaling, int64_t site, const __nv_bfloat16* y, BF16& b_pool) {
  const int64_t slots = scaling.dimensions().back();
  return Module{entries.typed_data() + site * slots * 5, scaling.typed_data() + site * slots, const_cast<__nv_bfloat16*>(y),
                data(b_pool), static_cast<int>(b_pool.dimensions()[1])};
}

// Tables are of all sites, [sites, slots, 5] and [sites, slots]; `sites` names gate's and up's. `h` is scratch.
static ffi::Error LoraGated(cudaStream_t stream, CallStateOwner* owner, BF16 x, BF16 a_pool, BF16 b_pool, S32 order,
                            S32 items, S32 num_items, BF16 gate, BF16 up, S32 entries, F32 scaling, S32 num_rows,
                            ffi::Result<BF16> h, ffi::Result<BF16> y, ffi::Span<const int64_t> sites, int64_t max_rank) {
  if (sites.size() != 2) return ffi::Error::InvalidArgument("lora_gated: a site of gate and one of up");
  GatedArgs args{};
  PairArgs& p = args.pair;
  if (!group_args(p, x, a_pool, order, items, num_items, scaling, max_rank))
    return ffi::Error::InvalidArgument("lora_gated: too many rows or ranks");
  p.h = data(h), p.num_modules = 2, p.d_out = static_cast<int>(b_pool.dimensions()[1]);
  const BF16* products[] = {&gate, &up};
  for (int m = 0; m < 2; ++m) p.modules[m] = module_of(entries, scaling, sites[m], data(*products[m]), b_pool);
  args.y = data(y), args.num_rows = num_rows.typed_data();
  const cudaError_t e = owner->find(&p.state);
  return status(e == cudaSuccess ? launch_gated(args, stream) : e);
}

// `maps` are y and B's pool of each site, whose adapters are added to y in place.
static ffi::Error LoraJoined(cudaStream_t stream, CallStateOwner* owner, BF16 x, BF16 a_pool, S32 order, S32 items,
                             S32 num_items, S32 entries, F32 scaling, ffi::RemainingArgs maps, ffi::Result<BF16> h,
                             ffi::RemainingRets outs, ffi::Span<const int64_t> sites, int64_t max_rank) {
  PairArgs p{};
  if (sites.size() > kMaxModules || outs.size() != sites.size() || maps.size() != 2 * sites.size())
    return ffi::Error::InvalidArgument("lora_joined: a y and a pool of each site");
  if (!group_args(p, x, a_pool, order, items, num_items, scaling, max_rank))
    return ffi::Error::InvalidArgument("lora_joined: too many rows or ranks");
  p.h = data(h), p.num_modules = static_cast<int>(sites.size());
  cudaError_t e = owner->find(&p.state);
  for (int m = 0; m < p.num_modules && e == cudaSuccess; ++m) {
    auto y = maps.get<BF16>(2 * m), b_pool = maps.get<BF16>(2 * m + 1);
    auto out = outs.get<BF16>(m);
    if (!y || !b_pool || !out) return ffi::Error::InvalidArgument("lora_joined: a y or a pool");
    p.modules[m] = module_of(entries, scaling, sites[m], data(*out), *b_pool);
    if (data(*out) != data(*y))
      e = cudaMemcpyAsync(data(*out), data(*y), y->size_bytes(), cudaMemcpyDeviceToDevice, stream);
  }
  return status(e == cudaSuccess ? launch_joined(p, stream) : e);
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
XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_lora_joined, lora_jax::LoraJoined,
                              LORA_JAX_ON_STREAM.Ctx<ffi::State<lora_jax::CallStateOwner>>()
                                  .Arg<BF16>()
                                  .Arg<BF16>()
                                  .Arg<S32>()
                                  .Arg<S32>()
                                  .Arg<S32>()
                                  .Arg<S32>()
                                  .Arg<F32>()
                                  .RemainingArgs()
                                  .Ret<BF16>()
                                  .RemainingRets()
                                  .Attr<ffi::Span<const int64_t>>("sites")
                                  .Attr<int64_t>("max_rank"),
                              {ffi::Traits::kCmdBufferCompatible});
