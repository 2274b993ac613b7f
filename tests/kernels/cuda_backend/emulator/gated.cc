// Host entry points of the emulated kernels of an MLP's products with adapters, over plain arrays.
#include "lora_gemm/decode_gated.cuh"
#include "lora_gemm/launch.cuh"
#include "silu_times/silu_times.cuh"

#include "driver.cuh"

extern "C" {

// Gate and up are y's two matrices. Apart: adapters are added to both, a launch of items of up to 32 rows, and then
// they are multiplied.
int lora_gated(Bf16* product, Bf16* y, const Bf16* x, const Bf16* a_pool, const Bf16* b_pool, const int* entries,
               const float* scaling, const int* row_to_slot, const int* row_to_expert, const int* num_rows, int rows,
               int d_out, int d_in, int a_rows, int b_rows, int slots, int max_rank, int apart) {
  std::vector<int> order(rows);
  std::vector<Item> items(rows);
  int num_items = -1;
  launch_metadata(MetadataArgs{row_to_slot, row_to_expert, rows, slots, apart ? kMaxRows : kFewItemRows, order.data(),
                               items.data(), &num_items},
                  nullptr);
  const int h_stride = (max_rank + 7) / 8 * 8;
  std::vector<Bf16> work(static_cast<size_t>(2) * rows * h_stride);
  CallState state{};
  GatedArgs args{};
  PairArgs& p = args.pair;
  args.y = product, args.num_rows = num_rows;
  Bf16* products[] = {y, y + static_cast<size_t>(rows) * d_out};
  for (int m = 0; m < 2; ++m) p.modules[m] = Module{entries + m * slots * 5, scaling + m * slots, products[m]};
  p.items = items.data(), p.num_items = &num_items, p.row_order = order.data(), p.x = x, p.h = work.data();
  p.state = &state, p.num_modules = 2, p.num_rows = rows, p.num_slots = slots, p.d_in = d_in, p.d_out = d_out;
  p.h_stride = p.max_rank = h_stride, p.shrink = p.expand = p.accumulate = true, p.small_items = !apart;
  p.pools[0] = a_pool, p.pools[1] = b_pool;
  if (!apart) {
    const cudaError_t e = launch_gated(args, nullptr);  // and as the call's second launch
    return e == cudaSuccess ? launch_gated(args, nullptr) : e;
  }
  cudaError_t e = pool_maps(&p, 0, a_pool, a_rows, d_in, kWideA);
  if (e == cudaSuccess) e = pool_maps(&p, 1, b_pool, b_rows, d_out, kWideB);
  if (e == cudaSuccess) e = launch_pair(p, nullptr);
  auto words = [](const Bf16* v) { return reinterpret_cast<const uint4*>(v); };
  const SiluTimesArgs silu{words(products[0]), words(products[1]), num_rows, reinterpret_cast<uint4*>(product), rows, d_out / 8};
  return e == cudaSuccess ? launch_silu_times(silu, nullptr) : e;
}

}  // extern "C"
