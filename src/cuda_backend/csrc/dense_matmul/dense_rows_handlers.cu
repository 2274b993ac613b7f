// XLA FFI entry point of a batch's dense maps: one launch, fit for CUDA graphs.
#include "dense_matmul/dense_rows_launch.cuh"
#include "device/ffi_buffers.cuh"

namespace lora_jax {

using Any = ffi::AnyBuffer;

// Arrays of no elements are none; the addend is of the first map.
static ffi::Error DenseRowsOf(cudaStream_t stream, BF16 x, S32 num_rows, BF16 w0, BF16 w1, BF16 w2, BF16 bias0,
                              BF16 bias1, BF16 bias2, Any addend, ffi::Result<BF16> y0, ffi::Result<BF16> y1,
                              ffi::Result<BF16> y2) {
  const BF16 weights[] = {w0, w1, w2}, biases[] = {bias0, bias1, bias2};
  ffi::Result<BF16>* results[] = {&y0, &y1, &y2};
  DenseRowsCall call{};
  DenseRowsArgs& p = call.args;
  for (int m = 0; m < kDenseMaps && data(weights[m]); ++m) {
    const bool added = m == 0 && addend.element_count();
    call.weights[m] = data(weights[m]), call.count = m + 1;
    p.of[m] = {data(biases[m]), added ? addend.untyped_data() : nullptr, data(*results[m]),
               static_cast<int>(weights[m].dimensions()[0]), 0};
  }
  call.x = data(x), call.d_in = static_cast<int>(x.dimensions()[1]);
  p.rows = static_cast<int>(x.dimensions()[0]), p.num_rows = num_rows.typed_data();
  p.addends_wide = addend.element_type() == ffi::F32;
  return status(launch_dense_rows(call, stream));
}

}  // namespace lora_jax

XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_dense_rows, lora_jax::DenseRowsOf,
                              LORA_JAX_ON_STREAM.Arg<BF16>()
                                  .Arg<S32>()
                                  .Arg<BF16>()
                                  .Arg<BF16>()
                                  .Arg<BF16>()
                                  .Arg<BF16>()
                                  .Arg<BF16>()
                                  .Arg<BF16>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<BF16>()
                                  .Ret<BF16>()
                                  .Ret<BF16>(),
                              {ffi::Traits::kCmdBufferCompatible});
