// Host entry points of the emulated kernels, over plain arrays; what csrc/*.cu does for XLA.
#include "choose_experts.cuh"
#include "grouped_f32.cuh"
#include "launch.cuh"
#include "lora_rows.cuh"
#include "merge.cuh"
#include "place_heads.cuh"
#include "plain_attention.cuh"
#include "reroute.cuh"
#include "rms_norm.cuh"
#include "segments_launch.cuh"
#include "tiles_launch.cuh"

using namespace lora_jax;
using Bf16 = __nv_bfloat16;

extern "C" {

void emulate(int sms, unsigned seed) { emu::machine.sms = sms, emu::machine.seed = seed; }

int merge(Bf16* w, const Bf16* a_pool, const Bf16* b_pool, const int* sites, const float* scaling, int matrices,
          int d_out, int d_in, int max_rank, int b_rows) {
  return launch_merge(MergeArgs{w, a_pool, b_pool, sites, scaling, matrices, d_out, d_in, max_rank, b_rows}, nullptr);
}

int grouped_f32(const float* x, const float* w, const int* sizes, const float* bias, int rows, int groups, int d_out,
                int d_in, float* y) {
  return launch_grouped_f32(GroupedF32Args{x, w, sizes, bias, y, rows, groups, d_out, d_in}, nullptr);
}

int rms_norm(const Bf16* x, const Bf16* addend, const Bf16* weight, int rows, int size, float eps, Bf16* sum, Bf16* y) {
  return launch_rms_norm(RmsNormArgs{x, addend, weight, sum, y, rows, size, eps}, nullptr);
}

int choose_experts(const float* logits, const int* sizes, float scale, float* weights, int* ids) {
  return launch_choose_experts(
      ChooseExpertsArgs{logits, weights, ids, sizes[0], sizes[1], sizes[2], sizes[3] != 0, sizes[4] != 0, scale},
      nullptr);
}

int place_heads(const Bf16* q, const Bf16* k, const Bf16* v, const float* cos, const float* sin, const Bf16* q_scale,
                const Bf16* k_scale, const int* token_to_place, const int* sizes, float eps, int places, Bf16* turned,
                Bf16* k_pages, Bf16* v_pages) {
  const PlaceHeadsArgs p{q, k, v, cos, sin, q_scale, k_scale, token_to_place, turned, k_pages, v_pages,
                         sizes[0], sizes[1], sizes[2], places, eps};
  return launch_place_heads(p, sizes[3], nullptr);
}

int lora_rows(const void* x, const void* a_pool, const void* b_pool, const int* entries,
              const float* scaling, const int* row_to_slot, const int* row_to_expert, const int* sizes, void* y) {
  const LoraRowsArgs p{x, a_pool, b_pool, y, entries, scaling, row_to_slot, row_to_expert, sizes[0], sizes[1],
                       sizes[2], sizes[3], sizes[4]};
  if (sizes[5] == 0) return launch_lora_rows<float, float>(p, nullptr);
  if (sizes[5] == 1) return launch_lora_rows<Bf16, float>(p, nullptr);
  return launch_lora_rows<Bf16, Bf16>(p, nullptr);
}

struct SortSizes {
  int num_tokens, tokens, k, slots, experts, groups, item_rows;
};

int reroute(const int* ids, const int* token_to_slot, const int* table, const int* token_order,
            const int* token_to_adapter, const SortSizes* s, int* order, int* inverse, int* sizes, int* row_to_token,
            int* row_to_expert, Item* items, int* num_items) {
  const int rows = s->tokens * s->k;
  const int ctas = (rows + kCountRows - 1) / kCountRows;
  std::vector<uint16_t> counts(ctas * (1 + kCountBlocks) * ((s->groups + 2) / 2 * 2));
  std::vector<uint32_t> owners(rows);
  return launch_reroute(RerouteArgs{ids, &s->num_tokens, token_to_slot, table, token_order, token_to_adapter, s->tokens,
                                    s->k, s->slots, s->experts, s->groups, s->item_rows, order, inverse, sizes,
                                    row_to_token, row_to_expert, items, num_items, counts.data(), owners.data()},
                        nullptr);
}

struct Sizes {
  int tokens, num_tokens, q_heads, kv_heads, k_dim, v_dim, pages, page_size, max_pages;
  int chunk, max_chunks, window, cta_heads, token_groups, unit_tokens, part_rows;
};

// `dtype`: 0 the tensor cores' kernels, 1 the plain one of bfloat16, 2 of float32; `token_groups` are its rows.
int attention(const void* q, const void* k, const void* v, const int* tables, const int* token_to_seq,
              const int* positions, const float* sinks, void* out, const Sizes* s, float scale, int dtype) {
  std::vector<AttentionUnit> units(s->tokens + s->part_rows * s->max_chunks);
  std::vector<int2> part_tokens(s->part_rows, int2{-7, -7});
  int num_units = -1;
  launch_attention_units(
      AttentionUnitsArgs{token_to_seq, positions, &s->num_tokens, s->tokens, s->unit_tokens, s->chunk, s->window,
                         s->part_rows, units.data(), part_tokens.data(), &num_units},
      nullptr);
  const size_t parts = static_cast<size_t>(s->part_rows) * s->max_chunks * s->q_heads;
  std::vector<float> part_o(parts * s->v_dim, NAN);
  std::vector<float2> part_ml(parts, float2{NAN, NAN});
  PlainArgs a{};
  AttentionArgs& p = a.p;
  p.q = static_cast<const Bf16*>(q), p.block_tables = tables, p.num_tokens = &s->num_tokens, p.sinks = sinks;
  p.units = units.data(), p.part_tokens = part_tokens.data(), p.num_units = &num_units;
  p.out = static_cast<Bf16*>(out);
  p.part_o = part_o.data(), p.part_ml = part_ml.data(), p.tokens = s->tokens, p.q_heads = s->q_heads;
  p.kv_heads = s->kv_heads, p.k_dim = s->k_dim, p.v_dim = s->v_dim, p.page_size = s->page_size;
  p.max_pages = s->max_pages, p.chunk = s->chunk, p.max_chunks = s->max_chunks, p.part_rows = s->part_rows;
  p.window = s->window, p.cta_heads = s->cta_heads, p.token_groups = s->token_groups;
  p.scale_log2 = scale * 1.4426950408889634f;
  a.k_pages = k, a.v_pages = v;
  if (dtype == 1) return launch_plain_attention<Bf16>(a, s->token_groups, nullptr);
  if (dtype == 2) return launch_plain_attention<float>(a, s->token_groups, nullptr);
  cudaError_t e = page_map(&p.k_map, k, s->pages, s->page_size, s->kv_heads, s->k_dim, s->cta_heads);
  if (e == cudaSuccess && v) e = page_map(&p.v_map, v, s->pages, s->page_size, s->kv_heads, s->v_dim, s->cta_heads);
  return e == cudaSuccess ? launch_attention(p, v == nullptr, nullptr) : e;
}

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
  p.h_stride = p.max_rank = kMaxRank, p.expand = true;
  const cudaError_t e = pool_maps(&p, 1, b_pool.data(), rank, d_out, kWideB);
  return e == cudaSuccess ? launch_pair(p, nullptr) : e;
}

