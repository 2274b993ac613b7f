// Copies of pages to the warps of paged attention, and the partial results of a chunk of positions.
//
// One persistent CTA per SM. Producer warps fill a ring of slots with boxes of 16 positions by
// tensor copies; consumer warps work through units in step. A chunk's exponentials refer to a base of
// its own logits, and chunks are put together in their order by `fold`, in registers or, through
// memory, by combine_kernel: a token's result depends on nothing but its own sequence.
#pragma once
#include "device/arithmetic.cuh"
#include "paged_attention/units.cuh"

namespace lora_jax {

struct AttentionArgs {
  CUtensorMap k_map, v_map;  // boxes of 16 positions x cta_heads, see page_map
  const uint8_t *k_rows, *v_rows;  // instead of them: pages in 8 bits, see paged_attention/coded.cuh
  const __nv_bfloat16* q;    // [tokens, q_heads, k_dim]
  const int* block_tables;   // [seqs, max_pages]
  const int* num_tokens;     // [1]
  const float* sinks;        // [q_heads] or none
  const AttentionUnit* units;
  const int2* part_tokens;   // [part_rows]
  const int* num_units;      // [2]: units of few neighbours, and behind them those of many
  bool many;                 // whether these are the latter
  __nv_bfloat16* out;        // [tokens, q_heads, v_dim]
  float* part_o;             // [part_rows, max_chunks, q_heads, v_dim]: sums not yet divided
  float2* part_ml;           // [part_rows, max_chunks, q_heads]: base of the exponentials, their sum
  int tokens, q_heads, kv_heads, k_dim, v_dim;
  int page_size, max_pages, chunk, max_chunks, part_rows, window;
  int cta_heads, head_groups;  // kv heads of a CTA's share of a unit; how many shares there are
  int token_groups;            // groups of 16 rows (tokens x query heads of a kv head) of a unit
  int slots, slot_boxes, k_bytes, v_bytes;  // of the ring; bytes of a box
  int raw_boxes, raw_from;     // of pages in 8 bits, on their way; bytes of shared memory before them, behind the ring
  float scale_log2;            // scale / ln 2
};

constexpr int kBox = 16;  // positions
constexpr int kMostSlots = 12;
constexpr int kMostConsumers = 8;  // warps
constexpr int kMostCoders = 8, kMostRaw = 12;  // warps that turn pages in 8 bits; boxes on their way to each
constexpr int kAttentionThreads = (kMostConsumers + 4) * 32;  // whole warpgroups, for their registers
constexpr float kNone = -INFINITY;

struct AttentionShared {
  uint64_t full[kMostSlots], empty[kMostSlots];
  uint64_t raw[kMostCoders * kMostRaw];  // of pages in 8 bits, by the warp that turns them
};
constexpr int kAttentionHeader = 1024;  // barriers; the slots begin on a boundary of the swizzle
static_assert(sizeof(AttentionShared) <= kAttentionHeader);

// Slots come round; their number is known at launch only.
struct SlotRing {
  const AttentionArgs& p;
  AttentionShared& sm;
  uint32_t base;
  int at = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ SlotRing(const AttentionArgs& p, unsigned char* raw)
      : p(p), sm(*reinterpret_cast<AttentionShared*>(raw)), base(smem_u32(raw) + kAttentionHeader) {}
  __device__ __forceinline__ uint32_t address() const {
    return base + at * p.slot_boxes * (p.k_bytes + p.v_bytes);
  }
  __device__ __forceinline__ void next() {
    if (++at == p.slots) at = 0, phase ^= 1;
  }
};

// The shares of the work that a CTA takes: units x groups of kv heads. The list begins with the longest
// units; every other round goes backwards.
struct Shares {
  const AttentionArgs& p;
  const AttentionUnit* units;
  int count, round = 0;
  AttentionUnit ahead;

