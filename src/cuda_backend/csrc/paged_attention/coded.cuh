// Pages in 8 bits (lora_jax/ops/kv_rows.py) for the kernels of heads and latents: warps turn rows of e4m3 into the
// bfloat16 that those read, in the order in which the copy engine would have brought it.
//
// A row's scale is a power of two, so every value is exact in bfloat16, and a result has the bits that pages of
// bfloat16 with the same values give. Rows end in their scale, so one begins at any multiple of 4 bytes, which the copy
// engine does not take: each warp copies its own rows by words, some slots ahead of turning them.
#pragma once
#include "paged_attention/stages.cuh"

namespace lora_jax {

constexpr int kCodedScale = 4;  // bytes behind a row's values
constexpr int coded_threads(int coders) { return (kMostConsumers + coders) * 32; }
// Registers of a coder's thread where a consumer's has so many: they share out what the kernel is launched with.
template <int CODERS, int CONSUMER>
constexpr int kCoderRegisters =
    (65536 / coded_threads(CODERS) / 8 * 8 * (kMostConsumers + CODERS) - kMostConsumers * CONSUMER) / CODERS / 8 * 8;

// What turns a row's values into bfloat16: products by one or, for scales above 128, two powers of two.
struct CodedFactors {
  uint32_t first, second;  // in both halves
  bool both;
  __device__ __forceinline__ explicit CodedFactors(uint32_t scale) {
    const uint32_t exponent = scale >> 23;  // of 2^(exponent - 127), or 255 for what is not a number
    both = exponent > 134 && exponent < 255;
    first = (exponent == 255 ? 0x7fc0u : min(exponent + 120u, 254u) << 7) * 0x10001u;
    second = (both ? exponent - 7 : 127u) << 7;
    second *= 0x10001u;
  }
  // e4m3 in the high bytes of the halves: exponent and mantissa as bfloat16 has them are a number 2^-120 as large.
  __device__ __forceinline__ uint32_t operator()(uint32_t high) const {
    const uint32_t v = multiply_bf16x2((high >> 4 & 0x07f007f0u) | (high & 0x80008000u), first);
    return both ? multiply_bf16x2(v, second) : v;
  }
};

// One of the warps that bring pages. WORDS: of 4 values of a row; STAGES: slots that are on their way.
template <int CODERS, int WORDS, int STAGES>
struct PageCoder {
  static constexpr int kPlaces = kBox / CODERS;  // positions of a box
  static constexpr int kLanes = WORDS < 32 ? WORDS : 32, kRows = 32 / kLanes;  // lanes of a row; rows of a turn
  static constexpr int kTurns = WORDS == 32 ? 4 : WORDS < 32 ? 2 : 1, kWordTurns = 1;  // at once
  static constexpr int kRowBytes = WORDS * 4 + kCodedScale;
  static_assert(STAGES >= 2 && STAGES <= 8 && 32 % kLanes == 0);
  const AttentionArgs& p;
  SlotRing ring;
  const int lane = threadIdx.x & 31, coder = static_cast<int>(threadIdx.x >> 5) - kMostConsumers;
  const int kinds, rows;  // K and V, or K alone; of a kind of a box, those of this warp
  const uint32_t raw;     // [stages, boxes, kinds, rows]: values, then all scales
  int stage = 0;
  uint32_t begun = 0, counts = 0;  // slots so far; boxes of the last of them, 4 bits each

  static __host__ __device__ int stage_bytes(const AttentionArgs& p, int slot_boxes) {  // of a warp
    return slot_boxes * (p.v_bytes ? 2 : 1) * kPlaces * p.cta_heads * kRowBytes;
  }
  __device__ __forceinline__ PageCoder(const AttentionArgs& p, const SlotRing& ring, const unsigned char* raw)
      : p(p), ring(ring), kinds(p.v_bytes ? 2 : 1), rows(kPlaces * p.cta_heads),
        raw(smem_u32(raw) + coder * STAGES * stage_bytes(p, p.slot_boxes)) {}

  __device__ __forceinline__ uint32_t values_at(int box, int kind) const {
    return raw + stage * stage_bytes(p, p.slot_boxes) + (box * kinds + kind) * rows * (WORDS * 4);
  }
  __device__ __forceinline__ uint32_t scales_at(int box, int kind) const {
    return raw + stage * stage_bytes(p, p.slot_boxes) + p.slot_boxes * kinds * rows * (WORDS * 4) +
           (box * kinds + kind) * rows * kCodedScale;
  }
  // Row i of this warp's in a box: its position there, and its head of the share's.
  __device__ __forceinline__ int place_of(int i) const { return coder * kPlaces + i % kPlaces; }
  __device__ __forceinline__ int head_of(int i) const { return i / kPlaces; }