// Segments of `least_rows` rows become tiles, the others stay in items; how many rows those have comes
// back in `left`. In one launch of each, or the shrink before the expand.
int lora_tiles(Bf16* y, const Bf16* x, const Bf16* a_pool, const Bf16* b_pool, const int* entries, const float* scaling,
               const int* row_to_slot, const int* row_to_expert, int modules, int rows, int d_out, int d_in, int a_rows, int b_rows,
               int slots, int max_rank, int least_rows, int least_total, int accumulate, int apart, int* left) {
  std::vector<int> order(rows), cut(3, -1);
  std::vector<Item> items(rows), small(rows), tiles(rows);
  int num_items = -1, num_small = -1;
  launch_metadata(MetadataArgs{row_to_slot, row_to_expert, rows, slots, 8, order.data(), items.data(), &num_items}, nullptr);
  launch_row_tiles(RowTilesArgs{items.data(), &num_items, rows, least_rows, least_total, 0, rows, small.data(), &num_small,
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
  t.num_modules = modules, t.num_rows = rows, t.h_stride = t.max_rank = h_stride, t.accumulate = accumulate;
  t.h = p.h + (apart ? 0 : work.size() / 2);
  cudaError_t e = pool_maps(&p, 0, a_pool, a_rows, d_in, kWideA);
  if (e == cudaSuccess) e = pool_maps(&p, 1, b_pool, b_rows, d_out, kWideB);
  if (e == cudaSuccess) e = parts_maps(t.a_parts, a_pool, a_rows, d_in);
  t.b_boxes = p.maps[1][1];
  for (int step = 0; step <= apart; ++step) {
    p.shrink = t.shrink = step == 0, p.expand = t.expand = step == apart;
    if (e == cudaSuccess) e = launch_with_tiles(p, t, nullptr);
  }
  return e;
}

}  // extern "C"
