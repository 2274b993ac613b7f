// Attention by multiply-adds in float32: for float32 models, and for heads that no tiles of the tensor
// cores fit. Tensor cores have no full float32; at decode this is bound by the pages' bytes as well.
//
// A CTA takes a unit and a kv head: ROWS rows (tokens x query heads of the kv head) against some boxes
// of positions at a time, copied ahead into stages. Logits: every warp takes each fourth four columns of
// k_dim, and the warps' sums are added in order. Sums: a thread owns columns of v_dim. Chunks join as
// in paged_attention/stages.cuh. So a token's result depends on nothing but its own sequence.
#pragma once
#include "device/arithmetic.cuh"
#include "paged_attention/launch.cuh"

namespace lora_jax {

struct PlainArgs {
  AttentionArgs p;  // q and out of the inputs' type; without maps, ring and groups
  const void *k_pages, *v_pages;  // the latter null: V is the first columns of K
  int row_groups;  // shares of a kv head's query heads
  int stages;
};

constexpr int kPlainWarps = 4, kPlainThreads = kPlainWarps * 32;
constexpr int kPlainPad = 16;           // bytes behind a row in shared memory, against bank conflicts
constexpr int kPlainSharedSm = 228 << 10;  // of an SM; a CTA takes a KiB for itself
// CTAs that an SM has registers for: their sums, twice, and what they work on.
constexpr int plain_ctas(int rows, int columns) { return (rows < 16 ? 4 : 3) - (columns > 1); }

__device__ __forceinline__ float4 four(const float* from) { return *reinterpret_cast<const float4*>(from); }
__device__ __forceinline__ float4 four(const __nv_bfloat16* from) {
  const uint2 v = *reinterpret_cast<const uint2*>(from);
  return make_float4(__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xffff0000u), __uint_as_float(v.y << 16),
                     __uint_as_float(v.y & 0xffff0000u));
}
__device__ __forceinline__ float one(float v) { return v; }
__device__ __forceinline__ float one(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ void put(float* to, float v) { *to = v; }
__device__ __forceinline__ void put(__nv_bfloat16* to, float v) { *to = __float2bfloat16(v); }

// Positions of a stage, for a thread's columns of v_dim: another CTA hides more than wide stages do.
constexpr int plain_positions(int columns) { return columns == 1 ? 2 * kBox : kBox; }

// Where things lie in shared memory, in bytes.
template <class T, int ROWS, int POSITIONS>
struct PlainPlaces {
  int q_stride, q, parts, factors, stage, k_row, v_row, total;
  __host__ __device__ PlainPlaces(int k_dim, int v_dim, bool latent, int stages) {
    q_stride = k_dim * 4 + kPlainPad, k_row = k_dim * sizeof(T) + kPlainPad;
    v_row = latent ? 0 : v_dim * sizeof(T) + kPlainPad;
    q = 0, parts = ROWS * q_stride;  // of logits; the first warp's become the exponentials
    factors = parts + kPlainWarps * ROWS * POSITIONS * 4, stage = factors + 2 * ROWS * 4;
    total = stage + stages * stage_bytes();
  }
  __host__ __device__ int stage_bytes() const { return POSITIONS * (k_row + v_row); }
};

// The rows of a CTA. C: columns of v_dim that a thread owns.
template <class T, int ROWS, int C>
struct PlainRows {
  static constexpr int kPositions = plain_positions(C), kStep = kPositions / kBox;  // of a stage; its boxes
  static constexpr int kRowTile = ROWS / 4, kPositionTile = kPositions / 8;  // of logits, of a thread
  const PlainArgs& a;
  const AttentionArgs& p;
  const PlainPlaces<T, ROWS, kPositions> at;
  unsigned char* shared;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int heads_per_kv, heads;  // query heads of a kv head; of those, how many are rows of one token
  int kv_head, first_head;        // of the share
  // Of row threadIdx.x / 8, as eight threads know it.
  int position, head, token;
  float top, sum, before_top, before_sum;
  float o[ROWS][C], before[ROWS][C];

  __device__ __forceinline__ PlainRows(const PlainArgs& a, unsigned char* shared)
      : a(a), p(a.p), at(p.k_dim, p.v_dim, a.v_pages == nullptr, a.stages), shared(shared),
        heads_per_kv(p.q_heads / p.kv_heads), heads(min(heads_per_kv, ROWS)) {}

  __device__ __forceinline__ float* floats(int place) const { return reinterpret_cast<float*>(shared + place); }
  __device__ __forceinline__ T* stage(int i) const {
    return reinterpret_cast<T*>(shared + at.stage + i * at.stage_bytes());
  }
  __device__ __forceinline__ bool softens() const { return threadIdx.x < ROWS * 8; }

  __device__ __forceinline__ void begin(const AttentionUnit& u, int share) {
    kv_head = share / a.row_groups, first_head = share % a.row_groups * ROWS;
    const T* q = reinterpret_cast<const T*>(p.q);
    for (int i = threadIdx.x; i < ROWS * p.k_dim / 4; i += kPlainThreads) {
      const int row = i / (p.k_dim / 4), column = i % (p.k_dim / 4) * 4, own = first_head + row % heads;
      float4 v = make_float4(0, 0, 0, 0);
      if (row / heads < u.num_tokens && own < heads_per_kv) {
        const int64_t from = static_cast<int64_t>(u.token + row / heads) * p.q_heads + kv_head * heads_per_kv + own;
        v = four(q + from * p.k_dim + column);
      }
      *reinterpret_cast<float4*>(shared + row * at.q_stride + column * 4) = v;
    }
    const int row = threadIdx.x / 8, own = first_head + row % heads;
    token = row / heads;
    const bool used = softens() && token < u.num_tokens && own < heads_per_kv;
    position = used ? u.position + token : -1, head = kv_head * heads_per_kv + own;
  }

  __device__ __forceinline__ void begin_chunk() {
    top = kNone, sum = 0;
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int c = 0; c < C; ++c) o[r][c] = 0;
  }

  // Asks for a stage's positions; what no token sees may hold anything, and becomes zero.
  __device__ __forceinline__ void fetch(const AttentionUnit& u, const Sight& sight, int box) const {
    const int mine = box * kBox + lane % kPositions;
    int row = -1;  // of the pages' positions, that of this lane
    if (sight.has(mine)) {
      const int page = __ldg(p.block_tables + static_cast<int64_t>(u.sequence) * p.max_pages + mine / p.page_size);
      row = page * p.page_size + mine % p.page_size;
    }
    const uint32_t to = smem_u32(stage(box / kStep % a.stages));
#pragma unroll 2
    for (int i = 0; i < kPositions / kPlainWarps; ++i) {
      const int at_row = warp + i * kPlainWarps, from = __shfl_sync(~0u, row, at_row);
      const int64_t head = static_cast<int64_t>(max(from, 0)) * p.kv_heads + kv_head;
      copy_row(to + at_row * at.k_row, a.k_pages, head * p.k_dim, p.k_dim, from >= 0);
      if (a.v_pages)
        copy_row(to + kPositions * at.k_row + at_row * at.v_row, a.v_pages, head * p.v_dim, p.v_dim, from >= 0);
    }
  }
  __device__ __forceinline__ void copy_row(uint32_t to, const void* pages, int64_t from, int columns, bool seen) const {
    const unsigned char* source = static_cast<const unsigned char*>(pages) + from * static_cast<int>(sizeof(T));
    for (int piece = lane * 16; piece < columns * static_cast<int>(sizeof(T)); piece += 512)
      copy_16(to + piece, source + piece, seen ? 16 : 0);
  }

  // This warp's part of the logits.
  __device__ __forceinline__ void multiply(const T* keys) const {
    const float* q = floats(at.q) + lane / 8 * kRowTile * (at.q_stride / 4);
    const T* k = keys + lane % 8 * (at.k_row / static_cast<int>(sizeof(T)));
    float acc[kRowTile][kPositionTile] = {};
#pragma unroll 2
    for (int column = warp * 4; column < p.k_dim; column += kPlainWarps * 4) {
      float4 x[kRowTile], y[kPositionTile];
#pragma unroll
      for (int r = 0; r < kRowTile; ++r) x[r] = four(q + r * (at.q_stride / 4) + column);
#pragma unroll
      for (int j = 0; j < kPositionTile; ++j) y[j] = four(k + j * 8 * (at.k_row / static_cast<int>(sizeof(T))) + column);
#pragma unroll
      for (int r = 0; r < kRowTile; ++r)
#pragma unroll
        for (int j = 0; j < kPositionTile; ++j) {
          acc[r][j] = fmaf(x[r].x, y[j].x, acc[r][j]), acc[r][j] = fmaf(x[r].y, y[j].y, acc[r][j]);
          acc[r][j] = fmaf(x[r].z, y[j].z, acc[r][j]), acc[r][j] = fmaf(x[r].w, y[j].w, acc[r][j]);
        }
    }
    float* parts = floats(at.parts) + (warp * ROWS + lane / 8 * kRowTile) * kPositions + lane % 8;
#pragma unroll
    for (int r = 0; r < kRowTile; ++r)
#pragma unroll
      for (int j = 0; j < kPositionTile; ++j) parts[r * kPositions + j * 8] = acc[r][j];
  }

  // Exponentials against the running maximum, and the factors that the sums shrink by.
  __device__ __forceinline__ void soften(int first) {
    const int row = threadIdx.x / 8;
    float s[kPositionTile], most = top;
#pragma unroll
    for (int j = 0; j < kPositionTile; ++j) {
      const int place = lane % 8 + j * 8;
      const float* parts = floats(at.parts) + row * kPositions + place;
      s[j] = parts[0];
#pragma unroll
      for (int w = 1; w < kPlainWarps; ++w) s[j] += parts[w * ROWS * kPositions];
      const bool hidden = first + place > position || (p.window > 0 && first + place <= position - p.window);
      s[j] = hidden ? kNone : s[j] * p.scale_log2;
      most = fmaxf(most, s[j]);
    }
#pragma unroll
    for (int d = 1; d < 8; d *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, d));
    const float base = base_of(most), shrink = exp2_approx(top - base);
    float added = 0;
#pragma unroll
    for (int j = 0; j < kPositionTile; ++j) {
      added += s[j] = exp2_approx(s[j] - base);
      floats(at.parts)[row * kPositions + lane % 8 + j * 8] = s[j];
    }
    top = most, sum = __fmaf_rn(sum, shrink, added);
    if (lane % 8 == 0) floats(at.factors)[row] = shrink;
  }

  __device__ __forceinline__ int column(int c) const { return min(static_cast<int>(threadIdx.x) + c * kPlainThreads, p.v_dim - 1); }

  __device__ __forceinline__ void add_values(const T* values, int stride) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const float shrink = floats(at.factors)[r];
