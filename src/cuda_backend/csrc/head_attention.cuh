// Attention with keys and values of their own: a consumer warp owns a kv head and up to 16 rows
// (tokens x query heads of the kv head), the m16 operand of mma, and needs no other warp.
#pragma once
#include "attention_stages.cuh"

namespace lora_jax {

// KT: tiles of 16 of k_dim; NT: tiles of 8 of v_dim.
template <int KT, int NT>
struct HeadConsumer {
  static constexpr int kStep = 2;  // boxes of a slot
  const AttentionArgs& p;
  SlotRing ring;
  int first_head;    // of the share's kv heads
  int positions[2];  // of the tokens of rows g and g + 8
  uint32_t q[KT][4];
  RowSums<NT> chunk, all;

  __device__ __forceinline__ HeadConsumer(const AttentionArgs& p, const SlotRing& ring, unsigned char*)
      : p(p), ring(ring) {}

  __device__ __forceinline__ int heads_per_kv() const { return p.q_heads / p.kv_heads; }
  __device__ __forceinline__ int place() const { return static_cast<int>(threadIdx.x >> 5) % p.cta_heads; }
  __device__ __forceinline__ int first_token() const {  // of this warp, counted from the unit's
    return static_cast<int>(threadIdx.x >> 5) / p.cta_heads * (16 / heads_per_kv());
  }
  // The token and the head of row g (+ 8 for r = 1); a token after the unit's last for rows of none.
  struct Row {
    int token, head;
  };
  __device__ __forceinline__ Row row(int r) const {
    const int i = (threadIdx.x & 31) / 4 + r * 8, per = heads_per_kv();
    const bool used = i < 16 / per * per;
    return Row{used ? first_token() + i / per : 1 << 20, (first_head + place()) * per + i % per};
  }

  __device__ __forceinline__ void begin(const AttentionUnit& u, int first_kv_head) {
    first_head = first_kv_head;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Row mine = row(r);
      positions[r] = u.position + mine.token;
      const int64_t at = static_cast<int64_t>(u.token + mine.token) * p.q_heads + mine.head;
      const __nv_bfloat16* from = p.q + at * (KT * 16) + (threadIdx.x & 3) * 2;
#pragma unroll
      for (int k = 0; k < KT; ++k)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          q[k][e * 2 + r] =
              mine.token < u.num_tokens ? __ldg(reinterpret_cast<const uint32_t*>(from + k * 16 + e * 8)) : 0;
    }
    all.clear();
  }
  __device__ __forceinline__ void begin_chunk() { chunk.clear(); }

  // s[n][e]: logits of row g (+ 8 from e = 2 on) at position n * 8 + (lane & 3) * 2 + e % 2 of the slot.
  __device__ __forceinline__ void logits(uint32_t slot, float (&s)[4][4]) const {
    const int lane = threadIdx.x & 31, position = (lane >> 4) * 8 + (lane & 7);
    const uint32_t keys = slot + place() * (KT * 512) + position * 128;
#pragma unroll
    for (int k = 0; k < KT; ++k) {
      const int piece = k * 2 + ((lane >> 3) & 1);
      const uint32_t at = keys + (k / 4) * 2048 + (((piece & 7) ^ (position & 7)) << 4);
#pragma unroll
      for (int box = 0; box < 2; ++box) {
        uint32_t b[4];
        ldmatrix(b, at + box * (p.k_bytes + p.v_bytes));
        mma_bf16(s[box * 2], q[k][0], q[k][1], q[k][2], q[k][3], b[0], b[1]);
        mma_bf16(s[box * 2 + 1], q[k][0], q[k][1], q[k][2], q[k][3], b[2], b[3]);
      }
    }
  }

