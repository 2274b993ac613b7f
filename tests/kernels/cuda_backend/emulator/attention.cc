// Host entry points of attention's emulated kernels, over plain arrays; what csrc/*.cu does for XLA.
#include "lora_gemm/launch.cuh"
#include "paged_attention/plain.cuh"

#include "driver.cuh"

extern "C" {

struct Sizes {
  int tokens, num_tokens, q_heads, kv_heads, k_dim, v_dim, pages, page_size, max_pages;
  int chunk, max_chunks, window, cta_heads, token_groups, unit_tokens, many_tokens, part_rows;
};

// `dtype`: 0 the tensor cores' kernels, 3 those of pages in 8 bits, 1 the plain one of bfloat16, 2 of float32; `token_groups` are its rows.
int attention(const void* q, const void* k, const void* v, const int* tables, const int* token_to_seq,
              const int* positions, const float* sinks, void* out, const Sizes* s, float scale, int dtype) {
  std::vector<AttentionUnit> units(s->tokens + s->part_rows * s->max_chunks);
  std::vector<int2> part_tokens(s->part_rows, int2{-7, -7});
  int num_units[2] = {-1, -1};
  launch_attention_units(
      AttentionUnitsArgs{token_to_seq, positions, &s->num_tokens, s->tokens, s->unit_tokens, s->many_tokens, s->chunk,
                         s->window, s->part_rows, units.data(), part_tokens.data(), num_units},
      nullptr);
  const size_t parts = static_cast<size_t>(s->part_rows) * s->max_chunks * s->q_heads;
  std::vector<float> part_o(parts * s->v_dim, NAN);
  std::vector<float2> part_ml(parts, float2{NAN, NAN});
  PlainArgs a{};
  AttentionArgs& p = a.p;
  p.q = static_cast<const Bf16*>(q), p.block_tables = tables, p.num_tokens = &s->num_tokens, p.sinks = sinks;
  p.units = units.data(), p.part_tokens = part_tokens.data(), p.num_units = num_units;
  p.out = static_cast<Bf16*>(out);
  p.part_o = part_o.data(), p.part_ml = part_ml.data(), p.tokens = s->tokens, p.q_heads = s->q_heads;
  p.kv_heads = s->kv_heads, p.k_dim = s->k_dim, p.v_dim = s->v_dim, p.page_size = s->page_size;
  p.max_pages = s->max_pages, p.chunk = s->chunk, p.max_chunks = s->max_chunks, p.part_rows = s->part_rows;
  p.window = s->window, p.cta_heads = s->cta_heads, p.token_groups = s->token_groups;
  p.scale_log2 = scale * 1.4426950408889634f;
  a.k_pages = k, a.v_pages = v;
  if (dtype == 1) return launch_plain_attention<Bf16>(a, s->token_groups, nullptr);
  if (dtype == 2) return launch_plain_attention<float>(a, s->token_groups, nullptr);
  if (dtype == 3) {
    p.k_rows = static_cast<const uint8_t*>(k), p.v_rows = static_cast<const uint8_t*>(v);
    const cudaError_t e = launch_attention(p, v == nullptr, nullptr);
    return e == cudaSuccess ? launch_combine<Bf16>(p, nullptr) : e;
  }
  return launch_paged(p, k, v, s->pages, s->many_tokens > 0, nullptr);
}

}  // extern "C"