#pragma unroll
      for (int c = 0; c < C; ++c) o[r][c] *= shrink;
    }
#pragma unroll 1
    for (int i = 0; i < kPositions; i += 4) {
      float v[4][C];
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int c = 0; c < C; ++c) v[j][c] = one(values[(i + j) * stride + column(c)]);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const float4 w = four(floats(at.parts) + r * kPositions + i);
#pragma unroll
        for (int c = 0; c < C; ++c) {
          o[r][c] = fmaf(w.x, v[0][c], o[r][c]), o[r][c] = fmaf(w.y, v[1][c], o[r][c]);
          o[r][c] = fmaf(w.z, v[2][c], o[r][c]), o[r][c] = fmaf(w.w, v[3][c], o[r][c]);
        }
      }
    }
  }

  // All boxes of a chunk; as many are on their way as there are stages, less one that is worked on.
  __device__ __forceinline__ void chunk(const AttentionUnit& u, const Sight& sight, const Boxes& boxes) {
    const int ahead = a.stages - 1;
    for (int box = boxes.begin; box < boxes.begin + ahead * kStep; box += kStep) {
      if (box < boxes.end) fetch(u, sight, box);
      copies_commit();
    }
    for (int box = boxes.begin; box < boxes.end; box += kStep) {
      if (box + ahead * kStep < boxes.end) fetch(u, sight, box + ahead * kStep);
      copies_commit();
      if (ahead) copies_wait<1>();
      else copies_wait<0>();
      __syncthreads();
      const T* keys = stage(box / kStep % a.stages);
      multiply(keys);
      __syncthreads();
      if (softens()) soften(box * kBox);
      __syncthreads();
      const int row = (a.v_pages ? at.v_row : at.k_row) / static_cast<int>(sizeof(T));
      add_values(a.v_pages ? keys + kPositions * (at.k_row / static_cast<int>(sizeof(T))) : keys, row);
      __syncthreads();
    }
  }

  // Takes the chunks before in, in their order.
  __device__ __forceinline__ void join(bool first) {
    float* factors = floats(at.factors);
    if (softens()) {
      const float most = fmaxf(before_top, top);
      const Fold fold(before_top, most, top);
      if (lane % 8 == 0) factors[threadIdx.x / 8] = fold.before, factors[ROWS + threadIdx.x / 8] = fold.chunk;
      before_sum = first ? sum : fold(before_sum, sum), before_top = first ? top : most;
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int c = 0; c < C; ++c)
        before[r][c] = first ? o[r][c] : Fold(factors[r], factors[ROWS + r])(before[r][c], o[r][c]);
    __syncthreads();
  }

  __device__ __forceinline__ void end_chunk(const AttentionUnit& u, int number) {
    if (softens())
#pragma unroll
      for (int d = 1; d < 8; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
    if (u.part >= 0) return store_parts(u, number);
    if (number == u.chunk) before_top = kNone, before_sum = 0;
    join(number == u.chunk);
    if (number == u.chunk + u.num_chunks - 1) store_results(u);
  }

  // What row r writes to, counted in heads of tokens; negative: nothing.
  __device__ __forceinline__ int64_t place_of(const AttentionUnit& u, int r, int64_t first, int64_t step) const {
    const int own = first_head + r % heads;
    if (r / heads >= u.num_tokens || own >= heads_per_kv) return -1;
    return (first + r / heads * step) * p.q_heads + kv_head * heads_per_kv + own;
  }

  __device__ __forceinline__ void store_parts(const AttentionUnit& u, int number) {
    const int64_t first = static_cast<int64_t>(u.part) * p.max_chunks + number;
    if (position >= 0 && lane % 8 == 0) p.part_ml[(first + static_cast<int64_t>(token) * p.max_chunks) * p.q_heads + head] = make_float2(top, sum);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const int64_t to = place_of(u, r, first, p.max_chunks);
#pragma unroll
      for (int c = 0; c < C; ++c) {
        const int at = threadIdx.x + c * kPlainThreads;
        if (to >= 0 && at < p.v_dim) p.part_o[to * p.v_dim + at] = o[r][c];
      }
    }
  }

  __device__ __forceinline__ void store_results(const AttentionUnit& u) {
    float* factors = floats(at.factors);
    if (position >= 0 && lane % 8 == 0) factors[threadIdx.x / 8] = inverse_sum(p, head, before_top, before_sum);
    __syncthreads();
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const int64_t to = place_of(u, r, u.token, 1);
#pragma unroll
      for (int c = 0; c < C; ++c) {
        const int at = threadIdx.x + c * kPlainThreads;
        if (to >= 0 && at < p.v_dim) put(reinterpret_cast<T*>(p.out) + to * p.v_dim + at, before[r][c] * factors[r]);
      }
    }
    __syncthreads();
  }
};

