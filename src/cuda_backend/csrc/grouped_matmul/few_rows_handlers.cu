// XLA FFI entry point of the products for few rows: one launch, fit for CUDA graphs.
#include "device/ffi_buffers.cuh"
#include "grouped_matmul/few_rows_launch.cuh"

namespace lora_jax {

static const void* given(const ffi::AnyBuffer& b) { return b.element_count() ? b.untyped_data() : nullptr; }

using Any = ffi::AnyBuffer;

cudaError_t few_rows_affine(const FewRowsCall& call, cudaStream_t stream);  // few_rows_affine.cu

// Arrays of no elements are none. `scale_columns` of d_in share a scale.
static ffi::Error FewRows(cudaStream_t stream, BF16 x, S32 sizes, Any w0, Any w1, Any w2, Any scales0, Any scales1,
                          Any scales2, Any zeros0, Any zeros1, Any zeros2, BF16 bias0, BF16 bias1, BF16 bias2, Any addend0, Any addend1, ffi::Result<BF16> y0,
                          ffi::Result<BF16> y1, ffi::Result<BF16> y2, bool gated, int32_t coding, int32_t scale_columns,
                          int32_t first, ffi::Span<const float> table) {
  const Any weights[] = {w0, w1, w2}, scales[] = {scales0, scales1, scales2}, zeros[] = {zeros0, zeros1, zeros2};
  const BF16 biases[] = {bias0, bias1, bias2};
  const void* addends[] = {given(addend0), given(addend1), nullptr};
  ffi::Result<BF16>* results[] = {&y0, &y1, &y2};
  FewRowsCall call{};
  FewRowsArgs& p = call.args;
  for (int m = 0; m < kMostMatrices && given(weights[m]); ++m) {
    call.weights[m] = weights[m].untyped_data(), call.count = m + 1;
    p.matrices[m] = {given(scales[m]), given(zeros[m]), data(biases[m]), addends[m], data(*results[m]),
                     static_cast<int>(weights[m].dimensions()[1]), 0};
  }
  call.gated = gated;
  p.x = data(x), p.sizes = sizes.typed_data(), p.addends_wide = addend0.element_type() == ffi::F32;
  p.rows = static_cast<int>(x.dimensions()[0]), p.d_in = static_cast<int>(x.dimensions()[1]);
  p.groups = static_cast<int>(w0.dimensions()[0]);
  p.scale_columns = scale_columns, p.scale_groups = static_cast<int>(scales0.dimensions()[2]);
  p.scales_narrow = scales0.element_type() == ffi::BF16;
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
    case Coding::kAffine: return status(few_rows_affine(call, stream));
    case Coding::kPlain: return status(launch_plain(call, stream));
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
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<BF16>()
                                  .Arg<BF16>()
                                  .Arg<BF16>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<BF16>()
                                  .Ret<BF16>()
                                  .Ret<BF16>()
                                  .Attr<bool>("gated")
                                  .Attr<int32_t>("coding")
                                  .Attr<int32_t>("scale_columns")
                                  .Attr<int32_t>("first")
                                  .Attr<ffi::Span<const float>>("table"),
                              {ffi::Traits::kCmdBufferCompatible});
