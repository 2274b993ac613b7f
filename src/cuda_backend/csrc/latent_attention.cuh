// Attention over latents (MLA): one kv head of 576 columns whose V are its first v_dim. All consumer
// warps work on the same 64 positions: for the logits they share out positions and columns of K, for
// the softmax rows, for the values columns of V. A latent is read from memory once.
#pragma once
#include "attention_stages.cuh"

namespace lora_jax {

constexpr int kLatentTiles = 9;       // of 64 columns of K, and of 16 columns in a warp's quarter
constexpr int kLatentPositions = 64;  // of a step
constexpr int kLatentStride = kLatentPositions + 8;  // of a row in shared memory: lanes meet distinct banks
constexpr int kLatentThreads = kMostConsumers * 32;

struct LatentShared {
  float s[4][16][kLatentStride];  // logits, by the quarter of K that they come from
  __nv_bfloat16 p[16][kLatentStride];
  float shrink[16];
  float2 chunk[16];  // largest logit and sum of exponentials
};

// A unit is up to 16 rows (tokens x heads).
struct LatentConsumer {
  static constexpr int kStep = kLatentPositions / kBox;
  static constexpr int kLanes = 16;  // that share a row in the softmax, 4 positions each
  const AttentionArgs& p;
  SlotRing ring;
  LatentShared& sm;
  int warp, unit_tokens;
  int position;  // of the own row's token
  uint32_t q[kLatentTiles][4];
  float top, sum;  // of the own row; sum is this lane's share
  RowSums<8> chunk, before;

  __device__ __forceinline__ LatentConsumer(const AttentionArgs& p, const SlotRing& ring, unsigned char* scratch)
      : p(p), ring(ring), sm(*reinterpret_cast<LatentShared*>(scratch)) {
    warp = threadIdx.x >> 5, unit_tokens = 16 / p.q_heads;
  }
  __device__ __forceinline__ int own_row() const { return static_cast<int>(threadIdx.x) / kLanes; }
  // The token of a row, counted from the unit's first; rows that have none follow the last.
  __device__ __forceinline__ int token_of(int row) const {
    return row < unit_tokens * p.q_heads ? row / p.q_heads : 1 << 20;
  }