  __device__ __forceinline__ void hide(float (&s)[4][4], int first) const {
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int at = first + n * 8 + (threadIdx.x & 3) * 2 + (e & 1), mine = positions[e >> 1];
        if (at > mine || (p.window > 0 && at <= mine - p.window)) s[n][e] = kNone;
      }
  }

  // Turns logits into exponentials against the running maximum; the chunk's sums follow it.
  __device__ __forceinline__ void soften(float (&s)[4][4]) {
    float shrink[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most = kNone;
#pragma unroll
      for (int n = 0; n < 4; ++n) most = fmaxf(most, fmaxf(s[n][r * 2], s[n][r * 2 + 1]));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(fmaxf(most, __shfl_xor_sync(~0u, most, 2)) * p.scale_log2, chunk.top[r]);
      const float base = base_of(most);
      shrink[r] = exp2_approx(chunk.top[r] - base);
      float sum = 0;
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int e = r * 2; e < r * 2 + 2; ++e) sum += s[n][e] = exp2_approx(__fmaf_rn(s[n][e], p.scale_log2, -base));
      chunk.top[r] = most, chunk.sum[r] = __fmaf_rn(chunk.sum[r], shrink[r], sum);
    }
    // The maximum rarely grows; scaling by one would change nothing.
    if (__any_sync(~0u, shrink[0] != 1.f || shrink[1] != 1.f)) chunk.scale(shrink[0], shrink[1]);
  }

  __device__ __forceinline__ void add_values(uint32_t slot, const float (&s)[4][4], const Sight& sight, int first) {
    const int lane = threadIdx.x & 31, position = ((lane >> 3) & 1) * 8 + (lane & 7), at = first + (lane & 3) * 2;
    const uint32_t values = slot + p.k_bytes + place() * (NT * 256) + position * 128;
    const bool whole = first >= sight.low && first + kStep * kBox - 1 <= sight.last;
#pragma unroll
    for (int box = 0; box < 2; ++box) {
      const float(&near)[4] = s[box * 2], (&far)[4] = s[box * 2 + 1];
      const uint32_t a0 = pack_bf16(near[0], near[1]), a1 = pack_bf16(near[2], near[3]);
      const uint32_t a2 = pack_bf16(far[0], far[1]), a3 = pack_bf16(far[2], far[3]);
      const uint32_t near_mask = value_mask(sight, at + box * 16), far_mask = value_mask(sight, at + box * 16 + 8);
#pragma unroll
      for (int n = 0; n < NT; n += 2) {
        const int piece = n + (lane >> 4);
        uint32_t b[4];
        ldmatrix_trans(b, values + box * (p.k_bytes + p.v_bytes) + (n / 8) * 2048 + (((piece & 7) ^ (position & 7)) << 4));
        if (!whole) b[0] &= near_mask, b[1] &= far_mask, b[2] &= near_mask, b[3] &= far_mask;
        mma_bf16(chunk.o[n], a0, a1, a2, a3, b[0], b[1]);
        mma_bf16(chunk.o[n + 1], a0, a1, a2, a3, b[2], b[3]);
      }
    }
  }

  __device__ __forceinline__ void step(const Sight& sight, int box, int) {
    mbar_wait(&ring.sm.full[ring.at], ring.phase);
    if (first_token() <= sight.last - sight.all_last) {  // this warp has a token
      const int first = box * kBox;
      float s[4][4] = {};
      logits(ring.address(), s);
      if (!sight.every(first, kStep * kBox)) hide(s, first);
      soften(s);
      add_values(ring.address(), s, sight, first);
      __syncwarp();
    }
    if ((threadIdx.x & 31) == 0) mbar_arrive(&ring.sm.empty[ring.at]);
    ring.next();
  }

  __device__ __forceinline__ void end_chunk(const AttentionUnit& u, int number) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      chunk.sum[r] += __shfl_xor_sync(~0u, chunk.sum[r], 1);
      chunk.sum[r] += __shfl_xor_sync(~0u, chunk.sum[r], 2);
      const Row mine = row(r);
      if (u.part >= 0 && mine.token < u.num_tokens)
        chunk.store_part(p, r, u.part + mine.token, number, mine.head, (threadIdx.x & 3) * 2);
    }
    if (u.part < 0) all.fold_in(chunk);
  }
  __device__ __forceinline__ void finish(const AttentionUnit& u) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Row mine = row(r);
      if (u.part < 0 && mine.token < u.num_tokens)
        all.store_result(p, r, u.token + mine.token, mine.head, (threadIdx.x & 3) * 2);
    }
  }
};

}  // namespace lora_jax
