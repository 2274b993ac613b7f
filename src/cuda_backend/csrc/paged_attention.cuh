// Paged attention for decode and chunked prefill: softmax(scale q k^T) v over block tables.
//
// One persistent CTA per SM. A producer warp brings 16 positions of some or all kv heads per stage by
// two tensor copies; a consumer warp owns one kv head, up to 128 columns of V and up to 16 rows (tokens
// x query heads of the kv head), the m16 operand of mma. A sequence is cut into chunks at fixed
// positions, so a token's result depends on nothing but its own sequence; chunks are put together in
// their order by combine_kernel.
#pragma once
#include "attention_units.cuh"

namespace lora_jax {

struct AttentionArgs {
  CUtensorMap k_map, v_map;  // boxes of 16 positions x cta_heads, see page_map
  const __nv_bfloat16* q;    // [tokens, q_heads, k_dim]
  const int* block_tables;   // [seqs, max_pages]
  const int* token_to_seq;   // [tokens]
  const int* positions;      // [tokens]
  const int* num_tokens;     // [1]
  const float* sinks;        // [q_heads] or none
  const AttentionUnit* units;
  const int* num_units;
  __nv_bfloat16* out;        // [tokens, q_heads, v_dim]
  float* part_o;             // [tokens, max_chunks, q_heads, v_dim]: sums not yet divided
  float2* part_ml;           // [tokens, max_chunks, q_heads]: largest logit, sum of exponentials
  int tokens, q_heads, kv_heads, k_dim, v_dim;
  int page_size, max_pages, chunk, max_chunks, window;
  int cta_heads, head_groups;  // kv heads of a CTA's share of a unit; how many shares there are
  int slices, token_groups;    // of V's columns; of tokens
  int stages, k_bytes, v_bytes;
  bool latent;               // V is the first columns of K
  float scale_log2;          // scale / ln 2
};

constexpr int kTile = 16;  // positions of a stage
constexpr int kMostStages = 8;
constexpr int kMostConsumers = 8;  // warps
constexpr float kNone = -INFINITY;

struct AttentionShared {
  uint64_t full[kMostStages], empty[kMostStages];
};
constexpr int kAttentionHeader = 1024;  // barriers; the stages begin on a boundary of the swizzle

__host__ __device__ inline int q_stride(int k_dim) { return k_dim * 2 + 16; }  // lanes meet distinct banks

__device__ __forceinline__ uint32_t pack_bf16(float lo, float hi) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
  return *reinterpret_cast<const uint32_t*>(&v);
}
// Stages come round; their number is known at launch only.
struct StageRing {
  int at = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next(int stages) {
    if (++at == stages) at = 0, phase ^= 1;
  }
};

// The tiles of 16 positions of a unit: those of its chunk that one of its tokens sees.
struct Tiles {
  int begin, end;
  __device__ __forceinline__ Tiles(const AttentionArgs& p, const AttentionUnit& u) {
    const int last = u.position + u.num_tokens - 1;
    const int first = p.window > 0 ? max(0, u.position - p.window + 1) : 0;
    begin = max(u.chunk * p.chunk, first) / kTile;
    end = min((u.chunk + 1) * p.chunk, last + 1 + kTile - 1) / kTile;
  }
};

// Share i of the work is a unit and a group of kv heads.
__device__ __forceinline__ AttentionUnit load_unit(const AttentionArgs& p, int share, int num_shares) {
  if (share >= num_shares) return AttentionUnit{};
  const int4 v = __ldg(reinterpret_cast<const int4*>(p.units) + share / p.head_groups);
  return AttentionUnit{v.x, v.y, v.z, v.w};
}

// ---------------------------------------------------------------- producer warp
__device__ __forceinline__ void produce_pages(const AttentionArgs& p, AttentionShared& sm, uint32_t stages) {
  const int lane = threadIdx.x & 31, num_shares = *p.num_units * p.head_groups;
  StageRing ring;
  AttentionUnit unit = load_unit(p, blockIdx.x, num_shares);
  for (int i = blockIdx.x; i < num_shares; i += gridDim.x) {
    const AttentionUnit next = load_unit(p, i + gridDim.x, num_shares);
    const int* table = p.block_tables + static_cast<int64_t>(__ldg(p.token_to_seq + unit.token)) * p.max_pages;
    const Tiles tiles(p, unit);
    const int head = i % p.head_groups * p.cta_heads;
    for (int base = tiles.begin; base < tiles.end; base += 32) {
      const int mine = min(base + lane, tiles.end - 1) * kTile;
      const int page = __ldg(table + mine / p.page_size);
      for (int tile = base; tile < min(base + 32, tiles.end); ++tile) {
        const int from = __shfl_sync(~0u, page, tile - base);
        mbar_wait(&sm.empty[ring.at], ring.phase ^ 1);
        if (lane == 0) {
          const uint32_t stage = stages + ring.at * (p.k_bytes + p.v_bytes);
          const int place = tile * kTile % p.page_size;
          mbar_expect(&sm.full[ring.at], p.k_bytes + p.v_bytes);
          page_copy(stage, &p.k_map, place, head, from, &sm.full[ring.at]);
          if (!p.latent) page_copy(stage + p.k_bytes, &p.v_map, place, head, from, &sm.full[ring.at]);
        }
        __syncwarp();
        ring.next(p.stages);
      }
    }
    unit = next;
  }
}

