// Attention over latents (MLA): one kv head of 576 columns whose V are its first v_dim. All consumer
// warps work on the same 64 positions: for the logits they share out positions and columns of K, for
// the softmax rows, for the values columns of V. A latent is read from memory once a unit, so units of
// a prompt have twice the rows; what happens to a row is the same.
#pragma once
#include "device/arithmetic.cuh"
#include "paged_attention/stages.cuh"

namespace lora_jax {

constexpr int kLatentTiles = 9;       // of 64 columns of K, and of 16 columns in a warp's quarter
constexpr int kLatentPositions = 64;  // of a step
constexpr int kLatentStride = kLatentPositions + 8;  // of a row in shared memory: lanes meet distinct banks
constexpr int kLatentThreads = kMostConsumers * 32;

// M: groups of 16 rows, operands of mma.
template <int M>
struct LatentShared {
  float s[4][M * 16][kLatentStride];  // logits, by the quarter of K that they come from
  __nv_bfloat16 p[M * 16][kLatentStride];
  float shrink[M * 16];
  float2 chunk[M * 16];  // largest logit and sum of exponentials
  float4 before[M * 8][kLatentThreads];  // o of the chunks before
};

// A unit is up to M * 16 rows; tokens do not reach over two groups of them.
template <int M>
struct LatentConsumer {
  static constexpr int kStep = kLatentPositions / kBox;
  static constexpr bool kApart = false;
  static constexpr int kSlotBoxes = 1, kWords = kLatentTiles * 16;  // see paged_attention/coded.cuh
  static constexpr int kCoders = M == 1 ? 8 : 0, kCodedRegisters = 192;
  static constexpr int kLanes = 16 / M;  // that share a row in the softmax, 4 positions each, M times
  const AttentionArgs& p;
  SlotRing ring;
  LatentShared<M>& sm;
  int warp, group_tokens;
  int position;  // of the own row's token
  uint32_t q[M][kLatentTiles][4];
  float top, sum[M];  // of the own row; sum is this lane's share
  float before_top[M][2], before_sum[M][2];
  RowSums<8> chunk[M];

  __device__ __forceinline__ LatentConsumer(const AttentionArgs& p, const SlotRing& ring, unsigned char* scratch)
      : p(p), ring(ring), sm(*reinterpret_cast<LatentShared<M>*>(scratch)) {
    warp = threadIdx.x >> 5, group_tokens = 16 / p.q_heads;
  }
  __device__ __forceinline__ int own_row() const { return static_cast<int>(threadIdx.x) / kLanes; }
  // The token of a row, counted from the unit's first; rows that have none follow the last.
  __device__ __forceinline__ int token_of(int row) const {
    const int of_group = row % 16;
    return of_group < group_tokens * p.q_heads ? row / 16 * group_tokens + of_group / p.q_heads : 1 << 20;
  }
  __device__ __forceinline__ int head_of(int row) const { return row % 16 % p.q_heads; }

  __device__ __forceinline__ void begin(const AttentionUnit& u, int) {
    const int lane = threadIdx.x & 31, quarter = warp & 3;
    position = u.position + token_of(own_row());
#pragma unroll
    for (int r = 0; r < M * 2; ++r) {
      const int row = (lane >> 2) + r * 8, token = token_of(row);
      const int64_t at = static_cast<int64_t>(u.token + token) * p.q_heads + head_of(row);
      const __nv_bfloat16* from = p.q + at * p.k_dim + quarter * (kLatentTiles * 16) + (lane & 3) * 2;
#pragma unroll
      for (int k = 0; k < kLatentTiles; ++k)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          q[r / 2][k][e * 2 + r % 2] =
              token < u.num_tokens ? __ldg(reinterpret_cast<const uint32_t*>(from + k * 16 + e * 8)) : 0;
    }
  }
  __device__ __forceinline__ void begin_chunk() {
    top = kNone;
#pragma unroll
    for (int m = 0; m < M; ++m) chunk[m].clear(), sum[m] = 0;
  }

  __device__ __forceinline__ int place(int i) const {  // of the i-th slot from the ring's
    const int at = ring.at + i;
    return at < p.slots ? at : at - p.slots;
  }
  __device__ __forceinline__ uint32_t slot(int i) const { return ring.base + place(i) * p.k_bytes; }
  __device__ __forceinline__ void wait_for(int i) const {
    mbar_wait(&ring.sm.full[place(i)], ring.at + i < p.slots ? ring.phase : ring.phase ^ 1);
  }

