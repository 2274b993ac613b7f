// XLA FFI entry point of the products for few rows: one launch, fit for CUDA graphs.
#include "device/ffi_buffers.cuh"
#include "grouped_matmul/few_rows_launch.cuh"

namespace lora_jax {

static const void* given(const ffi::AnyBuffer& b) { return b.element_count() ? b.untyped_data() : nullptr; }

// Arrays of no elements are none. `scale_columns` of d_in share a scale.
static ffi::Error FewRows(cudaStream_t stream, BF16 x, S32 sizes, ffi::AnyBuffer w, ffi::AnyBuffer up, ffi::AnyBuffer scales,
                          ffi::AnyBuffer up_scales, BF16 bias, ffi::AnyBuffer addend, ffi::AnyBuffer up_addend,
                          ffi::Result<BF16> y, int32_t coding, int32_t scale_columns, int32_t first,
                          ffi::Span<const float> table) {
  FewRowsCall call{};
  FewRowsArgs& p = call.args;
  call.weights[0] = w.untyped_data(), call.weights[1] = given(up), call.gated = call.weights[1] != nullptr;
  p.scales[0] = given(scales), p.scales[1] = given(up_scales), p.x = data(x), p.sizes = sizes.typed_data();
  p.bias = data(bias), p.addends[0] = given(addend), p.addends[1] = given(up_addend), p.y = data(y);
  p.addends_wide = addend.element_type() == ffi::F32;
  const auto d = w.dimensions();
  p.rows = static_cast<int>(x.dimensions()[0]), p.d_in = static_cast<int>(x.dimensions()[1]);
  p.groups = static_cast<int>(d[0]), p.d_out = static_cast<int>(d[1]);
  p.scale_columns = scale_columns, p.scale_groups = p.scales[0] ? static_cast<int>(scales.dimensions()[2]) : 1;
  if (table.size() != 16) return ffi::Error::InvalidArgument("a table of other than 16 values");
  p.first = static_cast<float>(first);
  std::copy(table.begin(), table.end(), p.table);
  switch (static_cast<Coding>(coding)) {
    case Coding::kFloat8: return status(launch_few_rows<Coding::kFloat8, 128>(call, stream));
    case Coding::kInteger:
      return status(scale_columns == 64 ? launch_few_rows<Coding::kInteger, 64>(call, stream)
                                        : launch_few_rows<Coding::kInteger, 128>(call, stream));
    case Coding::kE2m1: return status(launch_few_rows<Coding::kE2m1, 32>(call, stream));
    case Coding::kTable: return status(launch_few_rows<Coding::kTable, 64>(call, stream));
  }
  return ffi::Error::InvalidArgument("no such coding");
}

}  // namespace lora_jax

XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_few_rows, lora_jax::FewRows,
                              LORA_JAX_ON_STREAM.Arg<BF16>()
                                  .Arg<S32>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<BF16>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<BF16>()
                                  .Attr<int32_t>("coding")
                                  .Attr<int32_t>("scale_columns")
                                  .Attr<int32_t>("first")
                                  .Attr<ffi::Span<const float>>("table"),
                              {ffi::Traits::kCmdBufferCompatible});
