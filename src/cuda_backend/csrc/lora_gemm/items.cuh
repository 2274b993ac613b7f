// Grouped LoRA on Hopper in one launch: h = scaling * x A^T, then y += h B, for rows of many adapters.
//
// Or y = h B, which reads no y: then rows of no item become zero.
//
// An item is up to kMaxRows rows of one segment (adapter, or adapter x expert) of one module. Its
// weights are the 16-row operand of mma and its rows the 8-column operand (swap-AB), so a segment of
// one row costs an n = 8 tile. Units of work are (16 rows of an item or all, up to 32 rank rows) of the shrink,
// each over the whole of d_in, and (item, range of columns) of the expand: the shrink of a long segment
// would keep others waiting, the expand reads its weights once. The grid is persistent; Plan says
// which CTA does what. In each CTA one warp makes units out ahead of their use, one streams weights
// by tensor copies, two copy the item's rows of x or y (any order of rows will do), and the other
// warps multiply. Weights stream several stages ahead, across the borders of units.
//
//   shrink  A sum over k has no natural order, so lane t of a quad takes 8 consecutive k (16
//           bytes) of a weight row and the same 8 k of a batch row: both operands agree on k.
//   expand  B is kept rank-major [rank, d_out]. A lane reads 8 consecutive columns of the rank
//           rows it needs and pairs neighbouring rows with byte permutes; what it ends up with is
//           8 consecutive columns of one batch row: one 16-byte update of y.
//
// Sums have one fixed order: k mod 128 picks the warp, which adds its k in order; then warps in
// order. So a row's result depends on nothing but the row and its adapter.
//
// From shrink to expand h goes through memory, and its words are their own flags: all CTAs make them
// kMissing while the first weights are on their way, and know of each other that they have before the
// first of h is there; a shrink unit stores them; an expand unit reads until none is missing. That needs
// no fence, no counter and no second load. All CTAs fit the GPU at once, and each does its shrink units
// before it waits for h, so the wait always ends.
//
// The last 8-row box of a rank that is no multiple of 8 also reads rows of the next adapter. Shrink
// drops their sums and expand their weights, whatever the values.
#pragma once
#include "device/arithmetic.cuh"
#include "lora_gemm/expand_operand.cuh"
#include "lora_gemm/unit_fetch.cuh"

namespace lora_jax {

__device__ __forceinline__ void consumer_sync() { consumer_barrier(kConsumers * 32); }

// ---------------------------------------------------------------- producers
template <class S>
__device__ void produce_weights(const PairArgs& p, S& sm) {
  const int lane = threadIdx.x & 31;
  Ring<S::kStages> ring;
  Ring<S::kTickets> taken;
  while (true) {
    const Unit& u = take(sm, taken).unit;
    if (u.kind == kEnd) return;
    const CUtensorMap *narrow = p.maps[u.kind - kShrink], *map = narrow + (u.wide != kNarrow);
    const int groups = u.groups, bytes = 1024 << u.wide;
    for (int c = u.begin; c < u.end; c += u.width) {
      if constexpr (S::kTellsAsked) {  // of the unit: all but two stages
        const int left = u.end - c;
        if (lane == 0 && left <= 2 * u.width && (left > u.width || c == u.begin)) mbar_arrive(&sm.asked[taken.at()]);
      }
      mbar_wait(&sm.empty[ring.at()], ring.phase() ^ 1);
      const int last = min(u.width, u.end - c) - 1, boxes = ((last >> (u.wide + 6)) + 1) * groups;
      const int wide = (last & (64 << u.wide) - 1) < kBlock ? boxes - groups : boxes;  // the others need no more
      if (lane == 0) mbar_expect(&sm.full[ring.at()], wide * bytes + (boxes - wide) * kBlock * 16);
      __syncwarp();
      const uint32_t dst = smem_u32(sm.stages[ring.at()]);
      for (int i = lane; i < boxes; i += 32) {
        const int along = i / groups;
        box_copy(dst + i * bytes, i < wide ? map : narrow, u.weight_row + (i - along * groups) * 8, (c >> 6) + (along << u.wide),
                 &sm.full[ring.at()]);
      }
      ring.next();
    }
    let_go(sm, taken);
  }
}

// The row warps take turns by row; the last one brings h too.
template <class S>
__device__ void produce_rows(const PairArgs& p, S& sm) {
  constexpr int kWarps = S::kRowWarps;
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) - kRowWarp, row = lane * kWarps + warp;
  Ring<S::kStages> ring;
  Ring<S::kTickets> taken;
  uint32_t phase = 0;
  while (true) {
    const auto& t = take(sm, taken);
    const Unit& u = t.unit;
    if (u.kind == kEnd) return;
    if constexpr (S::kBringsH) {
      if (warp == kWarps - 1 && u.kind == kExpand && u.num_rows > kHeldRows) bring_h(p, sm, u, phase);
    }
    const bool mine = row < u.staged_rows;
    const __nv_bfloat16* from = u.kind == kExpand ? p.modules[u.module].y : p.x;
    if (mine) from += t.rows[row] * static_cast<int64_t>(u.kind == kExpand ? p.d_out : p.d_in);
    const int width = u.width, my_rows = (u.staged_rows + kWarps - 1 - warp) / kWarps;
    for (int c = u.begin; c < u.end; c += width) {
      mbar_wait(&sm.empty[ring.at()], ring.phase() ^ 1);
      const int bytes = min(width, u.end - c) * 2;
      if (lane == 0) mbar_expect(&sm.full[ring.at()], my_rows * bytes);
      __syncwarp();
      const uint32_t to = smem_u32(sm.stages[ring.at()]) + rows_at(u) + row * row_stride(width);
      if (mine) bulk_copy(to, from + c, bytes, &sm.full[ring.at()]);
      ring.next();
    }
    let_go(sm, taken);
  }
}