  __device__ __forceinline__ void begin(const AttentionUnit& u, int) {
    const int lane = threadIdx.x & 31, quarter = warp & 3;
    position = u.position + token_of(own_row());
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = (lane >> 2) + r * 8, token = token_of(row);
      const int64_t at = static_cast<int64_t>(u.token + token) * p.q_heads + row % p.q_heads;
      const __nv_bfloat16* from = p.q + at * p.k_dim + quarter * (kLatentTiles * 16) + (lane & 3) * 2;
#pragma unroll
      for (int k = 0; k < kLatentTiles; ++k)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          q[k][e * 2 + r] =
              token < u.num_tokens ? __ldg(reinterpret_cast<const uint32_t*>(from + k * 16 + e * 8)) : 0;
    }
  }
  __device__ __forceinline__ void begin_chunk() { chunk.clear(), top = kNone, sum = 0; }

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
    float s[4][4] = {};
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
        mma_bf16(s[i * 2], q[k][0], q[k][1], q[k][2], q[k][3], b[0], b[1]);
        mma_bf16(s[i * 2 + 1], q[k][0], q[k][1], q[k][2], q[k][3], b[2], b[3]);
      }
    }
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        *reinterpret_cast<float2*>(&sm.s[quarter][r * 8 + (lane >> 2)][half * 32 + n * 8 + (lane & 3) * 2]) =
            make_float2(s[n][r * 2], s[n][r * 2 + 1]);
  }

  // Exponentials of the own row against its running maximum, rounded to bfloat16 for V.
  __device__ __forceinline__ void soften(const Sight& sight, int first) {
    const int row = own_row(), from = static_cast<int>(threadIdx.x) % kLanes * 4;
    float4 v = *reinterpret_cast<const float4*>(&sm.s[0][row][from]);
#pragma unroll
    for (int quarter = 1; quarter < 4; ++quarter) {
      const float4 more = *reinterpret_cast<const float4*>(&sm.s[quarter][row][from]);
      v = make_float4(v.x + more.x, v.y + more.y, v.z + more.z, v.w + more.w);
    }
    float s[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = first + from + i;
      if (at > min(position, sight.last) || (p.window > 0 && at <= position - p.window)) s[i] = kNone;
    }
    float most = fmaxf(fmaxf(s[0], s[1]), fmaxf(s[2], s[3]));
#pragma unroll
    for (int mask = 1; mask < kLanes; mask *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, mask));
    most = fmaxf(most * p.scale_log2, top);
    const float base = base_of(most), shrink = exp2_approx(top - base);
    top = most, sum *= shrink;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += s[i] = exp2_approx(__fmaf_rn(s[i], p.scale_log2, -base));
    *reinterpret_cast<uint2*>(&sm.p[row][from]) = make_uint2(bf16x2(s[0], s[1]), bf16x2(s[2], s[3]));
    if (from == 0) sm.shrink[row] = shrink;
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

  // This warp's 64 columns of V.
  __device__ __forceinline__ void add_values(const Sight& sight, int first, int boxes) {
    const int lane = threadIdx.x & 31, value = lane & 15;
    for (int box = 0; box < boxes; ++box) wait_for(box);
    if (!sight.by_some(first, boxes * kBox)) erase(sight, first, boxes);
    chunk.scale(sm.shrink[lane >> 2], sm.shrink[8 + (lane >> 2)]);
#pragma unroll
    for (int box = 0; box < kStep; ++box) {
      if (box >= boxes) break;
      const uint32_t at = slot(box) + warp * 2048 + value * 128 + (((lane >> 4) ^ (value & 7)) << 4);
      uint32_t a[4];
      ldmatrix(a, smem_u32(&sm.p[value][box * kBox + (lane >> 4) * 8]));
#pragma unroll
      for (int n = 0; n < 8; n += 2) {
        uint32_t b[4];
        ldmatrix_trans(b, at ^ n << 4);
        mma_bf16(chunk.o[n], a[0], a[1], a[2], a[3], b[0], b[1]);
        mma_bf16(chunk.o[n + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
      }
    }
  }

  __device__ __forceinline__ void step(const Sight& sight, int box, int boxes) {
    logits(boxes);
    consumer_barrier(kLatentThreads);
    soften(sight, box * kBox);
    consumer_barrier(kLatentThreads);
    if (warp * 64 < p.v_dim) add_values(sight, box * kBox, boxes);
    __syncwarp();
    for (int i = 0; i < boxes; ++i) {
      if ((threadIdx.x & 31) == 0) mbar_arrive(&ring.sm.empty[ring.at]);
      ring.next();
    }
  }

  // Gives every lane the largest logits and the sums of its two rows of the chunk.
  __device__ __forceinline__ void share_sums() {
#pragma unroll
    for (int mask = 1; mask < kLanes; mask *= 2) sum += __shfl_xor_sync(~0u, sum, mask);
    if (threadIdx.x % kLanes == 0) sm.chunk[own_row()] = make_float2(top, sum);
    consumer_barrier(kLatentThreads);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float2 of_row = sm.chunk[r * 8 + ((threadIdx.x & 31) >> 2)];
      chunk.top[r] = of_row.x, chunk.sum[r] = of_row.y;
    }
  }

  __device__ __forceinline__ void end_chunk(const AttentionUnit& u, int number) {
    share_sums();
    if (number != u.chunk) {
      chunk.fold(before.top, before.sum, [&](int n) {
        return make_float4(before.o[n][0], before.o[n][1], before.o[n][2], before.o[n][3]);
      });
    }
    if (number != u.chunk + u.num_chunks - 1) {
      before = chunk;
      return;
    }
    const int column = warp * 64 + (threadIdx.x & 3) * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = (threadIdx.x & 31) / 4 + r * 8, token = token_of(row), head = row % p.q_heads;
      if (token >= u.num_tokens || warp * 64 >= p.v_dim) continue;
      if (u.part >= 0) chunk.store_part(p, r, u.part + token, number, head, column);
      else chunk.store_result(p, r, u.token + token, head, column);
    }
  }
};

}  // namespace lora_jax