  __device__ __forceinline__ explicit Shares(const AttentionArgs& p)
      : p(p), units(p.units + (p.many ? __ldg(p.num_units) : 0)), count(__ldg(p.num_units + p.many) * p.head_groups) {
    ahead = load(0);
  }
  __device__ __forceinline__ int share(int r) const {
    return r * gridDim.x + (r & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  }
  __device__ __forceinline__ AttentionUnit load(int r) const {
    if (share(r) >= count) return AttentionUnit{};
    const int4* from = reinterpret_cast<const int4*>(units + share(r) / p.head_groups);
    const int4 a = __ldg(from), b = __ldg(from + 1);
    return AttentionUnit{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
  }
  // Gives the next share's unit and first kv head; false at the end.
  __device__ __forceinline__ bool next(AttentionUnit& unit, int& first_head) {
    if (round * static_cast<int>(gridDim.x) >= count) return false;
    unit = ahead, first_head = share(round) % p.head_groups * p.cta_heads;
    ahead = load(++round);
    return true;
  }
};

// The boxes of a unit's chunks [chunk, chunk + num_chunks) that one of its tokens sees, from a multiple
// of `step` boxes on.
struct Boxes {
  int begin, end;
  __device__ __forceinline__ Boxes(const AttentionArgs& p, const AttentionUnit& u, int chunk, int num_chunks,
                                   int step) {
    const int last = u.position + u.num_tokens - 1;
    const int first = p.window > 0 ? max(0, u.position - p.window + 1) : 0;
    begin = max(chunk * p.chunk, first) / (kBox * step) * step;
    end = min((chunk + num_chunks) * p.chunk, last + kBox) / kBox;
  }
};

// ---------------------------------------------------------------- producer warps
// Each brings one box of every slot, for asking takes long: one warp for all four boxes of a slot kept
// prompts waiting. `step`: boxes that consumers take together, a multiple of a slot's. Where keys are
// APART, those of a slot lie in front of its values, 64 columns of all positions after 64 others.
template <bool APART>
__device__ __forceinline__ void produce_pages(const AttentionArgs& p, SlotRing ring, int step, int producer) {
  const int lane = threadIdx.x & 31;
  Shares shares(p);
  AttentionUnit unit;
  for (int head; shares.next(unit, head);) {
    if (unit.num_tokens == 0) continue;
    const int* table = p.block_tables + static_cast<int64_t>(unit.sequence) * p.max_pages;
    const Boxes boxes(p, unit, unit.chunk, unit.num_chunks, step);
    for (int base = boxes.begin; base < boxes.end; base += 32) {
      const int position = min(base + lane, boxes.end - 1) * kBox;
      const int page = __ldg(table + position / p.page_size), place = position % p.page_size;
      for (int box = base; box < min(base + 32, boxes.end); box += p.slot_boxes) {
        const int from = __shfl_sync(~0u, page, box + producer - base);
        const int row = __shfl_sync(~0u, place, box + producer - base);
        mbar_wait(&ring.sm.empty[ring.at], ring.phase ^ 1);
        if (lane == 0) {
          uint64_t* full = &ring.sm.full[ring.at];
          if (box + producer < boxes.end) {
            mbar_expect(full, p.k_bytes + p.v_bytes);
            if (APART) {
              const uint32_t keys = ring.address() + producer * 2048, values = ring.address() + p.slot_boxes * p.k_bytes;
              for (int block = 0; block < p.k_dim / 64; ++block)
                page_copy(keys + block * p.slot_boxes * 2048, &p.k_map, row, block, head, from, full);
              page_copy(values + producer * p.v_bytes, &p.v_map, row, 0, head, from, full);
            } else {
              const uint32_t to = ring.address() + producer * (p.k_bytes + p.v_bytes);
              page_copy(to, &p.k_map, row, 0, head, from, full);
              if (p.v_bytes) page_copy(to + p.k_bytes, &p.v_map, row, 0, head, from, full);
            }
          } else {
            mbar_arrive(full);
          }
        }
        __syncwarp();
        ring.next();
      }
    }
  }
}

// ---------------------------------------------------------------- what consumers share
// Which positions the tokens of a unit see.
struct Sight {
  int low, last;        // what lies outside is seen by no token, and may hold anything
  int all_low, all_last;  // what lies inside is seen by every token
  __device__ __forceinline__ Sight(const AttentionArgs& p, const AttentionUnit& u)
      : low(p.window > 0 ? u.position - p.window + 1 : 0), last(u.position + u.num_tokens - 1) {
    all_low = p.window > 0 ? last - p.window + 1 : 0, all_last = u.position;
  }
  __device__ __forceinline__ bool by_all(int first, int count) const {
    return first >= all_low && first + count - 1 <= all_last;
  }
  __device__ __forceinline__ bool by_some(int first, int count) const {
    return first >= low && first + count - 1 <= last;
  }
  __device__ __forceinline__ bool has(int position) const { return position >= low && position <= last; }
};

// The next multiple of 8 to a number of moderate size: adding this and subtracting it again.
constexpr float kBaseStep = 8, kToBaseSteps = 1.5f * (1 << 23) * kBaseStep;

// Exponentials are of `v - base_of(top)`, so that nothing seen yet means zero and not NaN.
__device__ __forceinline__ float base_of(float top) { return top == kNone ? 0.f : top; }

// How a chunk joins the chunks before it: both are scaled to the larger of their largest logits.
struct Fold {
  float before, chunk;  // factors
  __device__ __forceinline__ Fold(float before, float chunk) : before(before), chunk(chunk) {}
  __device__ __forceinline__ Fold(float before_top, float top, float chunk_top)
      : before(exp2_approx(before_top - base_of(top))), chunk(exp2_approx(chunk_top - base_of(top))) {}
  __device__ __forceinline__ float operator()(float x, float of_chunk) const {
    return __fmaf_rn(x, before, __fmul_rn(of_chunk, chunk));
  }
};

// 1 / the softmax's denominator.
__device__ __forceinline__ float inverse_sum(const AttentionArgs& p, int head, float top, float sum) {
  if (p.sinks) sum += exp2_approx(__ldg(p.sinks + head) * 1.4426950408889634f - top);
  return 1.f / sum;
}

// The sums of two rows of an m16 operand, g and g + 8, at columns n * 8 + (lane & 3) * 2 + (0, 1).
template <int NT>
struct RowSums {
  float o[NT][4], top[2], sum[2];
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) o[n][e] = 0;
    top[0] = top[1] = kNone, sum[0] = sum[1] = 0;
  }
  __device__ __forceinline__ void scale(float first, float second) {
#pragma unroll
    for (int n = 0; n < NT; ++n) o[n][0] *= first, o[n][1] *= first, o[n][2] *= second, o[n][3] *= second;
  }
  // Takes the chunks before this one in; before(n) gives their o[n].
  template <class Before>
  __device__ __forceinline__ void fold(const float (&before_top)[2], const float (&before_sum)[2], Before before) {
    const float most[2] = {fmaxf(before_top[0], top[0]), fmaxf(before_top[1], top[1])};
    const Fold first(before_top[0], most[0], top[0]), second(before_top[1], most[1], top[1]);
    sum[0] = first(before_sum[0], sum[0]), sum[1] = second(before_sum[1], sum[1]);
    top[0] = most[0], top[1] = most[1];
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const float4 v = before(n);
      o[n][0] = first(v.x, o[n][0]), o[n][1] = first(v.y, o[n][1]);
      o[n][2] = second(v.z, o[n][2]), o[n][3] = second(v.w, o[n][3]);
    }
  }
  // `column`: this lane's first.
  __device__ __forceinline__ void store_result(const AttentionArgs& p, int r, int token, int head, int column) const {
    const float inverse = inverse_sum(p, head, top[r], sum[r]);
    __nv_bfloat16* to = p.out + (static_cast<int64_t>(token) * p.q_heads + head) * p.v_dim + column;
#pragma unroll
    for (int n = 0; n < NT; ++n)
      *reinterpret_cast<uint32_t*>(to + n * 8) = bf16x2(o[n][r * 2] * inverse, o[n][r * 2 + 1] * inverse);
  }
  __device__ __forceinline__ void store_part(const AttentionArgs& p, int r, int row, int chunk, int head,
                                             int column) const {
    const int64_t part = (static_cast<int64_t>(row) * p.max_chunks + chunk) * p.q_heads + head;
    if (column == 0) p.part_ml[part] = make_float2(top[r], sum[r]);
#pragma unroll
    for (int n = 0; n < NT; ++n)
      *reinterpret_cast<float2*>(p.part_o + part * p.v_dim + column + n * 8) =
          make_float2(o[n][r * 2], o[n][r * 2 + 1]);
  }
};