// ---------------------------------------------------------------- consumer warps
// What a warp works on, and what its lane holds of it: rows g and g + 8 of the 16.
template <int NT>
struct Consumer {
  const AttentionArgs& p;
  int head, slice, group, heads_per_kv, unit_tokens;  // head: of the CTA's
  uint32_t q, k_at, v_at;  // of this warp's rows and head
  float o[NT][4], top[2], sum[2];

  __device__ __forceinline__ Consumer(const AttentionArgs& p, uint32_t q_base) : p(p) {
    const int warp = threadIdx.x >> 5;
    slice = warp % p.slices, head = warp / p.slices % p.cta_heads, group = warp / (p.slices * p.cta_heads);
    heads_per_kv = p.q_heads / p.kv_heads, unit_tokens = 16 / heads_per_kv;
    q = q_base + (group * p.cta_heads + head) * 16 * q_stride(p.k_dim);
    k_at = head * (p.k_bytes / p.cta_heads);
    v_at = (p.latent ? k_at : p.k_bytes + head * (p.v_bytes / p.cta_heads));
  }

  __device__ __forceinline__ int token_of(int row) const { return group * unit_tokens + row / heads_per_kv; }
  __device__ __forceinline__ bool has(const AttentionUnit& u, int row) const {
    return row < unit_tokens * heads_per_kv && token_of(row) < u.num_tokens;
  }

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) o[n][e] = 0;
    top[0] = top[1] = kNone, sum[0] = sum[1] = 0;
  }

  // s[n][e]: logits of row g (+ 8 from e = 2 on) at position n * 8 + q * 2 + e % 2 of the tile.
  __device__ __forceinline__ void logits(uint32_t stage, float (&s)[2][4]) const {
    const int lane = threadIdx.x & 31, position = (lane >> 4) * 8 + (lane & 7);
    const uint32_t rows = q + (lane & 15) * q_stride(p.k_dim) + (lane >> 4) * 16;
    const uint32_t keys = stage + k_at + position * 128;
#pragma unroll 4
    for (int k = 0; k < p.k_dim / 16; ++k) {
      const int piece = k * 2 + ((lane >> 3) & 1);
      uint32_t a[4], b[4];
      ldmatrix(a, rows + k * 32);
      ldmatrix(b, keys + (piece >> 3) * 2048 + (((piece & 7) ^ (position & 7)) << 4));
      mma_bf16(s[0], a[0], a[1], a[2], a[3], b[0], b[1]);
      mma_bf16(s[1], a[0], a[1], a[2], a[3], b[2], b[3]);
    }
  }

  // Turns logits into exponentials against the running maximum; o and sum follow it.
  __device__ __forceinline__ void soften(float (&s)[2][4], int first, const int (&position)[2]) {
    const int q2 = (threadIdx.x & 3) * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most = kNone;
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int at = first + n * 8 + q2 + e;
          const bool seen = at <= position[r] && (p.window <= 0 || at > position[r] - p.window);
          float& v = s[n][r * 2 + e];
          v = seen ? v * p.scale_log2 : kNone;
          most = fmaxf(most, v);
        }
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(fmaxf(most, __shfl_xor_sync(~0u, most, 2)), top[r]);
      const float base = most == kNone ? 0.f : most, shrink = exp2f(top[r] - base);
      top[r] = most, sum[r] *= shrink;
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& v = s[n][r * 2 + e];
          v = exp2f(v - base);
          sum[r] += v;
        }