// ---------------------------------------------------------------- shrink
// Two chains of sums, by bit 3 of k within a lane's 8, keep the tensor cores' latency apart.
template <int GROUPS, int J>
using Sums = float[2][(GROUPS + 1) / 2][J][4];

// Which row of 8 the lanes of quad g read, of either operand: quads 2 i and 2 i + 1, which read at a time, have
// rows that lie in other banks.
__device__ __forceinline__ int row_of_quad(int g) { return g >> 1 | (g & 1) << 2; }

// Where in a stage a lane reads, and how the stage is laid out.
template <int GROUPS, int J>
struct ShrinkReads {
  uint32_t w[GROUPS], x[J];
  uint32_t box, half;  // bytes of all boxes of as many columns; steps of 128 columns in one, less 1
  int log;             // of the columns of a box
  __device__ __forceinline__ explicit ShrinkReads(const Unit& u) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = row_of_quad(lane >> 2), q = lane & 3;
    const uint32_t group = 1024 << u.wide, mine = (warp >> 1) * 1024 + row * 128 + ((((warp & 1) * 4 + q) ^ row) << 4);
    box = u.groups * group, half = (1 << u.wide >> 1) - 1, log = u.wide + 6;
    // Groups and rows past the end read the first: results are not used.
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) w[i] = mine + (i < u.groups ? i : 0) * group;
#pragma unroll
    for (int j = 0; j < J; ++j) x[j] = rows_at(u) + (j * 8 + row < u.num_rows ? j * 8 + row : 0) * row_stride(u.width) + q * 16;
  }
};

// Adds this warp's k of a stage, 32 columns out of 128, for GROUPS groups of 8 rank rows and J of 8 batch rows.
template <int GROUPS, int J>
__device__ __forceinline__ void shrink_stage(const ShrinkReads<GROUPS, J>& from, uint32_t base, int columns,
                                             Sums<GROUPS, J>& acc) {
#pragma unroll(GROUPS * J <= 2 ? 4 : J > 2 ? 1 : 2)
  for (int k = (threadIdx.x >> 5) * 32; k < columns; k += 32 * kConsumers) {
    const uint32_t at = base + (k >> from.log) * from.box + (k >> 7 & from.half) * 2048;
    uint4 x[J], w[GROUPS];
#pragma unroll
    for (int j = 0; j < J; ++j) x[j] = lds128(base + from.x[j] + k * 2);
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) w[i] = lds128(at + from.w[i]);
#pragma unroll
    for (int i = 0; i < GROUPS; i += 2) {
      const uint4 &lo = w[i], &hi = w[i + 1 < GROUPS ? i + 1 : i];  // a second half that is none gives sums nobody takes
#pragma unroll
      for (int j = 0; j < J; ++j) {
        mma_bf16(acc[0][i / 2][j], lo.x, hi.x, lo.y, hi.y, x[j].x, x[j].y);
        mma_bf16(acc[1][i / 2][j], lo.z, hi.z, lo.w, hi.w, x[j].z, x[j].w);
      }
    }
  }
}

