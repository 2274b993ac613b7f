// Attention of prompts with keys and values of their own: two consumer warpgroups, 64 rows each of one
// kv head (tokens x its query heads), share pages and multiply by wgmma. Tokens with few neighbours are
// left to heads.cuh.
//
// A warp has 16 rows, and does with each 32 positions what a warp of heads.cuh does, in the same order;
// chains of wgmma give the bits of chains of mma. So a token's bits are those of a decode step.
#pragma once
#include "device/arithmetic.cuh"
#include "device/wgmma.cuh"
#include "paged_attention/heads.cuh"

namespace lora_jax {

template <int KT, int NT>
struct PromptConsumer : HeadConsumer<KT, NT, true> {
  using Rows = HeadConsumer<KT, NT, true>;
  static constexpr int kStep = 4, kSlotBoxes = 4, kCoders = 0;
  static constexpr bool kApart = true;
  static constexpr int kGroup = 128;  // threads
  static constexpr int kPositions = kStep * kBox, kKeyBytes = KT * 32 * kPositions;  // of a slot
  using Rows::chunk, Rows::p, Rows::q, Rows::ring;

  __device__ __forceinline__ PromptConsumer(const AttentionArgs& p, const SlotRing& ring, unsigned char* scratch)
      : Rows(p, ring, scratch) {}

  // s[h][n]: of boxes 2 h and 2 h + 1, as in heads.cuh.
  __device__ __forceinline__ void logits(uint32_t slot, float (&s)[2][4][4]) const {
    float(&all)[32] = reinterpret_cast<float(&)[32]>(s);
    const WgmmaOperand keys = wgmma_lines(slot);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < KT; ++k) wgmma_keys(all, q[k], keys.at((k & 3) * 32 + k / 4 * kPositions * 128), k > 0);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_settle(all);
  }

  // Begins to add the values of boxes 2 h and 2 h + 1.
  __device__ __forceinline__ void begin_values(uint32_t slot, const float (&s)[4][4], int h) {
    float(&o)[NT * 4] = reinterpret_cast<float(&)[NT * 4]>(chunk.o);
    uint32_t weights[2][4];
#pragma unroll
    for (int box = 0; box < 2; ++box)
#pragma unroll
      for (int i = 0; i < 4; ++i) weights[box][i] = bf16x2(s[box * 2 + i / 2][i % 2 * 2], s[box * 2 + i / 2][i % 2 * 2 + 1]);
    const WgmmaOperand values = wgmma_turned(slot + kKeyBytes, 2048);
    wgmma_begin();
#pragma unroll
    for (int box = 0; box < 2; ++box)
      wgmma_columns(o, weights[box], values.at((h * 2 + box) * NT * 256));
    wgmma_commit();
  }
  __device__ __forceinline__ void end_values() {
    wgmma_wait<0>();
    wgmma_settle(reinterpret_cast<float(&)[NT * 4]>(chunk.o));
  }

  // What no token sees may hold anything: its V becomes zero. A warp of a warpgroup has a box.
  __device__ __forceinline__ void erase(uint32_t slot, const Sight& sight, int first) const {
    const int lane = threadIdx.x & 31, box = threadIdx.x / 32 % 4, place = lane % 16;
    const uint32_t row = slot + kKeyBytes + box * NT * 256 + place * 128;
    if (!sight.has(first + box * kBox + place))
      for (int i = lane / 16; i < NT; i += 2) sts128(row + i / 8 * 2048 + i % 8 * 16, make_uint4(0, 0, 0, 0));
    fence_shared_copies();  // before products and the next copy
    named_barrier_wait(2 + threadIdx.x / kGroup, kGroup);
  }

  // No branch that threads might take apart stands around products: the compiler guards each of them then,
  // which took a tenth longer. A warpgroup without tokens multiplies zeros.
  __device__ __forceinline__ void step(const Sight& sight, int box, int) {
    const int first = box * kBox;
    mbar_wait(&ring.sm.full[ring.at], ring.phase);
    // Known to be one number for the warp: operands' addresses are computed once, not by every thread.
    const uint32_t slot = __shfl_sync(~0u, ring.address(), 0);
    float s[2][4][4], shrink[2];
    logits(slot, s);
    if (!sight.by_all(first, kPositions)) this->hide(s[0], first), this->hide(s[1], first + 2 * kBox);
    if (__any_sync(~0u, !sight.by_some(first, kPositions))) erase(slot, sight, first);
    this->weigh(s[0], shrink);
    this->follow(shrink);
    begin_values(slot, s[0], 0);
    this->weigh(s[1], shrink);
    end_values();
    this->follow(shrink);
    begin_values(slot, s[1], 1);
    end_values();
    if ((threadIdx.x & 31) == 0) mbar_arrive(&ring.sm.empty[ring.at]);
    ring.next();
  }
};

}  // namespace lora_jax
