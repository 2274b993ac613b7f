// Latents in 8 bits: each warp loads its own rows by words, a slot ahead of turning them.
//
// Long rows of one head keep enough loads in flight. Brought by the copy engine, as those of heads are (coded.cuh), they
// take longer: see docs/notes/2026-11-28-eight-bits.md.
#pragma once
#include "device/arithmetic.cuh"
#include "paged_attention/stages.cuh"

namespace lora_jax {

constexpr int kCodedTail = 16;  // bytes behind a row's values: its scale, and nothing
constexpr int coded_threads(int coders) { return (kMostConsumers + coders) * 32; }
// Registers of a coder's thread where a consumer's has so many: they share out what the kernel is launched with.
template <int CODERS, int CONSUMER>
constexpr int kCoderRegisters =
    (65536 / coded_threads(CODERS) / 8 * 8 * (kMostConsumers + CODERS) - kMostConsumers * CONSUMER) / CODERS / 8 * 8;

// What turns a row's values into bfloat16: a product by a power of two or, for scales above 128, by two.
struct CodedFactors {
  uint32_t first, second;  // in both halves
  bool both;
  __device__ __forceinline__ explicit CodedFactors(uint32_t scale) {
    const uint32_t exponent = scale >> 23;  // of 2^(exponent - 127), or 255 for what is not a number
    both = exponent > 134 && exponent < 255;
    first = (exponent == 255 ? 0x7fc0u : min(exponent + 120u, 254u) << 7) * 0x10001u;
    second = ((both ? exponent - 7 : 127u) << 7) * 0x10001u;
  }
  // e4m3 in the high bytes of the halves: exponent and mantissa as bfloat16 has them are a number 2^-120 as large.
  __device__ __forceinline__ uint32_t operator()(uint32_t high) const {
    const uint32_t v = multiply_bf16x2((high >> 4 & 0x07f007f0u) | (high & 0x80008000u), first);
    return both ? multiply_bf16x2(v, second) : v;
  }
};

// One of the warps that bring pages, of which a slot has one box. WORDS: of 4 values of a row.
template <int CODERS, int WORDS>
struct WordCoder {
  static constexpr int kPlaces = kBox / CODERS;  // positions of a box that a warp has, of all heads
  static constexpr int kLanes = WORDS < 32 ? WORDS : 32, kRows = 32 / kLanes;  // lanes of a row; rows of a turn
  static constexpr int kOwn = kPlaces / kRows;                                 // positions that a lane has
  static constexpr int kTurns = kOwn * (WORDS > 32 ? 1 : 128 / WORDS);         // of up to 512 columns of all heads
  static constexpr int kWords = (WORDS + 31) / 32;                             // of a lane in a turn
  static constexpr int kRowBytes = WORDS * 4 + kCodedTail;
  static_assert(kOwn >= 1 && kTurns * kRows <= 32);
  // K or V of a slot's positions, on their way: words of rows, and of each row's scale by one lane.
  struct Raw {
    int words[kTurns][kWords], scales;
  };
  const AttentionArgs& p;
  SlotRing ring;
  const int lane = threadIdx.x & 31;
  const int place = (static_cast<int>(threadIdx.x >> 5) - kMostConsumers) * kPlaces;  // the first one of this warp
  const int word = lane % kLanes, row = lane / kLanes;  // this lane's first; its first row of a turn
  bool waiting = false;  // a slot is on its way
  Raw keys, values;

  __device__ __forceinline__ WordCoder(const AttentionArgs& p, const SlotRing& ring) : p(p), ring(ring) {}

  // Asks for this warp's rows of the box whose first position is row `first` of the pages.
  __device__ __forceinline__ void load(Raw& raw, const uint8_t* pages, int first, int head) const {
    const int stride = p.kv_heads * kRowBytes;
    const uint8_t* from = pages + static_cast<int64_t>(first + place) * stride + head * kRowBytes;
    const uint8_t* mine = from + row * stride + word * 4;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn)
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const uint8_t* at = mine + turn % kOwn * stride + turn / kOwn * kRowBytes + w * 128;
        if (turn / kOwn < p.cta_heads && word + w * 32 < WORDS)
          raw.words[turn][w] = load_now(reinterpret_cast<const int*>(at));
      }
    const uint8_t* scale = from + lane % kPlaces * stride + lane / kPlaces * kRowBytes + WORDS * 4;
    if (lane < kPlaces * p.cta_heads) raw.scales = load_now(reinterpret_cast<const int*>(scale));
  }

  // Turns what has come; `to` is where K or V of the slot begins.
  __device__ __forceinline__ void turn(const Raw& raw, uint32_t to) const {
    const uint32_t mine = to + word / 16 * 2048 + word % 2 * 8;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      if (turn / kOwn >= p.cta_heads) break;
      const int own = place + row + turn % kOwn;
      const CodedFactors factors(__shfl_sync(~0u, raw.scales, turn * kRows + row));
      const uint32_t piece = mine + own * 128 + ((word / 2 & 7) ^ (own & 7)) * 16;
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        if (word + w * 32 >= WORDS) continue;
        const uint32_t four = raw.words[turn][w];
        sts64(piece + turn / kOwn * (WORDS * 128) + w * 4096, factors(__byte_perm(four, 0, 0x1404)),
              factors(__byte_perm(four, 0, 0x3424)));
      }
    }
  }

  // Gives the consumers the slot that is on its way, if one is.
  // Then asks for the next one, unless it is the end.
  __device__ __forceinline__ void step(int first, int head, bool more) {
    if (waiting) {
      mbar_wait(&ring.sm.empty[ring.at], ring.phase ^ 1);
      turn(keys, ring.address());
    }
    if (more) load(keys, p.k_rows, first, head);
    if (p.v_bytes) {
      if (waiting) turn(values, ring.address() + p.k_bytes);
      if (more) load(values, p.v_rows, first, head);
    }
    if (waiting) {
      __syncwarp();
      if (lane == 0) mbar_arrive(&ring.sm.full[ring.at]);
      ring.next();
    }
    waiting = more;
  }
};

// As produce_pages, by all coders together.
template <int CODERS, int WORDS>
__device__ __forceinline__ void produce_words(const AttentionArgs& p, const SlotRing& ring, int step) {
  WordCoder<CODERS, WORDS> coder(p, ring);
  Shares shares(p);
  AttentionUnit unit;
  for (int head; shares.next(unit, head);) {
    if (unit.num_tokens == 0) continue;
    const int* table = p.block_tables + static_cast<int64_t>(unit.sequence) * p.max_pages;
    const Boxes boxes(p, unit, unit.chunk, unit.num_chunks, step);
    for (int base = boxes.begin; base < boxes.end; base += 32) {
      const int own = min(base + coder.lane, boxes.end - 1) * kBox, page = own / p.page_size;
      const int row = __ldg(table + page) * p.page_size + own - page * p.page_size;
      for (int box = base; box < min(base + 32, boxes.end); ++box)
        coder.step(__shfl_sync(~0u, row, box - base), head, true);
    }
  }
  coder.step(0, 0, false);
}

}  // namespace lora_jax
