// Host entry point of the emulated products for few rows, over plain arrays.
#include "grouped_matmul/few_rows_affine_launch.cuh"

#include "driver.cuh"

extern "C" {

// shape: rows, groups, d_out, d_in, scale groups, value of code 0.
int few_rows(const Bf16* x, const void* gate, const void* up, const void* gate_scales, const void* up_scales,
             const void* gate_zeros, const void* up_zeros, int narrow, const float* table, const int* sizes, const Bf16* bias, const void* gate_addend, const void* up_addend,
             int wide, Bf16* y, Bf16* second, int gated, const int* shape, int coding) {
  FewRowsCall call{};
  FewRowsArgs& p = call.args;
  call.weights[0] = gate, call.weights[1] = up, call.gated = up && gated, call.count = up ? 2 : 1;
  p.matrices[0] = {gate_scales, gate_zeros, bias, gate_addend, y, shape[2], 0};
  p.matrices[1] = {up_scales, up_zeros, bias, up_addend, gated || !up ? nullptr : second, shape[2], 0};
  p.x = x, p.sizes = sizes, p.addends_wide = wide;
  p.rows = shape[0], p.groups = shape[1], p.d_in = shape[3], p.scale_groups = shape[4];
  p.scale_columns = shape[3] / shape[4];
  p.first = static_cast<float>(shape[5]), p.scales_narrow = narrow;
  std::memcpy(p.table, table, sizeof p.table);
  switch (static_cast<Coding>(coding)) {
    case Coding::kFloat8: return launch_few_rows<Coding::kFloat8, 128>(call, nullptr);
    case Coding::kInteger:
      return p.scale_columns == 64 ? launch_few_rows<Coding::kInteger, 64>(call, nullptr)
                                   : launch_few_rows<Coding::kInteger, 128>(call, nullptr);
    case Coding::kE2m1: return launch_few_rows<Coding::kE2m1, 32>(call, nullptr);
    case Coding::kAffine: return launch_affine(call, nullptr);
    case Coding::kPlain: return launch_plain(call, nullptr);
    default: return launch_few_rows<Coding::kTable, 64>(call, nullptr);
  }
}

}  // extern "C"
