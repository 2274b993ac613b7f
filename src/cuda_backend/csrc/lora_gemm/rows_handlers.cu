// XLA FFI entry point of grouped LoRA row by row: one launch, fit for CUDA graphs.
#include "device/ffi_buffers.cuh"
#include "lora_gemm/rows.cuh"

namespace lora_jax {

template <class T, class Y>
static cudaError_t launch_by_pools(bool int8, const LoraRowsArgs& args, cudaStream_t stream) {
  return int8 ? launch_lora_rows<T, Y, int8_t>(args, stream) : launch_lora_rows<T, Y>(args, stream);
}

// Of one `site` of a table [sites, slots, 5] and [sites, slots]; y and out are one type, the rest too, or pools int8.
static ffi::Error LoraRows(cudaStream_t stream, ffi::AnyBuffer y, ffi::AnyBuffer x, ffi::AnyBuffer a_pool,
                           ffi::AnyBuffer b_pool, S32 entries, F32 scaling, S32 row_to_slot, S32 row_to_expert,
                           ffi::Result<ffi::AnyBuffer> out, int64_t site, int64_t max_rank) {
  const int64_t slots = scaling.dimensions().back();
  const LoraRowsArgs args{x.untyped_data(),
                          a_pool.untyped_data(),
                          b_pool.untyped_data(),
                          out->untyped_data(),
                          entries.typed_data() + site * slots * 5,
                          scaling.typed_data() + site * slots,
                          row_to_slot.typed_data(),
                          row_to_expert.typed_data(),
                          static_cast<int>(x.dimensions()[0]),
                          static_cast<int>(x.dimensions()[1]),
                          static_cast<int>(y.dimensions()[1]),
                          static_cast<int>(slots),
                          static_cast<int>(max_rank)};
  cudaError_t e = cudaSuccess;
  if (args.y != y.untyped_data())
    e = cudaMemcpyAsync(args.y, y.untyped_data(), y.size_bytes(), cudaMemcpyDeviceToDevice, stream);
  if (e != cudaSuccess) return status(e);
  const bool int8 = a_pool.element_type() == ffi::S8;
  if (x.element_type() == ffi::F32)
    e = launch_by_pools<float, float>(int8, args, stream);
  else if (y.element_type() == ffi::F32)
    e = launch_by_pools<__nv_bfloat16, float>(int8, args, stream);
  else
    e = launch_by_pools<__nv_bfloat16, __nv_bfloat16>(int8, args, stream);
  return status(e);
}

}  // namespace lora_jax

XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_lora_rows, lora_jax::LoraRows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<S32>()
                                  .Arg<F32>()
                                  .Arg<S32>()
                                  .Arg<S32>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("site")
                                  .Attr<int64_t>("max_rank"),
                              {ffi::Traits::kCmdBufferCompatible});