template <class T, int ROWS, int C>
__global__ void __launch_bounds__(kPlainThreads, plain_ctas(ROWS, C))
    plain_attention_kernel(const __grid_constant__ PlainArgs a) {
  extern __shared__ __align__(1024) unsigned char plain_raw[];
  const AttentionArgs& p = a.p;
  const int64_t width = static_cast<int64_t>(p.q_heads) * p.v_dim, end = p.tokens * width;
  for (int64_t i = __ldg(p.num_tokens) * width + blockIdx.x * kPlainThreads + threadIdx.x; i < end;
       i += gridDim.x * kPlainThreads)
    put(reinterpret_cast<T*>(p.out) + i, 0.f);
  PlainRows<T, ROWS, C> rows(a, plain_raw);
  Shares shares(p);
  AttentionUnit unit;
  for (int share; shares.next(unit, share);) {
    if (unit.num_tokens == 0) continue;
    const Sight sight(p, unit);
    __syncthreads();  // before the queries of the share before are overwritten
    rows.begin(unit, share);
    for (int chunk = unit.chunk; chunk < unit.chunk + unit.num_chunks; ++chunk) {
      rows.begin_chunk();
      rows.chunk(unit, sight, Boxes(p, unit, chunk, 1, rows.kStep));
      rows.end_chunk(unit, chunk);
    }
  }
}