  // Asks for this warp's rows of a box, whose first position is row `first` of the pages.
  __device__ __forceinline__ void fetch(int box, int64_t first, int head) const {
    for (int kind = 0; kind < kinds; ++kind) {
      const uint8_t* from = (kind ? p.v_rows : p.k_rows) + (first * p.kv_heads + head) * kRowBytes;
      auto row = [&](int i) { return from + (place_of(i) * p.kv_heads + head_of(i)) * kRowBytes; };
      const uint32_t values = values_at(box, kind), scales = scales_at(box, kind);
#pragma unroll kTurns
      for (int i = lane / kLanes; i < rows; i += kRows)
#pragma unroll kWordTurns
        for (int word = lane % kLanes; word < WORDS; word += kLanes)
          copy_4(values + (i * WORDS + word) * 4, row(i) + word * 4);
      for (int i = lane; i < rows; i += 32) copy_4(scales + i * kCodedScale, row(i) + WORDS * 4);
    }
  }

  // Turns what has come of a box; `to` is where K or V of the box begins.
  __device__ __forceinline__ void turn(int box, int kind, uint32_t to) const {
    const uint32_t values = values_at(box, kind), scales = scales_at(box, kind);
#pragma unroll kTurns
    for (int i = lane / kLanes; i < rows; i += kRows) {
      const int place = place_of(i);
      const CodedFactors factors(lds32(scales + i * kCodedScale));
      const uint32_t row = to + head_of(i) * (WORDS * 128) + place * 128;
#pragma unroll kWordTurns
      for (int word = lane % kLanes; word < WORDS; word += kLanes) {
        const uint32_t four = lds32(values + (i * WORDS + word) * 4);
        const uint32_t at = row + word / 16 * 2048 + ((word / 2 & 7) ^ (place & 7)) * 16 + word % 2 * 8;
        sts64(at, factors(__byte_perm(four, 0, 0x1404)), factors(__byte_perm(four, 0, 0x3424)));
      }
    }
  }

  // Gives the consumers the slot that was begun STAGES - 1 slots ago, if there was one.
  __device__ __forceinline__ void finish() {
    copies_wait<STAGES - 1>();
    __syncwarp();
    const int boxes = counts >> 4 * (STAGES - 1) & 15;
    if (boxes == 0) return;
    mbar_wait(&ring.sm.empty[ring.at], ring.phase ^ 1);
    for (int box = 0; box < boxes; ++box)
      for (int kind = 0; kind < kinds; ++kind)
        turn(box, kind, ring.address() + box * (p.k_bytes + p.v_bytes) + kind * p.k_bytes);
    __syncwarp();
    if (lane == 0) mbar_arrive(&ring.sm.full[ring.at]);
    ring.next();
  }
  // Counts a slot of so many boxes, whose copies have been asked for; none at the end.
  __device__ __forceinline__ void add(int boxes) {
    copies_commit();
    counts = counts << 4 | boxes;
    stage = stage + 1 == STAGES ? 0 : stage + 1;  // of the oldest one, and of the next one once that is turned
    finish();
  }
};

// As produce_pages, by all coders together.
template <int CODERS, int WORDS, int STAGES>
__device__ __forceinline__ void produce_coded(const AttentionArgs& p, const SlotRing& ring, const unsigned char* raw,
                                              int step) {
  PageCoder<CODERS, WORDS, STAGES> coder(p, ring, raw);
  Shares shares(p);
  AttentionUnit unit;
  for (int head; shares.next(unit, head);) {
    if (unit.num_tokens == 0) continue;
    const int* table = p.block_tables + static_cast<int64_t>(unit.sequence) * p.max_pages;
    const Boxes boxes(p, unit, unit.chunk, unit.num_chunks, step);
    for (int base = boxes.begin; base < boxes.end; base += 32) {
      const int page = __ldg(table + min(base + coder.lane, boxes.end - 1) * kBox / p.page_size);
      for (int box = base; box < min(base + 32, boxes.end); box += p.slot_boxes) {
        const int n = min(p.slot_boxes, boxes.end - box);
        for (int i = 0; i < n; ++i) {
          const int64_t from = __shfl_sync(~0u, page, box + i - base);
          coder.fetch(i, from * p.page_size + (box + i) * kBox % p.page_size, head);
        }
        coder.add(n);
      }
    }
  }
  for (int i = 1; i < STAGES; ++i) coder.add(0);
}

// `consumers`: warps.
template <class Consumer>
__global__ void __launch_bounds__(coded_threads(Consumer::kCoders), 1)
    coded_attention_kernel(const __grid_constant__ AttentionArgs p, int consumers) {
  extern __shared__ __align__(1024) unsigned char coded_raw[];
  SlotRing ring(p, coded_raw);
  const int warp = threadIdx.x >> 5;
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.slots; ++i) {
      mbar_init(&ring.sm.full[i], Consumer::kCoders);
      mbar_init(&ring.sm.empty[i], consumers);
    }
    fence_barriers();
  }
  __syncthreads();
  unsigned char* behind = coded_raw + kAttentionHeader + p.slots * p.slot_boxes * (p.k_bytes + p.v_bytes);
  if (warp < kMostConsumers) {
    more_registers<Consumer::kCodedRegisters>();
    if (warp < consumers) consume_pages<Consumer>(p, ring, behind, consumers * 32);
  } else {
    fewer_registers<kCoderRegisters<Consumer::kCoders, Consumer::kCodedRegisters>>();
    produce_coded<Consumer::kCoders, Consumer::kWords, Consumer::kCodedStages>(p, ring, behind + p.scratch,
                                                                                Consumer::kStep);
  }
}

}  // namespace lora_jax
