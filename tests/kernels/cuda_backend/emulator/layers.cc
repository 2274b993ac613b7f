// Host entry points of the emulated kernels around grouped LoRA and attention, over plain arrays; what csrc/*.cu does for XLA.
#include "choose_experts/choose_experts.cuh"
#include "keep_likely/keep_likely.cuh"
#include "grouped_matmul/f32_parts_launch.cuh"
#include "grouped_matmul/grouped_f32_launch.cuh"
#include "lora_gemm/rows.cuh"
#include "layer_norm/layer_norm.cuh"
#include "merge/merge.cuh"
#include "place_heads/place_heads.cuh"
#include "reroute/reroute.cuh"
#include "rms_norm/rms_norm.cuh"
#include "silu_times/silu_times.cuh"
#include "take_rows/take_rows.cuh"

#include "driver.cuh"

template <class X>
int grouped_f32_as(const void* x, const float* w, const int* sizes, const float* bias, const int* s, float* y) {
  const GroupedF32Args<X> p{static_cast<const X*>(x), w, sizes, bias, y, s[0], s[1], s[2], s[3]};
  return s[4] < 0 ? launch_grouped_f32(p, nullptr) : launch_grouped_f32_as(static_cast<F32Form>(s[4]), p, nullptr);
}

extern "C" {

int merge(Bf16* out, const Bf16* w, const Bf16* a_pool, const Bf16* b_pool, const int* sites, const float* scaling,
          int matrices, int d_out, int d_in, int max_rank, int b_rows) {
  const MergeArgs args{out, w, a_pool, b_pool, sites, scaling, matrices, d_out, d_in, max_rank, b_rows};
  return launch_merge(args, nullptr);
}

// Of matrices that lie apart, in two groups, the first of `first`; results stand the other way round.
int merge_placed(Bf16* out, const Bf16* w, const Bf16* a_pool, const Bf16* b_pool, const int* sites,
                 const float* scaling, const int* sizes) {
  const int matrices = sizes[0], d_out = sizes[1], d_in = sizes[2], max_rank = sizes[3], first = sizes[5];
  std::vector<CUtensorMap> maps(2 * matrices);
  for (int64_t i = 0, one = static_cast<int64_t>(d_out) * d_in; i < matrices; ++i)
    if (auto e = merge_places(&maps[2 * i], out + (matrices - 1 - i) * one, w + i * one, d_out, d_in, max_rank)) return e;
  const MergeArgs all{nullptr, nullptr, a_pool, b_pool, sites, scaling, matrices, d_out, d_in, max_rank, sizes[4]};
  MergeArgs groups[] = {all, all};
  groups[0].matrices = first, groups[1].matrices = matrices - first;
  return launch_merge_placed(maps.data(), groups, 2, nullptr);
}

// shape: rows, groups, d_out, d_in, the form or -1 for the one that is chosen, 1 for x in bfloat16.
int grouped_f32(const void* x, const float* w, const int* sizes, const float* bias, const int* shape, float* y) {
  return shape[5] ? grouped_f32_as<Bf16>(x, w, sizes, bias, shape, y) : grouped_f32_as<float>(x, w, sizes, bias, shape, y);
}

// shape: rows, d_out, d_in, the form or -1 for the one that is chosen.
int f32_parts(const Bf16* x, const float* w, const int* num_rows, const float* bias, const int* s, float* y) {
  const F32PartsArgs p{x, w, num_rows, bias, y, s[0], s[1], s[2]};
  return s[3] < 0 ? launch_f32_parts(p, nullptr) : launch_f32_parts_as(static_cast<PartsForm>(s[3]), p, nullptr);
}

int rms_norm(const Bf16* x, const Bf16* addend, const Bf16* weight, int rows, int size, float eps, Bf16* sum, Bf16* y) {
  return launch_rms_norm(RmsNormArgs{x, addend, weight, sum, y, rows, size, eps}, nullptr);
}

int layer_norm(const Bf16* x, const Bf16* weight, const Bf16* bias, int rows, int size, float eps, Bf16* y) {
  return launch_layer_norm(LayerNormArgs{x, weight, bias, y, rows, size, eps}, nullptr);
}

int choose_experts(const float* logits, const int* sizes, float scale, float* weights, int* ids) {
  return launch_choose_experts(
      ChooseExpertsArgs{logits, weights, ids, sizes[0], sizes[1], sizes[2], sizes[3] != 0, sizes[4] != 0, scale},
      nullptr);
}

int silu_times(const Bf16* gate, const Bf16* up, const int* num_rows, Bf16* y, int rows, int width) {
  const auto* gates = reinterpret_cast<const uint4*>(gate);
  const auto* ups = reinterpret_cast<const uint4*>(up);
  return launch_silu_times({gates, ups, num_rows, reinterpret_cast<uint4*>(y), rows, width / 8}, nullptr);
}

int take_rows(const float* x, const int* row_to_row, const int* num_rows, float* y, int rows, int units) {
  return launch_take_rows(TakeRowsArgs{reinterpret_cast<const uint4*>(x), row_to_row, num_rows,
                                       reinterpret_cast<uint4*>(y), rows, units},
                          nullptr);
}

int keep_likely(const float* logits, const float* min_p, const int* top_k, const float* top_p, int rows, int vocab,
                float* least) {
  return launch_keep_likely(KeepLikelyArgs{logits, min_p, top_k, top_p, least, rows, vocab}, nullptr);
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

}  // extern "C"
