// Attention with keys and values of their own: a consumer warp owns a kv head and up to 16 rows
// (tokens x query heads of the kv head), the m16 operand of mma, and needs no other warp.
#pragma once
#include "device/arithmetic.cuh"
#include "paged_attention/stages.cuh"

namespace lora_jax {

// KT: tiles of 16 of k_dim; NT: tiles of 8 of v_dim. WHOLE: there are units of several chunks; the sums
// of the chunks before wait in shared memory then, so that registers have room for this chunk's.
template <int KT, int NT, bool WHOLE>
struct HeadConsumer {
  static constexpr int kStep = 2;  // boxes of a slot
  static constexpr int kSlotBoxes = 2, kWords = KT * 4, kCoders = 8, kCodedRegisters = KT == 8 ? 200 : 152;  // see coded.cuh
  static constexpr bool kApart = false;
  static constexpr int kScratch = WHOLE ? kMostConsumers * 32 * NT * 16 : 0;  // bytes
  const AttentionArgs& p;
  SlotRing ring;
  float4* before;  // [NT, threads]: o of the chunks before
  float before_top[2], before_sum[2];
  int place, heads_per_kv, first_token;  // this warp's kv head of the CTA's; its first token of the unit's
  int first_head;     // of the share's kv heads
  int positions[2];   // of the tokens of rows g and g + 8
  uint32_t keys, values;  // where in a slot this lane's rows for ldmatrix lie
  uint32_t q[KT][4];
  RowSums<NT> chunk;

  __device__ __forceinline__ HeadConsumer(const AttentionArgs& p, const SlotRing& ring, unsigned char* scratch)
      : p(p), ring(ring), before(reinterpret_cast<float4*>(scratch) + threadIdx.x) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    place = warp % p.cta_heads, heads_per_kv = p.q_heads / p.kv_heads;
    first_token = warp / p.cta_heads * (16 / heads_per_kv);
    // Pieces of 16 bytes are swizzled by their row; piece ^ 2 j is j * 2 further.
    const int key = (lane >> 4) * 8 + (lane & 7), value = lane & 15;
    keys = place * (KT * 512) + key * 128 + ((((lane >> 3) & 1) ^ (key & 7)) << 4);
    values = p.k_bytes + place * (NT * 256) + value * 128 + (((lane >> 4) ^ (value & 7)) << 4);
  }

  __device__ __forceinline__ uint32_t box_bytes() const { return p.k_bytes + p.v_bytes; }

  // The token and the head of row g (+ 8 for r = 1); a token after the unit's last for rows of none.
  struct Row {
    int token, head;
  };
  __device__ __forceinline__ Row row(int r) const {
    const int i = (threadIdx.x & 31) / 4 + r * 8;
    const bool used = i < 16 / heads_per_kv * heads_per_kv;
    return Row{used ? first_token + i / heads_per_kv : 1 << 20, (first_head + place) * heads_per_kv + i % heads_per_kv};
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
  }
  __device__ __forceinline__ void begin_chunk() { chunk.clear(); }

