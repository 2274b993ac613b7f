// Host entry point of the emulated dense maps of a batch, over plain arrays.
#include "dense_matmul/dense_rows_launch.cuh"

#include "driver.cuh"

extern "C" {

// sizes: rows, d_in, rows that are there, widths of up to three maps.
int dense_rows(const Bf16* x, const Bf16* w0, const Bf16* w1, const Bf16* w2, const Bf16* bias, const void* addend, int wide,
               Bf16* y0, Bf16* y1, Bf16* y2, const int* sizes) {
  const Bf16* weights[] = {w0, w1, w2};
  Bf16* ys[] = {y0, y1, y2};
  DenseRowsCall call{};
  for (int m = 0; m < kDenseMaps && weights[m]; ++m) {
    call.weights[m] = weights[m], call.count = m + 1;
    call.args.of[m] = {m ? nullptr : bias, m ? nullptr : addend, ys[m], sizes[3 + m], 0};
  }
  call.x = x, call.d_in = sizes[1];
  call.args.rows = sizes[0], call.args.num_rows = sizes + 2, call.args.addends_wide = wide;
  return launch_dense_rows(call, nullptr);
}

}  // extern "C"
