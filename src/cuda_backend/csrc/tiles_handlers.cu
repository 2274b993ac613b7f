// XLA FFI entry points of the tile kernels; see handlers.cu. All of them only enqueue work of a fixed
// shape, so XLA may put them into CUDA graphs.
#include "tiles_launch.cuh"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using S32 = ffi::Buffer<ffi::S32>;
using F32 = ffi::Buffer<ffi::F32>;
using BF16 = ffi::Buffer<ffi::BF16>;

namespace lora_jax {
namespace {

ffi::Error status(cudaError_t e) {
  return e == cudaSuccess ? ffi::Error::Success() : ffi::Error::Internal(cudaGetErrorString(e));
}
const __nv_bfloat16* data(const BF16& b) { return static_cast<const __nv_bfloat16*>(b.untyped_data()); }
__nv_bfloat16* data(ffi::Result<BF16>& b) { return static_cast<__nv_bfloat16*>(b->untyped_data()); }

// Makes a result that shares no memory with what it continues begin as its copy.
cudaError_t carry_over(cudaStream_t stream, BF16& from, ffi::Result<BF16>& to) {
  if (data(to) == data(from)) return cudaSuccess;
  return cudaMemcpyAsync(data(to), data(from), from.size_bytes(), cudaMemcpyDeviceToDevice, stream);
}

TileArgs common_args(S32& entries, F32& scaling, S32& order, S32& tiles, S32& cut, int64_t h_stride, int64_t max_rank) {
  TileArgs args{};
  args.tiles = reinterpret_cast<const Item*>(tiles.typed_data()), args.cut = cut.typed_data();
  args.most_tiles = static_cast<int>(tiles.dimensions()[0]), args.row_order = order.typed_data();
  args.entries = entries.typed_data(), args.scaling = scaling.typed_data();
  args.h_stride = static_cast<int>(h_stride), args.max_rank = static_cast<int>(max_rank);
  return args;
}
cudaError_t shrink_args(TileArgs* args, BF16& x, BF16& a_pool) {
  const auto d = a_pool.dimensions();
  args->x = data(x), args->d_in = static_cast<int>(d[1]);
  return weight_map(&args->a_map, data(a_pool), d[0], d[1]);
}
void expand_args(TileArgs* args, BF16& b_pool, ffi::Result<BF16>& y) {
  args->y = data(y), args->b_pool = data(b_pool), args->d_out = static_cast<int>(b_pool.dimensions()[1]);
}

}  // namespace

ffi::Error RowTiles(cudaStream_t stream, S32 items, S32 num_items, ffi::Result<S32> small, ffi::Result<S32> num_small,
                    ffi::Result<S32> tiles, ffi::Result<S32> cut, int64_t least_rows, int64_t least_total) {
  RowTilesArgs args{};
  args.items = reinterpret_cast<const Item*>(items.typed_data()), args.num_items = num_items.typed_data();
  args.rows = static_cast<int>(items.dimensions()[0]);
  args.least_rows = static_cast<int>(least_rows), args.least_total = static_cast<int>(least_total);
  args.small = reinterpret_cast<Item*>(small->typed_data()), args.num_small = num_small->typed_data();
  args.tiles = reinterpret_cast<Item*>(tiles->typed_data()), args.cut = cut->typed_data();
  return status(launch_row_tiles(args, stream));
}

ffi::Error TilesPair(cudaStream_t stream, BF16 y, BF16 x, BF16 a_pool, BF16 b_pool, S32 entries, F32 scaling,
                     S32 order, S32 tiles, S32 cut, ffi::Result<BF16> out, ffi::Result<BF16> h, int64_t max_rank) {
  TileArgs args = common_args(entries, scaling, order, tiles, cut, h->dimensions()[1], max_rank);
  expand_args(&args, b_pool, out);
  args.h = data(h);
  cudaError_t e = shrink_args(&args, x, a_pool);
  if (e == cudaSuccess) e = carry_over(stream, y, out);
  return status(e == cudaSuccess ? launch_tiles(args, true, true, stream) : e);
}

ffi::Error TilesShrink(cudaStream_t stream, BF16 h, BF16 x, BF16 a_pool, S32 entries, F32 scaling, S32 order, S32 tiles,
                       S32 cut, ffi::Result<BF16> out, int64_t max_rank) {
  TileArgs args = common_args(entries, scaling, order, tiles, cut, h.dimensions()[1], max_rank);
  args.h = data(out);
  cudaError_t e = shrink_args(&args, x, a_pool);
  if (e == cudaSuccess) e = carry_over(stream, h, out);
  return status(e == cudaSuccess ? launch_tiles(args, true, false, stream) : e);
}

ffi::Error TilesExpand(cudaStream_t stream, BF16 y, BF16 h, BF16 b_pool, S32 entries, F32 scaling, S32 order, S32 tiles,
                       S32 cut, ffi::Result<BF16> out, int64_t max_rank) {
  TileArgs args = common_args(entries, scaling, order, tiles, cut, h.dimensions()[1], max_rank);
  expand_args(&args, b_pool, out);
  args.h = const_cast<__nv_bfloat16*>(data(h));  // only read: nothing shrinks in this launch
  const cudaError_t e = carry_over(stream, y, out);
  return status(e == cudaSuccess ? launch_tiles(args, false, true, stream) : e);
}

}  // namespace lora_jax

#define LORA_JAX_ON_STREAM ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>()
#define LORA_JAX_ROW_TILES Arg<S32>().Arg<F32>().Arg<S32>().Arg<S32>().Arg<S32>()

XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_row_tiles, lora_jax::RowTiles,
                              LORA_JAX_ON_STREAM.Arg<S32>()
                                  .Arg<S32>()
                                  .Ret<S32>()
                                  .Ret<S32>()
                                  .Ret<S32>()
                                  .Ret<S32>()
                                  .Attr<int64_t>("least_rows")
                                  .Attr<int64_t>("least_total"),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_lora_tiles, lora_jax::TilesPair,
                              LORA_JAX_ON_STREAM.Arg<BF16>()
                                  .Arg<BF16>()
                                  .Arg<BF16>()
                                  .Arg<BF16>()
                                  .LORA_JAX_ROW_TILES.Ret<BF16>()
                                  .Ret<BF16>()
                                  .Attr<int64_t>("max_rank"),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_lora_tiles_shrink, lora_jax::TilesShrink,
                              LORA_JAX_ON_STREAM.Arg<BF16>()
                                  .Arg<BF16>()
                                  .Arg<BF16>()
                                  .LORA_JAX_ROW_TILES.Ret<BF16>()
                                  .Attr<int64_t>("max_rank"),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_lora_tiles_expand, lora_jax::TilesExpand,
                              LORA_JAX_ON_STREAM.Arg<BF16>()
                                  .Arg<BF16>()
                                  .Arg<BF16>()
                                  .LORA_JAX_ROW_TILES.Ret<BF16>()
                                  .Attr<int64_t>("max_rank"),
                              {ffi::Traits::kCmdBufferCompatible});
