// Host entry points of grouped LoRA's emulated kernels, over plain arrays; what csrc/*.cu does for XLA.
#include "lora_gemm/launch.cuh"
#include "reroute/reroute.cuh"
#include "lora_gemm/segments_launch.cuh"
#include "lora_gemm/prefill_launch.cuh"

#include "driver.cuh"

extern "C" {

// In one launch, or the shrink before the expand.
int lora(Bf16* y, const Bf16* x, const Bf16* a_pool, const Bf16* b_pool, const int* entries, const float* scaling,
         const int* row_to_slot, const int* row_to_expert, int modules, int rows, int d_out, int d_in, int a_rows,
         int b_rows, int slots, int max_rank, int item_rows, int accumulate, int launches_before, int apart) {
  std::vector<int> order(rows);
  std::vector<Item> items(rows);
  int num_items = -1;
  launch_metadata(MetadataArgs{row_to_slot, row_to_expert, rows, slots, item_rows, order.data(), items.data(), &num_items},
                  nullptr);
  const int h_stride = (max_rank + 7) / 8 * 8;
  std::vector<Bf16> work(static_cast<size_t>(modules) * rows * h_stride);
  CallState state{};
  PairArgs p{};
  for (int m = 0; m < modules; ++m)
    p.modules[m] = Module{entries + m * slots * 5, scaling + m * slots, y + static_cast<size_t>(m) * rows * d_out};
  p.items = items.data(), p.num_items = &num_items, p.row_order = order.data(), p.x = x, p.h = work.data();
  p.state = &state, p.num_modules = modules, p.num_rows = rows, p.num_slots = slots;
  p.d_in = d_in, p.d_out = d_out, p.h_stride = p.max_rank = h_stride, p.shrink = p.expand = true, p.accumulate = accumulate;
  p.small_items = item_rows <= kFewItemRows;
  cudaError_t e = pool_maps(&p, 0, a_pool, a_rows, d_in, kWideA);
  if (e == cudaSuccess) e = pool_maps(&p, 1, b_pool, b_rows, d_out, kWideB);
  // The call's launches before, of other rows, leave it a state and their h.
  PairArgs last = p;
  std::vector<Bf16> others(static_cast<size_t>(modules) * rows * d_out), other_x(static_cast<size_t>(rows) * d_in);
  p.x = other_x.data();
  for (int m = 0; m < modules; ++m) p.modules[m].y = others.data() + static_cast<size_t>(m) * rows * d_out;
  for (int n = 0; n < launches_before && e == cudaSuccess; ++n) e = launch_pair(p, nullptr);
  if (e == cudaSuccess && apart) {
    last.expand = false;
    e = launch_pair(last, nullptr);
    last.expand = true, last.shrink = false;
  }
  return e == cudaSuccess ? launch_pair(last, nullptr) : e;
}

// Of rows that stand by slot, with items of up to 32 rows.
int lora_segments(Bf16* y, const Bf16* x, const Bf16* a_pool, const Bf16* b_pool, const int* entries, const float* scaling,
                  const int* row_to_slot, const int* row_to_expert, int modules, int rows, int d_out, int d_in, int a_rows,
                  int b_rows, int slots, int max_rank) {
  std::vector<int> order(rows);
  std::vector<Item> items(rows);
  int num_items = -1;
  launch_metadata(MetadataArgs{row_to_slot, row_to_expert, rows, slots, kMaxRows, order.data(), items.data(), &num_items},
                  nullptr);
  PairArgs p{};
  for (int m = 0; m < modules; ++m)
    p.modules[m] = Module{entries + m * slots * 5, scaling + m * slots, y + static_cast<size_t>(m) * rows * d_out};
  p.items = items.data(), p.num_items = &num_items, p.x = x;
  p.num_modules = modules, p.num_rows = rows, p.num_slots = slots, p.accumulate = true;
  p.d_in = d_in, p.d_out = d_out, p.max_rank = max_rank;
  cudaError_t e = pool_maps(&p, 0, a_pool, a_rows, d_in, kWideA);
  if (e == cudaSuccess) e = pool_maps(&p, 1, b_pool, b_rows, d_out, kWideB);
  return e == cudaSuccess ? launch_segments(p, nullptr) : e;
}

// Expands ones by a B of ones, so that rows of items become their rank; the items are given as the kernels
// keep them, all of slot 0.
int lora_ones(Bf16* y, const Item* items, const int* num_items, const int* order, int rows, int d_out) {
  const int rank = 8, entries[] = {0, 0, rank, 0, 0};
  const float scaling = 1.f;
  const Bf16 one = __float2bfloat16(1.f);
  std::vector<Bf16> h(static_cast<size_t>(rows) * kMaxRank, one), b_pool(static_cast<size_t>(rank) * d_out, one);
  CallState state{};
  PairArgs p{};
  p.modules[0] = Module{entries, &scaling, y}, p.items = items, p.num_items = num_items, p.row_order = order;
  p.h = h.data(), p.state = &state, p.num_modules = p.num_slots = 1, p.num_rows = rows, p.d_out = d_out;
  p.h_stride = p.max_rank = kMaxRank, p.expand = p.zeros_if_idle = true;
  const cudaError_t e = pool_maps(&p, 1, b_pool.data(), rank, d_out, kWideB);
  return e == cudaSuccess ? launch_pair(p, nullptr) : e;
}

// Segments of `least_rows` rows become tiles, the others stay in items; how many rows those have comes
// back in `left`. In one call, with the tiles last where it is not its first, or the shrink before the expand.
int lora_tiles(Bf16* y, const Bf16* x, const Bf16* a_pool, const Bf16* b_pool, const int* entries, const float* scaling,
               const int* row_to_slot, const int* row_to_expert, int modules, int rows, int d_out, int d_in, int a_rows, int b_rows,
               int slots, int max_rank, int least_rows, int least_total, int accumulate, int launches_before, int apart,
               int* left) {
  std::vector<int> order(rows), cut(4, -1);
  std::vector<Item> items(rows), small(rows);
  std::vector<TileRecord> tiles(rows);
  int num_items = -1, num_small = -1;
  launch_metadata(MetadataArgs{row_to_slot, row_to_expert, rows, slots, 32, order.data(), items.data(), &num_items}, nullptr);
  launch_row_tiles(RowTilesArgs{items.data(), &num_items, order.data(), rows, least_rows, least_total, 0, 0, rows, small.data(), &num_small,
                                tiles.data(), cut.data()},
                   nullptr);
  *left = 0;
  for (int i = 0; i < num_small; ++i) *left += small[i].num_rows;
  const int h_stride = (max_rank + 7) / 8 * 8;
  std::vector<Bf16> work(static_cast<size_t>(2) * modules * rows * h_stride);
  CallState state{};
  PairArgs p{};
  for (int m = 0; m < modules; ++m)
    p.modules[m] = Module{entries + m * slots * 5, scaling + m * slots, y + static_cast<size_t>(m) * rows * d_out};
  p.items = small.data(), p.num_items = &num_small, p.row_order = order.data();
  p.x = x, p.h = work.data(), p.state = &state, p.live = &cut[2];
  p.num_modules = modules, p.num_rows = rows, p.num_slots = slots, p.accumulate = accumulate;
  p.d_in = d_in, p.d_out = d_out, p.h_stride = p.max_rank = h_stride;
  TileArgs t{};
  t.tiles = tiles.data(), t.cut = cut.data(), t.most_tiles = rows, t.row_order = order.data();
  std::copy(p.modules, p.modules + modules, t.modules), t.x = x, t.d_in = d_in, t.d_out = d_out;
  t.num_modules = modules, t.num_rows = rows, t.num_slots = slots, t.h_stride = t.max_rank = h_stride, t.accumulate = accumulate;
  t.h = p.h + (apart ? 0 : work.size() / 2);
  cudaError_t e = pool_maps(&p, 0, a_pool, a_rows, d_in, kWideA);
  if (e == cudaSuccess) e = pool_maps(&p, 1, b_pool, b_rows, d_out, kWideB);
  if (e == cudaSuccess) e = parts_maps(t.a_parts, a_pool, a_rows, d_in);
  t.b_boxes = p.maps[1][1];
  std::vector<Bf16> others(static_cast<size_t>(modules) * rows * d_out), other_x(static_cast<size_t>(rows) * d_in);
  for (int n = 0; n < launches_before && e == cudaSuccess; ++n) {
    PairArgs q = p;
    TileArgs u = t;
    q.x = u.x = other_x.data(), q.shrink = u.shrink = q.expand = u.expand = true;
    for (int m = 0; m < modules; ++m) q.modules[m].y = u.modules[m].y = others.data() + static_cast<size_t>(m) * rows * d_out;
    e = launch_with_tiles(q, u, true, nullptr);
  }
  for (int step = 0; step <= apart; ++step) {
    p.shrink = t.shrink = step == 0, p.expand = t.expand = step == apart;
    if (e == cudaSuccess) e = launch_with_tiles(p, t, launches_before > 0, nullptr);
  }
  return e;
}

}  // extern "C"
