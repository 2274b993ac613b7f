// Pages in 8 bits (lora_jax/ops/kv_rows.py) for the kernel of heads: warps convert rows of e4m3 to bfloat16, in
// the layout in which the copy engine writes bfloat16 pages.
//
// A row's scale is a power of two, so every value is exact in bfloat16, and a result has the bits that pages of
// bfloat16 with the same values give. A row's tail of 16 bytes begins with its scale, so rows begin at multiples of 16:
// each warp has the copy engine bring its own positions of a box, several boxes ahead of the one that it turns.
#pragma once
#include "paged_attention/coded_words.cuh"

namespace lora_jax {

// The boxes of a CTA's shares, one after the other, for a warp.
struct BoxWalk {
  const AttentionArgs& p;
  const int step;
  Shares shares;
  AttentionUnit unit;
  int head = 0, box = 0, end = 0, base = 0, row = 0;  // row: of a lane's box from `base` on
  __device__ __forceinline__ BoxWalk(const AttentionArgs& p, int step) : p(p), step(step), shares(p) {}

  // Gives the first row of the next box in the pages, and whether it ends a slot of `boxes`.
  __device__ __forceinline__ bool next(int boxes, int& first, bool& ends) {
    while (box >= end) {
      if (!shares.next(unit, head)) return false;
      if (unit.num_tokens == 0) continue;
      const Boxes own(p, unit, unit.chunk, unit.num_chunks, step);
      box = base = own.begin, end = own.end;
      look();
    }
    if (box == base + 32) base = box, look();
    first = __shfl_sync(~0u, row, box - base);
    ends = ++box == end || (box - base) % boxes == 0;
    return true;
  }
  __device__ __forceinline__ void look() {
    const int own = min(base + static_cast<int>(threadIdx.x & 31), end - 1) * kBox, page = own / p.page_size;
    const int* table = p.block_tables + static_cast<int64_t>(unit.sequence) * p.max_pages;
    row = __ldg(table + page) * p.page_size + own - page * p.page_size;
  }
};

// One of the warps that bring pages. WORDS: of 4 values of a row; BOXES: of a slot.
template <int CODERS, int WORDS, int BOXES>
struct PageCoder {
  static_assert(CODERS <= kMostCoders);
  static constexpr int kPlaces = kBox / CODERS;  // positions of a box that a warp has, of all heads
  static constexpr int kPieces = WORDS / 4;      // of 16 values of a row
  static constexpr int kRowBytes = WORDS * 4 + kCodedTail;
  const AttentionArgs& p;
  SlotRing ring;
  const int lane = threadIdx.x & 31, warp = static_cast<int>(threadIdx.x >> 5) - kMostConsumers;
  const int position_bytes, tensors;  // of all heads; K, or K and V
  const uint32_t raw;                 // this warp's boxes
  uint64_t* const full;               // and their barriers

  __device__ __forceinline__ PageCoder(const AttentionArgs& p, const SlotRing& ring, unsigned char* behind)
      : p(p), ring(ring), position_bytes(p.cta_heads * kRowBytes), tensors(p.v_bytes ? 2 : 1),
        raw(smem_u32(behind) + warp * p.raw_boxes * tensors * kPlaces * position_bytes),
        full(ring.sm.raw + warp * kMostRaw) {}
  __device__ __forceinline__ int box_bytes() const { return tensors * kPlaces * position_bytes; }

  // Asks for this warp's positions of a box.
  __device__ __forceinline__ void ask(int at, int first, int head) const {
    if (lane == 0) mbar_expect(&full[at], box_bytes());
    __syncwarp();
    if (lane >= tensors * kPlaces) return;
    const uint8_t* pages = lane < kPlaces ? p.k_rows : p.v_rows;
    const int64_t row = first + warp * kPlaces + lane % kPlaces;
    bulk_copy(raw + at * box_bytes() + lane * position_bytes, pages + (row * p.kv_heads + head) * kRowBytes,
              position_bytes, &full[at]);
  }

  // Turns K or V of a box; `to` is where it begins in the slot.
  __device__ __forceinline__ void turn(uint32_t from, uint32_t to) const {
#pragma unroll 2
    for (int i = lane; i < kPlaces * p.cta_heads * kPieces; i += 32) {
      const int row = i / kPieces, piece = i - row * kPieces, head = row / kPlaces, own = row - head * kPlaces;
      const uint32_t at = from + own * position_bytes + head * kRowBytes;
      const uint4 v = lds128(at + piece * 16);
      const CodedFactors factors(lds32(at + WORDS * 4));
      const int place = warp * kPlaces + own;
      const uint32_t block = to + head * (WORDS * 128) + piece / 4 * 2048 + place * 128;
      const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t a = words[half * 2], b = words[half * 2 + 1];
        sts128(block + (((piece * 2 + half) & 7) ^ (place & 7)) * 16,
               make_uint4(factors(__byte_perm(a, 0, 0x1404)), factors(__byte_perm(a, 0, 0x3424)),
                          factors(__byte_perm(b, 0, 0x1404)), factors(__byte_perm(b, 0, 0x3424))));
      }
    }
  }

  __device__ __forceinline__ void run(int step) {
    BoxWalk walk(p, step);
    uint32_t ends = 0, phase = 0;  // a bit for each box that is on its way
    int asked = 0, turned = 0, box = 0;
    const auto ask_next = [&](int at) {
      int first;
      bool last;
      if (!walk.next(BOXES, first, last)) return;
      ask(at, first, walk.head);
      ends = (ends & ~(1u << at)) | static_cast<uint32_t>(last) << at, ++asked;
    };
    for (int at = 0; at < p.raw_boxes; ++at) ask_next(at);
    for (int at = 0; turned < asked; ++turned) {
      mbar_wait(&full[at], phase);
      if (box == 0) mbar_wait(&ring.sm.empty[ring.at], ring.phase ^ 1);
      const uint32_t from = raw + at * box_bytes(), to = ring.address() + box * (p.k_bytes + p.v_bytes);
      turn(from, to);
      if (tensors == 2) turn(from + kPlaces * position_bytes, to + p.k_bytes);
      __syncwarp();
      const bool last = ends >> at & 1;
      ask_next(at);
      ++box;
      if (last) {
        if (lane == 0) mbar_arrive(&ring.sm.full[ring.at]);
        ring.next(), box = 0;
      }
      if (++at == p.raw_boxes) at = 0, phase ^= 1;
    }
  }
};

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
    for (int i = 0; i < Consumer::kCoders * kMostRaw; ++i) mbar_init(&ring.sm.raw[i], 1);
    fence_barriers();
  }
  __syncthreads();
  unsigned char* behind = coded_raw + kAttentionHeader + p.slots * p.slot_boxes * (p.k_bytes + p.v_bytes);
  if (warp < kMostConsumers) {
    more_registers<Consumer::kCodedRegisters>();
    if (warp < consumers) consume_pages<Consumer>(p, ring, behind, consumers * 32);
  } else {
    fewer_registers<kCoderRegisters<Consumer::kCoders, Consumer::kCodedRegisters>>();
    if constexpr (Consumer::kSlotBoxes == 1)
      produce_words<Consumer::kCoders, Consumer::kWords>(p, ring, Consumer::kStep);
    else
      PageCoder<Consumer::kCoders, Consumer::kWords, Consumer::kSlotBoxes>(p, ring, behind + p.raw_from).run(Consumer::kStep);
  }
}

}  // namespace lora_jax