template <class T, int ROWS, int C>
cudaError_t launch_plain_rows(PlainArgs& a, cudaStream_t stream) {
  using Places = PlainPlaces<T, ROWS, plain_positions(C)>;
  const auto kernel = plain_attention_kernel<T, ROWS, C>;
  const bool latent = a.v_pages == nullptr;
  // Another CTA on the SM hides more than a second stage does.
  a.stages = 2 * (Places(a.p.k_dim, a.p.v_dim, latent, 2).total + 1024) <= kPlainSharedSm ? 2 : 1;
  const int shared = Places(a.p.k_dim, a.p.v_dim, latent, a.stages).total;
  if (shared > kSharedBytes) return cudaErrorInvalidValue;
  cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  int sms = 0;
  if (e == cudaSuccess) e = count_sms(&sms);
  if (e != cudaSuccess) return e;
  const int room = kPlainSharedSm / (shared + 1024), most = plain_ctas(ROWS, C);
  const int ctas = sms * (room < most ? room : most);
  kernel<<<ctas, kPlainThreads, shared, stream>>>(a);
  return cudaGetLastError();
}

template <class T, int ROWS>
cudaError_t launch_plain_columns(PlainArgs& a, cudaStream_t stream) {
  if (a.p.v_dim <= kPlainThreads) return launch_plain_rows<T, ROWS, 1>(a, stream);
  if (a.p.v_dim <= 2 * kPlainThreads) return launch_plain_rows<T, ROWS, 2>(a, stream);
  return launch_plain_rows<T, ROWS, 4>(a, stream);
}

// Fills in what follows from the sizes, and launches. `rows`: 4, 8 or 16 of a unit.
template <class T>
cudaError_t launch_plain_attention(PlainArgs& a, int rows, cudaStream_t stream) {
  AttentionArgs& p = a.p;
  if (p.v_dim > 4 * kPlainThreads) return cudaErrorInvalidValue;
  const int heads = p.q_heads / p.kv_heads;
  a.row_groups = (heads + rows - 1) / rows, p.cta_heads = 1, p.head_groups = p.kv_heads * a.row_groups;
  cudaError_t e = cudaErrorInvalidValue;
  if (rows == 4) e = launch_plain_columns<T, 4>(a, stream);
  if (rows == 8) e = launch_plain_columns<T, 8>(a, stream);
  if (rows == 16) e = launch_plain_columns<T, 16>(a, stream);
  return e == cudaSuccess ? launch_combine<T>(p, stream) : e;
}

}  // namespace lora_jax