  // This warp's quarter of the columns of K, and its half of the positions.
  __device__ __forceinline__ void logits(int boxes) {
    const int lane = threadIdx.x & 31, key = (lane >> 4) * 8 + (lane & 7), quarter = warp & 3, half = warp >> 2;
    if (half * 2 >= boxes) return;
    float s[M][4][4] = {};
    uint32_t keys[2];
    for (int i = 0; i < 2; ++i) {
      const int box = min(half * 2 + i, boxes - 1);  // one that there is
      wait_for(box);
      keys[i] = slot(box) + key * 128;
    }
#pragma unroll
    for (int k = 0; k < kLatentTiles; ++k) {
      const int piece = (quarter * kLatentTiles + k) * 2 + ((lane >> 3) & 1);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t b[4];
        ldmatrix(b, keys[i] + (piece >> 3) * 2048 + (((piece & 7) ^ (key & 7)) << 4));
#pragma unroll
        for (int m = 0; m < M; ++m) {
          const uint32_t(&a)[4] = q[m][k];
          mma_bf16(s[m][i * 2], a[0], a[1], a[2], a[3], b[0], b[1]);
          mma_bf16(s[m][i * 2 + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < M * 2; ++r)
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float(&v)[4] = s[r / 2][n];
        *reinterpret_cast<float2*>(&sm.s[quarter][r * 8 + (lane >> 2)][half * 32 + n * 8 + (lane & 3) * 2]) =
            make_float2(v[r % 2 * 2], v[r % 2 * 2 + 1]);
      }
  }

  // Exponentials of the own row against its running maximum, rounded to bfloat16 for V. Which of them
  // are added to which sum is the same for all M.
  __device__ __forceinline__ void soften(const Sight& sight, int first) {
    const int row = own_row(), lane = static_cast<int>(threadIdx.x) % kLanes;
    float s[M][4], most = kNone;
#pragma unroll
    for (int m = 0; m < M; ++m) {
      const int from = (m * kLanes + lane) * 4;
      float4 v = *reinterpret_cast<const float4*>(&sm.s[0][row][from]);
#pragma unroll
      for (int quarter = 1; quarter < 4; ++quarter) {
        const float4 more = *reinterpret_cast<const float4*>(&sm.s[quarter][row][from]);
        v = make_float4(v.x + more.x, v.y + more.y, v.z + more.z, v.w + more.w);
      }
      s[m][0] = v.x, s[m][1] = v.y, s[m][2] = v.z, s[m][3] = v.w;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = first + from + i;
        if (at > min(position, sight.last) || (p.window > 0 && at <= position - p.window)) s[m][i] = kNone;
        most = fmaxf(most, s[m][i]);
      }
    }
#pragma unroll
    for (int mask = 1; mask < kLanes; mask *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, mask));
    most = fmaxf(most * p.scale_log2, top);
    const float base = base_of(most), shrink = exp2_approx(top - base);
    top = most;
#pragma unroll
    for (int m = 0; m < M; ++m) {
      sum[m] *= shrink;
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[m] += s[m][i] = exp2_approx(__fmaf_rn(s[m][i], p.scale_log2, -base));
      *reinterpret_cast<uint2*>(&sm.p[row][(m * kLanes + lane) * 4]) =
          make_uint2(bf16x2(s[m][0], s[m][1]), bf16x2(s[m][2], s[m][3]));
    }
    if (lane == 0) sm.shrink[row] = shrink;
  }

  // What no token sees may hold anything: this warp's columns of it become zero, which is what zero
  // weights need.
  __device__ __forceinline__ void erase(const Sight& sight, int first, int boxes) const {
    for (int i = threadIdx.x & 31; i < boxes * kBox; i += 32)
      if (!sight.has(first + i))
        for (int piece = 0; piece < 8; ++piece)
          sts128(slot(i / kBox) + warp * 2048 + i % kBox * 128 + piece * 16, make_uint4(0, 0, 0, 0));
    fence_shared_copies();  // before the next copy to this place
    __syncwarp();
  }

