// Host entry points of the emulated kernels over rank rows of int8, over plain arrays; what csrc/*.cu does for XLA.
#include "lora_gemm/int8.cuh"
#include "lora_gemm/launch.cuh"
#include "lora_gemm/rows.cuh"

#include "driver.cuh"

extern "C" {

int lora_int8(Bf16* y, const Bf16* x, const int8_t* a_pool, const int8_t* b_pool, const int* entries,
              const float* scaling, const int* row_to_slot, const int* row_to_expert, int modules, int rows, int d_out,
              int d_in, int slots, int max_rank, int item_rows) {
  std::vector<int> order(rows);
  std::vector<Item> items(rows);
  int num_items = -1;
  const cudaError_t e = launch_metadata(
      MetadataArgs{row_to_slot, row_to_expert, rows, slots, item_rows, order.data(), items.data(), &num_items}, nullptr);
  std::vector<float> sums(static_cast<size_t>(int8_parts(d_in)) * modules * rows * int8_ranks(max_rank), NAN);
  Int8Args p{};
  for (int m = 0; m < modules; ++m)
    p.modules[m] = Module{entries + m * slots * 5, scaling + m * slots, y + static_cast<size_t>(m) * rows * d_out};
  p.items = items.data(), p.num_items = &num_items, p.row_order = order.data(), p.x = x;
  p.a_pool = a_pool, p.b_pool = b_pool, p.sums = sums.data();
  p.num_modules = modules, p.num_rows = rows, p.num_slots = slots;
  p.d_in = d_in, p.d_out = d_out, p.max_rank = max_rank;
  return e == cudaSuccess ? launch_int8(p, nullptr) : e;
}

int lora_rows(const void* x, const void* a_pool, const void* b_pool, const int* entries, const float* scaling,
              const int* row_to_slot, const int* row_to_expert, const int* sizes, void* y) {
  const LoraRowsArgs p{x, a_pool, b_pool, y, entries, scaling, row_to_slot, row_to_expert, sizes[0], sizes[1],
                       sizes[2], sizes[3], sizes[4]};
  if (sizes[5] == 0) return launch_lora_rows<float, float, int8_t>(p, nullptr);
  if (sizes[5] == 1) return launch_lora_rows<Bf16, float, int8_t>(p, nullptr);
  return launch_lora_rows<Bf16, Bf16, int8_t>(p, nullptr);
}

}  // extern "C"