#pragma unroll
      for (int n = 0; n < NT; ++n) o[n][r * 2] *= shrink, o[n][r * 2 + 1] *= shrink;
    }
  }

  // o += p v; positions outside [low, high] of the tile hold anything, so their V counts as zero.
  __device__ __forceinline__ void add_values(uint32_t stage, const float (&s)[2][4], int low, int high) {
    const int lane = threadIdx.x & 31, position = ((lane >> 3) & 1) * 8 + (lane & 7), q2 = (lane & 3) * 2;
    const uint32_t a0 = pack_bf16(s[0][0], s[0][1]), a1 = pack_bf16(s[0][2], s[0][3]);
    const uint32_t a2 = pack_bf16(s[1][0], s[1][1]), a3 = pack_bf16(s[1][2], s[1][3]);
    const uint32_t values = stage + v_at + position * 128;
    const bool whole = low <= 0 && high >= kTile - 1;
    auto mask = [&](int at) {
      return (at >= low && at <= high ? 0xffffu : 0u) | (at + 1 >= low && at + 1 <= high ? 0xffff0000u : 0u);
    };
    const uint32_t near = mask(q2), far = mask(q2 + 8);
#pragma unroll
    for (int n = 0; n < NT; n += 2) {
      const int piece = slice * 16 + n + (lane >> 4);
      uint32_t b[4];
      ldmatrix_trans(b, values + (piece >> 3) * 2048 + (((piece & 7) ^ (position & 7)) << 4));
      if (!whole) b[0] &= near, b[1] &= far, b[2] &= near, b[3] &= far;
      mma_bf16(o[n], a0, a1, a2, a3, b[0], b[1]);
      mma_bf16(o[n + 1], a0, a1, a2, a3, b[2], b[3]);
    }
  }

  // Writes a row: the result if this chunk is all that its token sees, else its part of it.
  __device__ __forceinline__ void store(const AttentionUnit& u, int first_head, int r, float total) const {
    const int lane = threadIdx.x & 31, row = (lane >> 2) + r * 8;
    if (!has(u, row)) return;
    const int offset = token_of(row), token = u.token + offset;
    const int h = (first_head + head) * heads_per_kv + row % heads_per_kv;
    const ChunkRange range(u.position + offset, p.window, p.chunk);
    if (u.chunk < range.first || u.chunk > range.last) return;
    const int column = slice * 128 + (lane & 3) * 2;
    if (range.first == range.last) {
      if (p.sinks) total += exp2f(__ldg(p.sinks + h) * 1.4426950408889634f - top[r]);
      __nv_bfloat16* to = p.out + (static_cast<int64_t>(token) * p.q_heads + h) * p.v_dim + column;
#pragma unroll
      for (int n = 0; n < NT; ++n)
        *reinterpret_cast<uint32_t*>(to + n * 8) = pack_bf16(o[n][r * 2] / total, o[n][r * 2 + 1] / total);
    } else {
      const int64_t part = (static_cast<int64_t>(token) * p.max_chunks + u.chunk) * p.q_heads + h;
      if (slice == 0 && (lane & 3) == 0) p.part_ml[part] = make_float2(top[r], total);
#pragma unroll
      for (int n = 0; n < NT; ++n)
        *reinterpret_cast<float2*>(p.part_o + part * p.v_dim + column + n * 8) =
            make_float2(o[n][r * 2], o[n][r * 2 + 1]);
    }
  }
};

// Brings the unit's queries into shared memory; rows of no token become zeros.
__device__ __forceinline__ void load_queries(const AttentionArgs& p, const AttentionUnit& u, int first_head,
                                             unsigned char* q, int threads) {
  const int pieces = p.k_dim / 8, heads_per_kv = p.q_heads / p.kv_heads, unit_tokens = 16 / heads_per_kv;
  for (int i = threadIdx.x; i < p.token_groups * p.cta_heads * 16 * pieces; i += threads) {
    const int piece = i % pieces, row = i / pieces % 16, head = i / pieces / 16 % p.cta_heads;
    const int offset = i / pieces / 16 / p.cta_heads * unit_tokens + row / heads_per_kv;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (row < unit_tokens * heads_per_kv && offset < u.num_tokens) {
      const int h = (first_head + head) * heads_per_kv + row % heads_per_kv;
      const int64_t at = static_cast<int64_t>(u.token + offset) * p.q_heads + h;
      v = __ldg(reinterpret_cast<const uint4*>(p.q + at * p.k_dim) + piece);
    }
    *reinterpret_cast<uint4*>(q + i / pieces * q_stride(p.k_dim) + piece * 16) = v;
  }
}