// Sums the chains and the warps' parts in order and hands this unit's columns of h over. `scratch`
// is the unit's last stage.
template <int GROUPS, int J>
__device__ __forceinline__ void finish_shrink(const PairArgs& p, const Unit& u, float* scratch, uint64_t* release,
                                              uint64_t* cleared, const Sums<GROUPS, J>& acc) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  constexpr int N = J * 8, LD = GROUPS * 8 | 8;
#pragma unroll
  for (int i = 0; i < GROUPS; ++i)
#pragma unroll
    for (int j = 0; j < J; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int of = i % 2 * 2 + c;
        const int n = j * 8 + row_of_quad(q * 2 + c), rank = i * 8 + row_of_quad(g);
        scratch[(warp * N + n) * LD + rank] = acc[0][i / 2][j][of] + acc[1][i / 2][j][of];
      }
  consumer_sync();
  const int r = u.first_rank + lane;
  auto* h = reinterpret_cast<uint32_t*>(p.h + (static_cast<int64_t>(u.module) * p.num_rows + u.place) * p.h_stride + r);
  if (p.expand) mbar_wait(cleared, 0);
  for (int n = warp; n < u.num_rows; n += kConsumers) {
    float s = 0.f;
    if (lane < u.groups * 8 && r < u.rank) {
#pragma unroll
      for (int w = 0; w < kConsumers; ++w) s += scratch[(w * N + n) * LD + lane];
      s *= u.scaling;
    }
    const uint32_t both = bf16x2(s, __shfl_xor_sync(~0u, s, 1));
    if (lane < u.groups * 8 && lane % 2 == 0) store_word(h + n * (p.h_stride / 2), both);
  }
  fence_shared_copies();  // which write the scratch next; a fence of all memory would wait for h's stores
  __syncwarp();
  if (lane == 0) mbar_arrive(release);
}

template <int GROUPS, int J, class S>
__device__ __forceinline__ void shrink_unit(const PairArgs& p, S& sm, Ring<S::kStages>& ring, const Unit& u) {
  static_assert(kConsumers * 8 * J * (GROUPS * 8 | 8) * 4 <= S::kStage, "the warps' parts must fit a stage");
  const int width = u.width, lane = threadIdx.x & 31;
  const ShrinkReads<GROUPS, J> from(u);
  Sums<GROUPS, J> acc = {};
  for (int k = 0; k < p.d_in; k += width) {
    mbar_wait(&sm.full[ring.at()], ring.phase());
    shrink_stage<GROUPS, J>(from, smem_u32(sm.stages[ring.at()]), min(width, p.d_in - k), acc);
    if (k + width < p.d_in) {
      __syncwarp();
      if (lane == 0) mbar_arrive(&sm.empty[ring.at()]);
      ring.next();
    }
  }
  consumer_sync();  // all warps have read the last stage
  finish_shrink<GROUPS, J>(p, u, reinterpret_cast<float*>(sm.stages[ring.at()]), &sm.empty[ring.at()], &sm.cleared, acc);
  ring.next();
}