// Tokens of no sequence have a result of zero.
__device__ __forceinline__ void clear_padding(const AttentionArgs& p, int threads) {
  if (p.many) return;  // the launch before did
  const int64_t width = static_cast<int64_t>(p.q_heads) * p.v_dim / 8, end = p.tokens * width;
  uint4* out = reinterpret_cast<uint4*>(p.out);
  for (int64_t i = __ldg(p.num_tokens) * width + blockIdx.x * threads + threadIdx.x; i < end; i += gridDim.x * threads)
    out[i] = make_uint4(0, 0, 0, 0);
}

// Consumer warps say how they take a unit: `begin`, then for each chunk `begin_chunk`, `step` over its
// boxes and `end_chunk`, which writes a part, or the result after the last chunk.
template <class Consumer>
__device__ __forceinline__ void consume_pages(const AttentionArgs& p, SlotRing ring, unsigned char* scratch,
                                              int threads) {
  clear_padding(p, threads);
  Consumer own(p, ring, scratch);
  Shares shares(p);
  AttentionUnit unit;
  for (int head; shares.next(unit, head);) {
    if (unit.num_tokens == 0) continue;
    const Sight sight(p, unit);
    own.begin(unit, head);
    for (int chunk = unit.chunk; chunk < unit.chunk + unit.num_chunks; ++chunk) {
      const Boxes boxes(p, unit, chunk, 1, Consumer::kStep);
      own.begin_chunk();
      for (int box = boxes.begin; box < boxes.end; box += Consumer::kStep)
        own.step(sight, box, min(Consumer::kStep, boxes.end - box));
      own.end_chunk(unit, chunk);
    }
  }
}