template <int NT>
__device__ __forceinline__ void consume_pages(const AttentionArgs& p, AttentionShared& sm, uint32_t stages,
                                              unsigned char* q, int threads) {
  const int lane = threadIdx.x & 31, num_shares = *p.num_units * p.head_groups;
  Consumer<NT> own(p, smem_u32(q));
  StageRing ring;
  AttentionUnit unit = load_unit(p, blockIdx.x, num_shares);
  for (int i = blockIdx.x; i < num_shares; i += gridDim.x) {
    const AttentionUnit next = load_unit(p, i + gridDim.x, num_shares);
    consumer_barrier(threads);  // nobody reads the queries of the unit before
    const int first_head = i % p.head_groups * p.cta_heads;
    load_queries(p, unit, first_head, q, threads);
    consumer_barrier(threads);
    own.reset();
    const Tiles tiles(p, unit);
    const int g = lane >> 2, last = unit.position + unit.num_tokens - 1;
    const int low = p.window > 0 ? unit.position - p.window + 1 : 0;
    const int position[2] = {unit.position + own.token_of(g), unit.position + own.token_of(g + 8)};
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
      mbar_wait(&sm.full[ring.at], ring.phase);
      const uint32_t stage = stages + ring.at * (p.k_bytes + p.v_bytes);
      float s[2][4] = {};
      own.logits(stage, s);
      own.soften(s, tile * kTile, position);
      own.add_values(stage, s, low - tile * kTile, last - tile * kTile);
      __syncwarp();
      if (lane == 0) mbar_arrive(&sm.empty[ring.at]);
      ring.next(p.stages);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float total = own.sum[r];
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      own.store(unit, first_head, r, total);
    }
    unit = next;
  }
}

template <int NT>
__global__ void __launch_bounds__((kMostConsumers + 1) * 32, 1) attention_kernel(const __grid_constant__ AttentionArgs p) {
  extern __shared__ __align__(1024) unsigned char attention_raw[];
  auto& sm = *reinterpret_cast<AttentionShared*>(attention_raw);
  const int consumers = p.cta_heads * p.slices * p.token_groups;
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.stages; ++i) {
      mbar_init(&sm.full[i], 1);
      mbar_init(&sm.empty[i], consumers);
    }
    fence_barriers();
  }
  __syncthreads();
  const uint32_t stages = smem_u32(attention_raw) + kAttentionHeader;
  unsigned char* q = attention_raw + kAttentionHeader + p.stages * (p.k_bytes + p.v_bytes);
  if (static_cast<int>(threadIdx.x >> 5) < consumers) consume_pages<NT>(p, sm, stages, q, consumers * 32);
  else produce_pages(p, sm, stages);
}

// Puts the chunks of tokens that see several together, in order; one CTA a token, a warp a head.
// Padding tokens become zeros.
__global__ void __launch_bounds__(256) combine_kernel(const AttentionArgs p) {
  const int token = blockIdx.x, lane = threadIdx.x & 31, warps = blockDim.x / 32;
  const bool padding = token >= *p.num_tokens;
  const ChunkRange range(padding ? 0 : p.positions[token], p.window, p.chunk);
  if (!padding && range.first == range.last) return;
  for (int h = threadIdx.x >> 5; h < p.q_heads; h += warps) {
    __nv_bfloat16* to = p.out + (static_cast<int64_t>(token) * p.q_heads + h) * p.v_dim;
    const int64_t stride = p.q_heads, first = (static_cast<int64_t>(token) * p.max_chunks) * stride + h;
    float top = kNone, total = 0;
    if (!padding) {
      for (int c = range.first; c <= range.last; ++c) top = fmaxf(top, p.part_ml[first + c * stride].x);
      for (int c = range.first; c <= range.last; ++c) {
        const float2 ml = p.part_ml[first + c * stride];
        total += ml.y * exp2f(ml.x - top);
      }
      if (p.sinks) total += exp2f(p.sinks[h] * 1.4426950408889634f - top);
    }
    for (int column = lane * 2; column < p.v_dim; column += 64) {
      float x = 0, y = 0;
      if (!padding) {
        for (int c = range.first; c <= range.last; ++c) {
          const float weight = exp2f(p.part_ml[first + c * stride].x - top);
          const float2 v = *reinterpret_cast<const float2*>(p.part_o + (first + c * stride) * p.v_dim + column);
          x += weight * v.x, y += weight * v.y;
        }
        x /= total, y /= total;
      }
      *reinterpret_cast<uint32_t*>(to + column) = pack_bf16(x, y);
    }
  }
}

}  // namespace lora_jax
