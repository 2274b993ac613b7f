// XLA FFI entry points of the CUDA kernels: unpack buffers, launch, report errors. All of them only
// enqueue work of a fixed shape, so XLA may put them into CUDA graphs.
#include <algorithm>
#include <iterator>

#include "device/ffi_buffers.cuh"
#include "lora_gemm/call_states.cuh"
#include "lora_gemm/segments_launch.cuh"

namespace lora_jax {

ffi::Error RowItems(cudaStream_t stream, S32 row_to_slot, S32 row_to_expert, ffi::Result<S32> order,
                    ffi::Result<S32> items, ffi::Result<S32> num_items, int64_t slots, int64_t item_rows) {
  MetadataArgs args{row_to_slot.typed_data(),
                    row_to_expert.typed_data(),
                    static_cast<int>(row_to_slot.element_count()),
                    static_cast<int>(slots),
                    static_cast<int>(item_rows),
                    order->typed_data(),
                    reinterpret_cast<Item*>(items->typed_data()),
                    num_items->typed_data()};
  return status(launch_metadata(args, stream));
}

// What shrink, expand and the pair have in common.
PairArgs common_args(S32& order, S32& items, S32& num_items, int64_t h_stride) {
  PairArgs args{};
  args.items = reinterpret_cast<const Item*>(items.typed_data());
  args.num_items = num_items.typed_data();
  args.row_order = order.typed_data();
  args.num_modules = 1, args.num_rows = static_cast<int>(order.element_count());
  args.h_stride = args.max_rank = static_cast<int>(h_stride), args.zeros_if_idle = true;
  args.small_items = args.num_rows <= kFewRowsOfMany;
  return args;
}
cudaError_t shrink_args(PairArgs* args, BF16& x, BF16& a_pool) {
  const auto d = a_pool.dimensions();
  args->shrink = true, args->x = data(x), args->d_in = static_cast<int>(d[1]);
  return pool_maps(args, 0, data(a_pool), d[0], d[1], kWideA);
}
cudaError_t expand_args(PairArgs* args, BF16& b_pool, bool accumulate) {
  const auto d = b_pool.dimensions();
  args->expand = true, args->d_out = static_cast<int>(d[1]), args->accumulate = accumulate;
  return pool_maps(args, 1, data(b_pool), d[0], d[1], kWideB);
}
// Of one site of a table [sites, slots, 5] and [sites, slots], or [slots, 5] and [slots].
void module_args(PairArgs* args, int m, S32& entries, F32& scaling, int64_t site = 0) {
  const int64_t slots = scaling.dimensions().back();
  args->num_slots = static_cast<int>(slots);
  args->modules[m].entries = entries.typed_data() + site * slots * 5;
  args->modules[m].scaling = scaling.typed_data() + site * slots;
}
// Takes y, argument `at`, where it is added to.
cudaError_t output_args(PairArgs* args, int m, cudaStream_t stream, ffi::RemainingArgs& given, size_t at,
                        ffi::Result<BF16>& out) {
  args->modules[m].y = data(out);
  if (!args->accumulate) return cudaSuccess;
  auto y = given.get<BF16>(at);
  if (!y) return cudaErrorInvalidValue;
  if (data(out) == data(*y)) return cudaSuccess;
  return cudaMemcpyAsync(data(out), data(*y), y->size_bytes(), cudaMemcpyDeviceToDevice, stream);
}

// What the tiles hold, beside these items.
TileArgs tile_args(const PairArgs& args, S32& tiles, S32& cut) {
  TileArgs t{};
  t.tiles = reinterpret_cast<const TileRecord*>(tiles.typed_data()), t.cut = cut.typed_data();
  t.most_tiles = static_cast<int>(tiles.dimensions()[0]), t.row_order = args.row_order, t.x = args.x, t.h = args.h;
  if (args.shrink && args.expand) t.h += int64_t{1} * args.num_modules * args.num_rows * args.h_stride;  // behind the items' h
  std::copy(std::begin(args.modules), std::end(args.modules), t.modules);
  t.num_modules = args.num_modules, t.num_rows = args.num_rows, t.num_slots = args.num_slots, t.b_boxes = args.maps[1][1];
  t.d_in = args.d_in, t.d_out = args.d_out, t.h_stride = args.h_stride, t.max_rank = args.max_rank;
  t.shrink = args.shrink, t.expand = args.expand, t.accumulate = args.accumulate;
  return t;
}
// Launches what the items and the tiles hold. The pool is null where nothing shrinks.
cudaError_t launch_all(PairArgs args, S32& tiles, S32& cut, const BF16* a_pool, cudaStream_t stream,
                       bool tiles_last = false) {
  if (tiles.element_count() == 0) return launch_pair(args, stream);
  args.live = cut.typed_data() + 2;
  TileArgs t = tile_args(args, tiles, cut);
  cudaError_t e = cudaSuccess;
  if (a_pool) e = parts_maps(t.a_parts, data(*a_pool), a_pool->dimensions()[0], args.d_in);
  return e == cudaSuccess ? launch_with_tiles(args, t, tiles_last, stream) : e;
}

// `modules` holds entries and scaling of each one, which is one of their `sites`, behind its y where that
// is added to; `work` is for h of the items, and of the tiles if there are any. `small_items`: an item has at most
// kFewItemRows rows; `segments`: see launch_segments; `tiles_last`: see launch_with_tiles.
ffi::Error LoraGemm(cudaStream_t stream, CallStateOwner* owner, BF16 x, BF16 a_pool, BF16 b_pool, S32 order,
                    S32 items, S32 num_items, S32 tiles, S32 cut, ffi::RemainingArgs modules, ffi::Result<BF16> work,
                    ffi::RemainingRets outs, ffi::Span<const int64_t> sites, int64_t max_rank, bool accumulate,
                    bool small_items, bool segments, bool tiles_last, bool zeros_if_idle) {
  PairArgs args = common_args(order, items, num_items, (max_rank + 7) / 8 * 8);
  args.num_modules = static_cast<int>(outs.size());
  args.h = data(work), args.zeros_if_idle = zeros_if_idle, args.small_items = small_items;
  if (args.num_modules > kMaxModules || sites.size() != outs.size())
    return ffi::Error::InvalidArgument("too many modules for one launch");
  cudaError_t e = owner->find(&args.state);
  if (e == cudaSuccess) e = shrink_args(&args, x, a_pool);
  if (e == cudaSuccess) e = expand_args(&args, b_pool, accumulate);
  const int first = accumulate ? 1 : 0, of_module = first + 2;
  for (int m = 0; m < args.num_modules && e == cudaSuccess; ++m) {
    auto entries = modules.get<S32>(m * of_module + first);
    auto scaling = modules.get<F32>(m * of_module + first + 1);
    auto out = outs.get<BF16>(m);
    if (!entries || !scaling || !out) return ffi::Error::InvalidArgument("a module's entries or scaling");
    module_args(&args, m, *entries, *scaling, sites[m]);
    e = output_args(&args, m, stream, modules, m * of_module, *out);
  }
  if (e == cudaSuccess) e = segments ? launch_segments(args, stream) : launch_all(args, tiles, cut, &a_pool, stream, tiles_last);
  return status(e);
}

// Of many rows: the items' adapters are added to gate and up in place, and the tiles' where they are multiplied. `sites` of
// the tables are gate's and up's.
ffi::Error LoraGatedTiles(cudaStream_t stream, CallStateOwner* owner, BF16 x, BF16 a_pool, BF16 b_pool, S32 order, S32 items,
                          S32 num_items, S32 tiles, S32 cut, BF16 gate, BF16 up, S32 entries, F32 scaling, S32 num_rows,
                          ffi::Result<BF16> work, ffi::Result<BF16> gate_sum, ffi::Result<BF16> up_sum, ffi::Result<BF16> y,
                          ffi::Span<const int64_t> sites, int64_t max_rank) {
  if (sites.size() != 2 || max_rank > kMostRankOfGated || tiles.element_count() == 0)
    return ffi::Error::InvalidArgument("lora_gated_tiles: two sites, ranks to 32, and tiles");
  PairArgs args = common_args(order, items, num_items, (max_rank + 7) / 8 * 8);
  args.num_modules = 2, args.h = data(work), args.live = cut.typed_data() + 2;
  cudaError_t e = owner->find(&args.state);
  if (e == cudaSuccess) e = shrink_args(&args, x, a_pool);
  if (e == cudaSuccess) e = expand_args(&args, b_pool, true);
  const BF16* products[] = {&gate, &up};
  ffi::Result<BF16>* sums[] = {&gate_sum, &up_sum};
  for (int m = 0; m < 2 && e == cudaSuccess; ++m) {
    module_args(&args, m, entries, scaling, sites[m]);
    args.modules[m].y = data(*sums[m]);
    if (data(*sums[m]) != data(*products[m]))
      e = cudaMemcpyAsync(data(*sums[m]), data(*products[m]), products[m]->size_bytes(), cudaMemcpyDeviceToDevice, stream);
  }
  GatedTileArgs gated{tile_args(args, tiles, cut), args.items, args.num_items, data(y), num_rows.typed_data()};
  TileArgs shrink = gated.tiles;
  shrink.expand = false, gated.tiles.b_pool = data(b_pool);
  if (e == cudaSuccess) e = parts_maps(shrink.a_parts, data(a_pool), a_pool.dimensions()[0], args.d_in);
  if (e == cudaSuccess) e = launch_pair(args, stream);
  if (e == cudaSuccess) e = launch_tiles(shrink, stream);
  return status(e == cudaSuccess ? launch_gated_tiles(gated, stream) : e);
}

ffi::Error LoraShrink(cudaStream_t stream, CallStateOwner* owner, BF16 x, BF16 a_pool, S32 entries, F32 scaling, S32 order, S32 items,
                      S32 num_items, S32 tiles, S32 cut, ffi::Result<BF16> h) {
  PairArgs args = common_args(order, items, num_items, h->dimensions()[1]);
  module_args(&args, 0, entries, scaling);
  args.h = data(h);
  cudaError_t e = owner->find(&args.state);
  if (e == cudaSuccess) e = shrink_args(&args, x, a_pool);
  return status(e == cudaSuccess ? launch_all(args, tiles, cut, &a_pool, stream) : e);
}

// `ys` holds y where that is added to.
ffi::Error LoraExpand(cudaStream_t stream, CallStateOwner* owner, BF16 h, BF16 b_pool, S32 entries, F32 scaling,
                      S32 order, S32 items, S32 num_items, S32 tiles, S32 cut, ffi::RemainingArgs ys,
                      ffi::Result<BF16> out, bool accumulate) {
  PairArgs args = common_args(order, items, num_items, h.dimensions()[1]);
  module_args(&args, 0, entries, scaling);
  args.h = const_cast<__nv_bfloat16*>(data(h));  // only read: nothing shrinks in this launch
  cudaError_t e = owner->find(&args.state);
  if (e == cudaSuccess) e = expand_args(&args, b_pool, accumulate);
  if (e == cudaSuccess) e = output_args(&args, 0, stream, ys, 0, out);
  return status(e == cudaSuccess ? launch_all(args, tiles, cut, nullptr, stream) : e);
}

}  // namespace lora_jax

