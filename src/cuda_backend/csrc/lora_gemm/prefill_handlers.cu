// The tile kernels, and the XLA FFI entry point that makes tiles; lora_gemm/handlers.cu uses them.
#include "device/ffi_buffers.cuh"
#include "lora_gemm/prefill_launch.cuh"

namespace lora_jax {

ffi::Error RowTiles(cudaStream_t stream, S32 items, S32 num_items, S32 row_order, ffi::Result<S32> small, ffi::Result<S32> num_small,
                    ffi::Result<S32> tiles, ffi::Result<S32> cut, int64_t least_rows, int64_t least_total) {
  RowTilesArgs args{};
  args.items = reinterpret_cast<const Item*>(items.typed_data()), args.num_items = num_items.typed_data();
  args.row_order = row_order.typed_data(), args.rows = static_cast<int>(items.dimensions()[0]);
  args.least_rows = static_cast<int>(least_rows), args.least_total = static_cast<int>(least_total);
  args.small = reinterpret_cast<Item*>(small->typed_data()), args.num_small = num_small->typed_data();
  args.tiles = reinterpret_cast<TileRecord*>(tiles->typed_data()), args.cut = cut->typed_data();
  args.most_tiles = static_cast<int>(tiles->dimensions()[0]);
  const cudaError_t e = launch_row_tiles(args, stream);
  return status(e);
}

}  // namespace lora_jax

XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_row_tiles, lora_jax::RowTiles,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<S32>()
                                  .Arg<S32>()
                                  .Arg<S32>()
                                  .Ret<S32>()
                                  .Ret<S32>()
                                  .Ret<S32>()
                                  .Ret<S32>()
                                  .Attr<int64_t>("least_rows")
                                  .Attr<int64_t>("least_total"),
                              {ffi::Traits::kCmdBufferCompatible});