// ---------------------------------------------------------------- expand
// acc[i] += h B for 64 columns: columns 8 * g + 2 * i and the next, rows of the item by lane.
template <int STEPS, int J>
__device__ __forceinline__ void expand_block(const Unit& u, uint32_t weights, const Factors<STEPS, J>& h,
                                             float (&acc)[4][J][4]) {
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  const uint32_t even = weights + q * 256 + ((g ^ (q * 2)) << 4), odd = (even ^ 16) + 128;  // rows q * 2 and the next
  const uint32_t group = 1024 << u.wide;
#pragma unroll
  for (int s = 0; s < STEPS; ++s) {
    if (s * 2 >= u.groups) break;
    const bool whole = s * 2 + 1 < u.groups;  // else h is 0 for the second group of 8, whatever the weights
    const uint32_t lo = s * 2 * group, hi = whole ? lo + group : lo;
    uint4 w0 = lds128(even + lo), w1 = lds128(odd + lo), w2 = lds128(even + hi), w3 = lds128(odd + hi);
    const int left = u.rank - s * 16;
    if (left < 16) {  // h is 0 past the rank, but 0 times a foreign NaN is not
      const uint4 none = make_uint4(0, 0, 0, 0);
      if (left <= q * 2) w0 = none;
      if (left <= q * 2 + 1) w1 = none;
      if (left <= q * 2 + 8) w2 = none;
      if (left <= q * 2 + 9) w3 = none;
    }
    auto step = [&](float (&out)[J][4], uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
      const uint32_t a0 = __byte_perm(r0, r1, 0x5410), a1 = __byte_perm(r0, r1, 0x7632);
      const uint32_t a2 = __byte_perm(r2, r3, 0x5410), a3 = __byte_perm(r2, r3, 0x7632);
#pragma unroll
      for (int j = 0; j < J; ++j) mma_bf16(out[j], a0, a1, a2, a3, h[s][j][0], h[s][j][1]);
    };
    step(acc[0], w0.x, w1.x, w2.x, w3.x);
    step(acc[1], w0.y, w1.y, w2.y, w3.y);
    if (STEPS * J > 8) __syncwarp();  // else loads are put so far ahead that registers run out
    step(acc[2], w0.z, w1.z, w2.z, w3.z);
    step(acc[3], w0.w, w1.w, w2.w, w3.w);
  }
}

// Warps share out blocks of 64 columns x 8 * J rows; the rows of a warp are the same throughout.
template <int STEPS, int J, class Ticket>
__device__ __forceinline__ void expand_stage(const PairArgs& p, const Ticket& t, uint32_t base, int width, int col,
                                             int columns, int n0, int row_blocks, const Factors<STEPS, J>& h) {
  const Unit& u = t.unit;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  const int first = col + g * 8;
  for (int b = warp / row_blocks; b * 64 < columns; b += kConsumers / row_blocks) {
    float acc[4][J][4] = {};
    const int box = b >> u.wide, piece = b - (box << u.wide);
    expand_block<STEPS, J>(u, base + ((box * u.groups << u.wide) + piece) * 1024, h, acc);
#pragma unroll
    for (int j = 0; j < J; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int n = n0 + j * 8 + q * 2 + e;
        if (n >= u.num_rows) continue;
        const int64_t at = static_cast<int64_t>(t.rows[n]) * p.d_out + first + b * 64;
        uint4 o = make_uint4(0, 0, 0, 0);
        if (p.accumulate) o = lds128(base + rows_at(u) + n * row_stride(width) + b * 128 + g * 16);
        o.x = add_bf16x2(o.x, acc[0][j][e], acc[0][j][e + 2]);
        o.y = add_bf16x2(o.y, acc[1][j][e], acc[1][j][e + 2]);
        o.z = add_bf16x2(o.z, acc[2][j][e], acc[2][j][e + 2]);
        o.w = add_bf16x2(o.w, acc[3][j][e], acc[3][j][e + 2]);
        __stcs(reinterpret_cast<uint4*>(p.modules[u.module].y + at), o);
      }
  }
}

template <int J, class S>
__device__ __forceinline__ void expand_unit(const PairArgs& p, S& sm, Ring<S::kStages>& ring, const typename S::Ticket& t,
                                            uint32_t& phase) {
  static_assert(kConsumers % 2 == 0, "a warp has either block of rows");
  const Unit& u = t.unit;
  const int width = u.width, row_blocks = u.num_rows > J * 8 ? 2 : 1;
  const int n0 = (threadIdx.x >> 5) % row_blocks * J * 8;
  Factors<S::kSteps, J> h;
  get_h<S::kSteps, J>(p, sm, t, n0, phase, h);
  for (int c = u.begin; c < u.end; c += width) {
    mbar_wait(&sm.full[ring.at()], ring.phase());
    const uint32_t stage = smem_u32(sm.stages[ring.at()]);
    expand_stage<S::kSteps, J>(p, t, stage, width, c, min(width, u.end - c), n0, row_blocks, h);
    __syncwarp();
    if ((threadIdx.x & 31) == 0) mbar_arrive(&sm.empty[ring.at()]);
    ring.next();
  }
}