#define LORA_JAX_CALL_STATE Ctx<ffi::State<lora_jax::CallStateOwner>>()
#define LORA_JAX_ROW_ITEMS Arg<S32>().Arg<S32>().Arg<S32>().Arg<S32>().Arg<S32>()

XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_row_items, lora_jax::RowItems,
                              LORA_JAX_ON_STREAM.Arg<S32>()
                                  .Arg<S32>()
                                  .Ret<S32>()
                                  .Ret<S32>()
                                  .Ret<S32>()
                                  .Attr<int64_t>("slots")
                                  .Attr<int64_t>("item_rows"),
                              {ffi::Traits::kCmdBufferCompatible});
// Makes the owner of a call's state; and what XLA has to know of its type.
XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_call_state, lora_jax::own_call_state, ffi::Ffi::BindInstantiate());
extern "C" XLA_FFI_TypeId* lora_jax_cuda_call_state_id() { return &lora_jax::CallStateOwner::id; }
extern "C" const XLA_FFI_TypeInfo* lora_jax_cuda_call_state_info() {
  static const XLA_FFI_TypeInfo info = ffi::MakeTypeInfo<lora_jax::CallStateOwner>();
  return &info;
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_lora_gemm, lora_jax::LoraGemm,
                              LORA_JAX_ON_STREAM.LORA_JAX_CALL_STATE.Arg<BF16>()
                                  .Arg<BF16>()
                                  .Arg<BF16>()
                                  .LORA_JAX_ROW_ITEMS.RemainingArgs()
                                  .Ret<BF16>()
                                  .RemainingRets()
                                  .Attr<ffi::Span<const int64_t>>("sites")
                                  .Attr<int64_t>("max_rank")
                                  .Attr<bool>("accumulate")
                                  .Attr<bool>("small_items")
                                  .Attr<bool>("segments")
                                  .Attr<bool>("tiles_last")
                                  .Attr<bool>("zeros_if_idle"),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_lora_gated_tiles, lora_jax::LoraGatedTiles,
                              LORA_JAX_ON_STREAM.LORA_JAX_CALL_STATE.Arg<BF16>()
                                  .Arg<BF16>()
                                  .Arg<BF16>()
                                  .LORA_JAX_ROW_ITEMS.Arg<BF16>()
                                  .Arg<BF16>()
                                  .Arg<S32>()
                                  .Arg<F32>()
                                  .Arg<S32>()
                                  .Ret<BF16>()
                                  .Ret<BF16>()
                                  .Ret<BF16>()
                                  .Ret<BF16>()
                                  .Attr<ffi::Span<const int64_t>>("sites")
                                  .Attr<int64_t>("max_rank"),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_lora_shrink, lora_jax::LoraShrink,
                              LORA_JAX_ON_STREAM.LORA_JAX_CALL_STATE.Arg<BF16>()
                                  .Arg<BF16>()
                                  .Arg<S32>()
                                  .Arg<F32>()
                                  .LORA_JAX_ROW_ITEMS.Ret<BF16>(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_lora_expand, lora_jax::LoraExpand,
                              LORA_JAX_ON_STREAM.LORA_JAX_CALL_STATE.Arg<BF16>()
                                  .Arg<BF16>()
                                  .Arg<S32>()
                                  .Arg<F32>()
                                  .LORA_JAX_ROW_ITEMS.RemainingArgs()
                                  .Ret<BF16>()
                                  .Attr<bool>("accumulate"),
                              {ffi::Traits::kCmdBufferCompatible});