  // s[n][e]: logits of row g (+ 8 from e = 2 on) at position n * 8 + (lane & 3) * 2 + e % 2 of the slot.
  __device__ __forceinline__ void logits(uint32_t slot, float (&s)[4][4]) const {
    const uint32_t at[2] = {slot + keys, slot + keys + box_bytes()};
#pragma unroll
    for (int k = 0; k < KT; ++k)
#pragma unroll
      for (int box = 0; box < 2; ++box) {
        uint32_t b[4];
        ldmatrix(b, (at[box] ^ (k & 3) << 5) + k / 4 * 2048);
        mma_bf16(s[box * 2], q[k][0], q[k][1], q[k][2], q[k][3], b[0], b[1]);
        mma_bf16(s[box * 2 + 1], q[k][0], q[k][1], q[k][2], q[k][3], b[2], b[3]);
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

  // What no token sees may hold anything: its V becomes zero, which is what zero weights need.
  __device__ __forceinline__ void erase(uint32_t slot, const Sight& sight, int first) const {
    const int lane = threadIdx.x & 31;
    const uint32_t row = slot + lane / 16 * box_bytes() + p.k_bytes + place * (NT * 256) + lane % 16 * 128;
    if (!sight.has(first + lane))
      for (int i = 0; i < NT; ++i) sts128(row + i / 8 * 2048 + i % 8 * 16, make_uint4(0, 0, 0, 0));
    fence_shared_copies();  // before the next copy to this place
    __syncwarp();
  }

  // Turns logits into exponentials against the running base; the sum of them follows it, and o is worth
  // `shrink` of what it was then. A base is at least the maximum and at most 8 more, in steps of 8: it
  // grows rarely, and then by a power of two.
  __device__ __forceinline__ void weigh(float (&s)[4][4], float (&shrink)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most = kNone;
#pragma unroll
      for (int n = 0; n < 4; ++n) most = fmaxf(most, fmaxf(s[n][r * 2], s[n][r * 2 + 1]));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2)) * p.scale_log2;
      most = fmaxf(kBaseStep / 2 + ((most + kToBaseSteps) - kToBaseSteps), chunk.top[r]);
      const float base = base_of(most);
      shrink[r] = exp2_approx(chunk.top[r] - base);
      float sum = 0;
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int e = r * 2; e < r * 2 + 2; ++e) sum += s[n][e] = exp2_approx(__fmaf_rn(s[n][e], p.scale_log2, -base));
      chunk.top[r] = most, chunk.sum[r] = __fmaf_rn(chunk.sum[r], shrink[r], sum);
    }
  }
  // Scaling by one would change nothing.
  __device__ __forceinline__ void follow(const float (&shrink)[2]) {
    if (__any_sync(~0u, shrink[0] != 1.f || shrink[1] != 1.f)) chunk.scale(shrink[0], shrink[1]);
  }

  __device__ __forceinline__ void add_values(uint32_t slot, const float (&s)[4][4]) {
#pragma unroll
    for (int box = 0; box < 2; ++box) {
      const float(&near)[4] = s[box * 2], (&far)[4] = s[box * 2 + 1];
      const uint32_t a0 = bf16x2(near[0], near[1]), a1 = bf16x2(near[2], near[3]);
      const uint32_t a2 = bf16x2(far[0], far[1]), a3 = bf16x2(far[2], far[3]);
      const uint32_t at = slot + values + box * box_bytes();
#pragma unroll
      for (int n = 0; n < NT; n += 2) {
        uint32_t b[4];
        ldmatrix_trans(b, (at ^ (n / 2 & 3) << 5) + n / 8 * 2048);
        mma_bf16(chunk.o[n], a0, a1, a2, a3, b[0], b[1]);
        mma_bf16(chunk.o[n + 1], a0, a1, a2, a3, b[2], b[3]);
      }
    }
  }

  __device__ __forceinline__ void step(const Sight& sight, int box, int) {
    const int first = box * kBox;
    mbar_wait(&ring.sm.full[ring.at], ring.phase);
    if (first_token <= sight.last - sight.all_last) {  // this warp has a token
      const uint32_t slot = ring.address();
      float s[4][4] = {};
      logits(slot, s);
      if (!sight.by_all(first, kStep * kBox)) hide(s, first);
      if (!sight.by_some(first, kStep * kBox)) erase(slot, sight, first);
      float shrink[2];
      weigh(s, shrink);
      follow(shrink);
      add_values(slot, s);
      __syncwarp();
    }
    if ((threadIdx.x & 31) == 0) mbar_arrive(&ring.sm.empty[ring.at]);
    ring.next();
  }

  // Takes the chunks before in, and becomes what the next chunk takes in, or the result.
  __device__ __forceinline__ void fold_whole(bool first, bool last) {
    const int threads = kMostConsumers * 32;
    if (!first) chunk.fold(before_top, before_sum, [&](int n) { return before[n * threads]; });
    if (last) return;
#pragma unroll
    for (int n = 0; n < NT; ++n)
      before[n * threads] = make_float4(chunk.o[n][0], chunk.o[n][1], chunk.o[n][2], chunk.o[n][3]);
#pragma unroll
    for (int r = 0; r < 2; ++r) before_top[r] = chunk.top[r], before_sum[r] = chunk.sum[r];
  }

  __device__ __forceinline__ void end_chunk(const AttentionUnit& u, int number) {
    const bool last = number == u.chunk + u.num_chunks - 1;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      chunk.sum[r] += __shfl_xor_sync(~0u, chunk.sum[r], 1);
      chunk.sum[r] += __shfl_xor_sync(~0u, chunk.sum[r], 2);
    }
    if (WHOLE && u.part < 0) fold_whole(number == u.chunk, last);
    if (!last) return;
    const int column = (threadIdx.x & 3) * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Row mine = row(r);
      if (mine.token >= u.num_tokens) continue;
      if (u.part >= 0) chunk.store_part(p, r, u.part + mine.token, number, mine.head, column);
      else chunk.store_result(p, r, u.token + mine.token, mine.head, column);
    }
  }
};

}  // namespace lora_jax