// `consumers`: warps.
template <class Consumer>
__global__ void __launch_bounds__(kAttentionThreads, 1)
    attention_kernel(const __grid_constant__ AttentionArgs p, int consumers) {
  extern __shared__ __align__(1024) unsigned char attention_raw[];
  SlotRing ring(p, attention_raw);
  const int warp = threadIdx.x >> 5;
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.slots; ++i) {
      mbar_init(&ring.sm.full[i], p.slot_boxes);
      mbar_init(&ring.sm.empty[i], consumers);
    }
    fence_barriers();
  }
  __syncthreads();
  let_next_begin();  // combine_kernel, where CTAs have no units
  if (warp < kMostConsumers) {
    more_registers<240>();
    unsigned char* scratch = attention_raw + kAttentionHeader + p.slots * p.slot_boxes * (p.k_bytes + p.v_bytes);
    if (warp < consumers) consume_pages<Consumer>(p, ring, scratch, consumers * 32);
  } else {
    fewer_registers<24>();
    const int producer = warp - kMostConsumers;
    if (producer < p.slot_boxes) produce_pages<Consumer::kApart>(p, ring, Consumer::kStep, producer);
  }
}

// Puts the chunks of cut tokens together, in order; a warp takes 128 columns of a head of a token, and
// has BATCH chunks on their way together. `out` is of type T, as the queries are.
constexpr int kCombineThreads = 128, kCombineColumns = 128;
__device__ __forceinline__ void put_four(float* to, float4 v) { *reinterpret_cast<float4*>(to) = v; }
__device__ __forceinline__ void put_four(__nv_bfloat16* to, float4 v) {
  *reinterpret_cast<uint2*>(to) = make_uint2(bf16x2(v.x, v.y), bf16x2(v.z, v.w));
}
template <int BATCH, class T>
__global__ void __launch_bounds__(kCombineThreads, 4) combine_kernel(const __grid_constant__ AttentionArgs p) {
  const int blocks = (p.v_dim + kCombineColumns - 1) / kCombineColumns, lane = threadIdx.x & 31;
  const int warp = (blockIdx.x * kCombineThreads + threadIdx.x) / 32;
  const int column = warp % blocks * kCombineColumns + lane * 4, head = warp / blocks % p.q_heads;
  const int row = warp / blocks / p.q_heads;
  if (row >= p.part_rows) return;
  const int2 cut = __ldg(p.part_tokens + row);  // which kernels before attention's have written
  wait_for_previous();  // of any row: what follows waits for this kernel alone
  if (cut.x < 0) return;
  const ChunkRange range(cut.y, p.window, p.chunk);
  const int chunks = range.last - range.first + 1;
  const int64_t first = (static_cast<int64_t>(row) * p.max_chunks + range.first) * p.q_heads + head;
  const float* parts = p.part_o + first * p.v_dim + min(column, p.v_dim - 4);
  float top = kNone, sum = 0;
  float4 o = make_float4(0, 0, 0, 0);
  for (int base = 0; base < chunks; base += BATCH) {
    const int count = min(BATCH, chunks - base);
    float2 ml = make_float2(kNone, 0);
    if (lane < count) ml = load_now(p.part_ml + first + static_cast<int64_t>(base + lane) * p.q_heads);
    float4 v[BATCH];
#pragma unroll
    for (int c = 0; c < BATCH; ++c)
      if (c < count) v[c] = load_now(reinterpret_cast<const float4*>(parts + (base + c) * p.q_heads * p.v_dim));
    // Chunk `lane` and those before it.
    float most = fmaxf(ml.x, top);
#pragma unroll
    for (int d = 1; d < BATCH; d *= 2) {
      const float other = __shfl_up_sync(~0u, most, d);
      if (lane >= d) most = fmaxf(most, other);
    }
    const float before = __shfl_up_sync(~0u, most, 1);
    const Fold mine(lane == 0 ? top : before, most, ml.x);
#pragma unroll
    for (int c = 0; c < BATCH; ++c) {
      if (c >= count) break;
      const Fold fold{__shfl_sync(~0u, mine.before, c), __shfl_sync(~0u, mine.chunk, c)};
      sum = fold(sum, __shfl_sync(~0u, ml.y, c));
      o = make_float4(fold(o.x, v[c].x), fold(o.y, v[c].y), fold(o.z, v[c].z), fold(o.w, v[c].w));
    }
    top = __shfl_sync(~0u, most, count - 1);
  }
  const float inverse = inverse_sum(p, head, top, sum);
  if (column >= p.v_dim) return;
  T* to = reinterpret_cast<T*>(p.out) + (static_cast<int64_t>(cut.x) * p.q_heads + head) * p.v_dim + column;
  put_four(to, make_float4(o.x * inverse, o.y * inverse, o.z * inverse, o.w * inverse));
}

}  // namespace lora_jax
