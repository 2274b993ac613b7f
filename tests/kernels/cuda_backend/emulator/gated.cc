// Host entry points of the emulated kernels of an MLP's products with adapters, over plain arrays.
#include "lora_gemm/group_launch.cuh"
#include "lora_gemm/launch.cuh"
#include "lora_gemm/prefill_launch.cuh"
#include "silu_times/silu_times.cuh"

#include "driver.cuh"

// What an array of h holds before: nobody may add it up.
const Bf16 kUnwritten{0x7fc0};

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
  std::vector<Bf16> work(static_cast<size_t>(2) * rows * h_stride, kUnwritten);
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

// Segments of `least_rows` rows become tiles, of whose rows `tiled` comes back.
int lora_gated_tiles(Bf16* product, Bf16* y, const Bf16* x, const Bf16* a_pool, const Bf16* b_pool, const int* entries,
                     const float* scaling, const int* row_to_slot, const int* row_to_expert, const int* num_rows, int rows,
                     int d_out, int d_in, int a_rows, int b_rows, int slots, int max_rank, int least_rows, int* tiled) {
  std::vector<int> order(rows), cut(4, -1);
  std::vector<Item> items(rows), small(rows);
  std::vector<TileRecord> tiles(rows);
  int num_items = -1, num_small = -1;
  launch_metadata(MetadataArgs{row_to_slot, row_to_expert, rows, slots, 32, order.data(), items.data(), &num_items}, nullptr);
  launch_row_tiles(RowTilesArgs{items.data(), &num_items, order.data(), rows, least_rows, 1, 0, 0, rows, small.data(), &num_small,
                                tiles.data(), cut.data()},
                   nullptr);
  *tiled = 0;
  for (int i = 0; i < cut[0]; ++i) *tiled += tiles[i].expand.num_rows;
  const int h_stride = (max_rank + 7) / 8 * 8;
  std::vector<Bf16> work(static_cast<size_t>(4) * rows * h_stride, kUnwritten);
  CallState state{};
  PairArgs p{};
  for (int m = 0; m < 2; ++m)
    p.modules[m] = Module{entries + m * slots * 5, scaling + m * slots, y + static_cast<size_t>(m) * rows * d_out};
  p.items = small.data(), p.num_items = &num_small, p.row_order = order.data(), p.x = x, p.h = work.data();
  p.state = &state, p.live = &cut[2], p.num_modules = 2, p.num_rows = rows, p.num_slots = slots;
  p.d_in = d_in, p.d_out = d_out, p.h_stride = p.max_rank = h_stride, p.shrink = p.expand = p.accumulate = true;
  TileArgs t{};
  t.tiles = tiles.data(), t.cut = cut.data(), t.most_tiles = rows, t.row_order = order.data();
  std::copy(p.modules, p.modules + 2, t.modules), t.x = x, t.d_in = d_in, t.d_out = d_out, t.b_pool = b_pool;
  t.num_modules = 2, t.num_rows = rows, t.num_slots = slots, t.h_stride = t.max_rank = h_stride;
  t.h = p.h + work.size() / 2, t.shrink = t.accumulate = true;
  cudaError_t e = pool_maps(&p, 0, a_pool, a_rows, d_in, kWideA);
  if (e == cudaSuccess) e = pool_maps(&p, 1, b_pool, b_rows, d_out, kWideB);
  if (e == cudaSuccess) e = parts_maps(t.a_parts, a_pool, a_rows, d_in);
  if (e == cudaSuccess) e = launch_pair(p, nullptr);
  if (e == cudaSuccess) e = launch_tiles(t, nullptr);
  return e == cudaSuccess ? launch_gated_tiles({t, small.data(), &num_small, product, num_rows}, nullptr) : e;
}

// Maps of one x, whose widths and pools of B differ; apart: a launch of items of up to 32 rows for each.
int lora_joined(Bf16** ys, const Bf16* const* b_pools, const Bf16* x, const Bf16* a_pool, const int* entries,
                const float* scaling, const int* row_to_slot, const int* row_to_expert, const int* widths, int modules, int rows,
                int d_in, int a_rows, int b_rows, int slots, int max_rank, int apart) {
  std::vector<int> order(rows);
  std::vector<Item> items(rows);
  int num_items = -1;
  launch_metadata(MetadataArgs{row_to_slot, row_to_expert, rows, slots, apart ? kMaxRows : kFewItemRows, order.data(),
                               items.data(), &num_items},
                  nullptr);
  const int h_stride = (max_rank + 7) / 8 * 8;
  std::vector<Bf16> work(static_cast<size_t>(modules) * rows * h_stride, kUnwritten);
  CallState state{};
  PairArgs p{};
  p.items = items.data(), p.num_items = &num_items, p.row_order = order.data(), p.x = x, p.h = work.data();
  p.state = &state, p.num_rows = rows, p.num_slots = slots, p.d_in = d_in, p.pools[0] = a_pool;
  p.h_stride = p.max_rank = h_stride, p.shrink = p.expand = p.accumulate = true, p.small_items = !apart;
  auto module = [&](int m) { return Module{entries + m * slots * 5, scaling + m * slots, ys[m], b_pools[m], widths[m]}; };
  if (!apart) {
    p.num_modules = modules;
    for (int m = 0; m < modules; ++m) p.modules[m] = module(m);
    return launch_joined(p, nullptr);
  }
  p.num_modules = 1;
  cudaError_t e = pool_maps(&p, 0, a_pool, a_rows, d_in, kWideA);
  for (int m = 0; m < modules && e == cudaSuccess; ++m) {
    p.modules[0] = module(m), p.d_out = widths[m];
    e = pool_maps(&p, 1, b_pools[m], b_rows, widths[m], kWideB);
    if (e == cudaSuccess) e = launch_pair(p, nullptr);
  }
  return e;
}

}  // extern "C"
