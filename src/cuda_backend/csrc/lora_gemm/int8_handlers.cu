// XLA FFI entry point of grouped LoRA over rank rows of int8: a clear if need be, and two launches, fit for CUDA graphs.
#include "device/ffi_buffers.cuh"
#include "lora_gemm/int8.cuh"

using S8 = ffi::Buffer<ffi::S8>;

namespace lora_jax {

// y, argument `at`, becomes what is added to; without one that is zeros.
static cudaError_t begin_output(bool accumulate, ffi::RemainingArgs& given, size_t at, ffi::Result<BF16>& out,
                                cudaStream_t stream) {
  if (!accumulate) return cudaMemsetAsync(out->untyped_data(), 0, out->size_bytes(), stream);
  auto y = given.get<BF16>(at);
  if (!y) return cudaErrorInvalidValue;
  if (out->untyped_data() == y->untyped_data()) return cudaSuccess;
  return cudaMemcpyAsync(out->untyped_data(), y->untyped_data(), y->size_bytes(), cudaMemcpyDeviceToDevice, stream);
}

// `modules` holds entries and scaling of each one, which is one of their `sites`, behind its y where that is added to.
static ffi::Error LoraInt8(cudaStream_t stream, BF16 x, S8 a_pool, S8 b_pool, S32 order, S32 items, S32 num_items,
                           ffi::RemainingArgs modules, ffi::Result<F32> sums, ffi::RemainingRets outs,
                           ffi::Span<const int64_t> sites, int64_t max_rank, bool accumulate) {
  if (outs.size() > kMaxModules || sites.size() != outs.size())
    return ffi::Error::InvalidArgument("too many modules for one launch");
  Int8Args p{};
  p.items = reinterpret_cast<const Item*>(items.typed_data()), p.num_items = num_items.typed_data();
  p.row_order = order.typed_data(), p.x = static_cast<const __nv_bfloat16*>(x.untyped_data());
  p.a_pool = a_pool.typed_data(), p.b_pool = b_pool.typed_data(), p.sums = sums->typed_data();
  p.num_modules = static_cast<int>(outs.size()), p.num_rows = static_cast<int>(order.element_count());
  p.d_in = static_cast<int>(x.dimensions()[1]), p.d_out = static_cast<int>(b_pool.dimensions()[1]) - kInt8Tail;
  p.max_rank = static_cast<int>(max_rank);
  const int first = accumulate ? 1 : 0, of_module = first + 2;
  cudaError_t e = cudaSuccess;
  for (int m = 0; m < p.num_modules && e == cudaSuccess; ++m) {
    auto entries = modules.get<S32>(m * of_module + first);
    auto scaling = modules.get<F32>(m * of_module + first + 1);
    auto out = outs.get<BF16>(m);
    if (!entries || !scaling || !out) return ffi::Error::InvalidArgument("a module's entries or scaling");
    const int64_t slots = scaling->dimensions().back();
    p.num_slots = static_cast<int>(slots);
    p.modules[m] = Module{entries->typed_data() + sites[m] * slots * 5, scaling->typed_data() + sites[m] * slots,
                          static_cast<__nv_bfloat16*>((*out)->untyped_data())};
    e = begin_output(accumulate, modules, m * of_module, *out, stream);
  }
  if (e == cudaSuccess) e = launch_int8(p, stream);
  return status(e);
}

}  // namespace lora_jax

XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_lora_int8, lora_jax::LoraInt8,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<BF16>()
                                  .Arg<S8>()
                                  .Arg<S8>()
                                  .Arg<S32>()
                                  .Arg<S32>()
                                  .Arg<S32>()
                                  .RemainingArgs()
                                  .Ret<F32>()
                                  .RemainingRets()
                                  .Attr<ffi::Span<const int64_t>>("sites")
                                  .Attr<int64_t>("max_rank")
                                  .Attr<bool>("accumulate"),
                              {ffi::Traits::kCmdBufferCompatible});