  // This warp's 64 columns of V; a box is given back as soon as its are added.
  __device__ __forceinline__ void add_values(const Sight& sight, int first, int boxes) {
    const int lane = threadIdx.x & 31, value = lane & 15;
    for (int box = 0; box < boxes; ++box) wait_for(box);
    if (!sight.by_some(first, boxes * kBox)) erase(sight, first, boxes);
#pragma unroll
    for (int m = 0; m < M; ++m) chunk[m].scale(sm.shrink[m * 16 + (lane >> 2)], sm.shrink[m * 16 + 8 + (lane >> 2)]);
#pragma unroll
    for (int box = 0; box < kStep; ++box) {
      if (box >= boxes) break;
      const uint32_t at = slot(box) + warp * 2048 + value * 128 + (((lane >> 4) ^ (value & 7)) << 4);
      uint32_t a[M][4], seen = 0;
#pragma unroll
      for (int m = 0; m < M; ++m) ldmatrix(a[m], smem_u32(&sm.p[m * 16 + value][box * kBox + (lane >> 4) * 8]));
#pragma unroll
      for (int n = 0; n < 8; n += 2) {
        uint32_t b[4];
        ldmatrix_trans(b, at ^ n << 4);
        seen ^= b[0];
#pragma unroll
        for (int m = 0; m < M; ++m) {
          mma_bf16(chunk[m].o[n], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1]);
          mma_bf16(chunk[m].o[n + 1], a[m][0], a[m][1], a[m][2], a[m][3], b[2], b[3]);
        }
      }
      give_back(box, seen);
    }
  }
  __device__ __forceinline__ void give_back(int box, uint32_t seen = 0) const {
    __syncwarp();
    mbar_arrive_seen(&ring.sm.empty[place(box)], (threadIdx.x & 31) == 0, seen, static_cast<uint32_t>(p.kv_heads) >> 24);
  }

  __device__ __forceinline__ void step(const Sight& sight, int box, int boxes) {
    logits(boxes);
    consumer_barrier(kLatentThreads);
    soften(sight, box * kBox);
    consumer_barrier(kLatentThreads);
    if (warp * 64 < p.v_dim) add_values(sight, box * kBox, boxes);
    else
      for (int i = 0; i < boxes; ++i) give_back(i);
    for (int i = 0; i < boxes; ++i) ring.next();
  }

  // Gives every lane the largest logits and the sums of its rows of the chunk.
  __device__ __forceinline__ void share_sums() {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int mask = 1; mask < kLanes; mask *= 2) sum[m] += __shfl_xor_sync(~0u, sum[m], mask);
    const float whole = M == 1 ? sum[0] : sum[0] + sum[M - 1];
    if (threadIdx.x % kLanes == 0) sm.chunk[own_row()] = make_float2(top, whole);
    consumer_barrier(kLatentThreads);
#pragma unroll
    for (int r = 0; r < M * 2; ++r) {
      const float2 of_row = sm.chunk[r * 8 + ((threadIdx.x & 31) >> 2)];
      chunk[r / 2].top[r % 2] = of_row.x, chunk[r / 2].sum[r % 2] = of_row.y;
    }
  }

  // Takes the chunks before in, and becomes what the next chunk takes in, or the result.
  __device__ __forceinline__ void fold_group(int m, bool first, bool last) {
    RowSums<8>& own = chunk[m];
    if (!first) own.fold(before_top[m], before_sum[m], [&](int n) { return sm.before[m * 8 + n][threadIdx.x]; });
    if (last) return;
#pragma unroll
    for (int n = 0; n < 8; ++n)
      sm.before[m * 8 + n][threadIdx.x] = make_float4(own.o[n][0], own.o[n][1], own.o[n][2], own.o[n][3]);
#pragma unroll
    for (int r = 0; r < 2; ++r) before_top[m][r] = own.top[r], before_sum[m][r] = own.sum[r];
  }

  __device__ __forceinline__ void end_chunk(const AttentionUnit& u, int number) {
    const bool last = number == u.chunk + u.num_chunks - 1;
    share_sums();
#pragma unroll
    for (int m = 0; m < M; ++m) fold_group(m, number == u.chunk, last);
    if (!last || warp * 64 >= p.v_dim) return;
    const int column = warp * 64 + (threadIdx.x & 3) * 2;
#pragma unroll
    for (int r = 0; r < M * 2; ++r) {
      const int row = (threadIdx.x & 31) / 4 + r * 8, token = token_of(row), head = head_of(row);
      if (token >= u.num_tokens) continue;
      const RowSums<8>& own = chunk[r / 2];
      if (u.part >= 0) own.store_part(p, r % 2, u.part + token, number, head, column);
      else own.store_result(p, r % 2, u.token + token, head, column);
    }
  }
};

}  // namespace lora_jax