template <bool EXPANDS, int MOST_ROWS, class S>
__device__ void consume(const PairArgs& p, S& sm) {
  Ring<S::kStages> ring;
  Ring<S::kTickets> taken;
  uint32_t phase = 0;
  while (true) {
    const auto& t = take(sm, taken);
    const Unit& u = t.unit;
    if (u.kind == kEnd) return;
    if (u.kind == kShrink) {
      if (u.num_rows <= 8 && u.groups == 1) shrink_unit<1, 1>(p, sm, ring, u);
      else if (u.num_rows <= 8 && u.groups == 2) shrink_unit<2, 1>(p, sm, ring, u);
      else if (u.num_rows <= 8) shrink_unit<4, 1>(p, sm, ring, u);
      else if (MOST_ROWS > 16 && u.num_rows > 16 && u.groups <= 2) shrink_unit<2, MOST_ROWS / 8>(p, sm, ring, u);
      else if (MOST_ROWS > 16 && u.num_rows > 16) shrink_unit<4, MOST_ROWS / 8>(p, sm, ring, u);
      else if (u.groups <= 2) shrink_unit<2, 2>(p, sm, ring, u);
      else shrink_unit<4, 2>(p, sm, ring, u);
    } else if constexpr (EXPANDS) {
      if (u.num_rows <= 8) expand_unit<1>(p, sm, ring, t, phase);
      else expand_unit<2>(p, sm, ring, t, phase);
    }
    let_go(sm, taken);
  }
}

// ---------------------------------------------------------------- a CTA
template <class S>
__device__ __forceinline__ void make_barriers(const PairArgs& p, S& sm) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kStages; ++i) {
      mbar_init(&sm.full[i], 1 + kRowWarps);
      mbar_init(&sm.empty[i], kConsumers);
    }
    for (int i = 0; i < kTickets; ++i) {
      mbar_init(&sm.asked[i], 1);
      mbar_init(&sm.ticket_full[i], 1);
      mbar_init(&sm.ticket_empty[i], kConsumers + 1 + kRowWarps);
    }
    mbar_init(&sm.cleared, 1);
    mbar_init(&sm.h_full, 1);
    mbar_init(&sm.h_empty, kConsumers);
    fence_barriers();
  } else if (threadIdx.x == kWeightWarp * 32) {
    for (int wide = 0; wide < 2; ++wide) {
      if (p.shrink) prefetch_map(&p.maps[0][wide]);
      if (p.expand) prefetch_map(&p.maps[1][wide]);
    }
  }
  __syncthreads();
}

// Without EXPANDS, of a launch that shrinks alone, whose units may have up to MOST_ROWS rows.
template <bool EXPANDS = true, int MOST_ROWS = kShrinkRows, class S>
__device__ __forceinline__ void serve_items(const PairArgs& p, S& sm) {
  const int warp = threadIdx.x >> 5;
  if (warp < kConsumers) {
    if (EXPANDS && warp == 0 && p.shrink && p.expand) clear_h(p);
    consume<EXPANDS, MOST_ROWS>(p, sm);
  } else if (warp == kUnitWarp) {
    hand_out<MOST_ROWS>(p, sm);
  } else if (warp == kWeightWarp) {
    produce_weights(p, sm);
  } else {
    produce_rows(p, sm);
  }
}

template <int NS, int STAGE, int RANKS>
__global__ void __launch_bounds__(kThreads, 2) pair_kernel(const __grid_constant__ PairArgs p) {
  extern __shared__ __align__(1024) unsigned char raw[];
  auto& sm = *reinterpret_cast<Shared<NS, STAGE, RANKS>*>(raw);
  let_next_begin();
  // Without items CTAs of a long launch make no plan, clear no h and leave the call's state as it is, all of them.
  const int items = p.num_rows >= kManyRows ? load_now(p.num_items) : 1;
  make_barriers(p, sm);
  if (items > 0) serve_items(p, sm);
  if (p.expand && !p.accumulate) zero_gaps(p);
}

}  // namespace lora_jax
