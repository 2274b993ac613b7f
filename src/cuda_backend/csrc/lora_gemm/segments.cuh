// Grouped LoRA of segments of some rows that stand in order, as a layer's experts have them: y += h B with
// h = scaling * x A^T, by pair_kernel's own arithmetic (lora_gemm/items.cuh), so with its bits.
//
// A unit is an item (up to 32 rows of a segment) of one module, and all of its columns, or half of them where
// items are few. One CTA shrinks it and expands it: h stays in shared memory, and nobody waits for anybody
// else. That reads an item's A twice where its columns are halved, and a segment's A and B again for each of its
// items, so it is for segments of a few items at most. One adapter of rank 32 on an H200, gate and up, against
// pair_kernel: 128 experts of 16 rows 24.7 us, 31.1; of 64 rows 48.5, 63.5; 64 experts of 96 rows 43.2, 60.5.
//
// Rows that stand in order come as boxes of 8 rows x 128 columns, as weights do: a stage holds some 128 columns
// of both, [128 columns][group of 8 rank rows or rows][64 columns][8][64]. Rows past the item's last are others'
// or zeros; what becomes of them is dropped.
#pragma once
#include "device/arithmetic.cuh"
#include "lora_gemm/prefill_expand.cuh"
#include "lora_gemm/units.cuh"

namespace lora_jax {

struct SegmentArgs {
  PairArgs pair;
  CUtensorMap x, y[kMaxModules];  // as pools with narrow boxes, see pool_map
};

constexpr int kSegmentRank = 32;      // at most
constexpr int kSegmentWarps = 8;      // that multiply: a part of the sums over k each, of every second 8 rows
constexpr int kSegmentCopyWarps = 2;  // each box takes its warp a hundred cycles
constexpr int kSegmentThreads = (kSegmentWarps + kSegmentCopyWarps) * 32;
constexpr int kSegmentStage = 32 << 10, kSegmentStages = 3, kMostSegmentChunks = 4;
constexpr int kSegmentUnits = 64;     // looked up at a time
constexpr int kChunk = 128, kBoxBytes = kChunk * 16;  // columns; of 8 rows of a chunk

struct SegmentUnit {
  int place, rows;  // of the sorted order
  int a_row, b_row, rank;
  int module, begin, end;  // columns of y
  float scaling;
};

struct SegmentShared {
  static constexpr int kSumLd = kSegmentRank + 4, kHLd = kSegmentRank + 8;  // so that lanes meet distinct banks
  alignas(1024) unsigned char stages[kSegmentStages][kSegmentStage];
  float sums[kMaxRows * kSumLd];
  __nv_bfloat16 h[kMaxRows * kHLd];
  SegmentUnit units[kSegmentUnits];
  alignas(8) uint64_t full[kSegmentStages], empty[kSegmentStages];
};

// How a unit's chunks of columns are put into stages.
struct SegmentCut {
  int groups, blocks, most;  // of 8 rank rows; of 8 rows; chunks in a stage
  __device__ __forceinline__ explicit SegmentCut(const SegmentUnit& u) : groups((u.rank + 7) / 8), blocks((u.rows + 7) / 8) {
    most = min(kMostSegmentChunks, kSegmentStage / (boxes() * kBoxBytes));
  }
  __device__ __forceinline__ int boxes() const { return groups + blocks; }  // of a chunk
};

// ---------------------------------------------------------------- units
// By one thread each: looks up the CTA's units from the `first`-th on. Returns how many there are from there.
__device__ __forceinline__ int look_up(const PairArgs& p, SegmentShared& sm, int first) {
  const int n = first + static_cast<int>(threadIdx.x), unit = blockIdx.x + n * gridDim.x, ctas = gridDim.x;
  auto load = [&](int item) {
    const bool wanted = threadIdx.x < kSegmentUnits;
    return wanted ? __ldg(reinterpret_cast<const int4*>(p.items) + min(item, p.num_rows - 1)) : int4{};
  };
  const int4 whole = load(unit / p.num_modules), half = load(unit / p.num_modules / 2);  // before it is known which
  const int items = *p.num_items * p.num_modules, parts = items * 2 <= ctas ? 2 : 1, units = items * parts;
  if (threadIdx.x < kSegmentUnits && unit < units) {
    const int4 item = parts == 2 ? half : whole;
    const int module = unit % p.num_modules, part = unit / p.num_modules % parts;
    const int slot = min(static_cast<unsigned>(item.x), p.num_slots - 1u), columns = (p.d_out / 64 + 3) / 4 * kChunk;
    const int* entry = p.modules[module].entries + slot * 5;
    SegmentUnit& u = sm.units[threadIdx.x];
    u.place = item.z, u.rows = item.w, u.module = module, u.rank = min(__ldg(entry + 2), p.max_rank);
    u.a_row = __ldg(entry) + item.y * __ldg(entry + 3), u.b_row = __ldg(entry + 1) + item.y * __ldg(entry + 4);
    u.begin = part * columns, u.end = parts == 2 && part == 0 ? min(columns, p.d_out) : p.d_out;
    u.scaling = __ldg(p.modules[module].scaling + slot);
  }
  return max((units - static_cast<int>(blockIdx.x) + ctas - 1) / ctas - first, 0);
}

// ---------------------------------------------------------------- producers
// Brings the columns [begin, end) of weights and rows.
__device__ __forceinline__ void copy_columns(SegmentShared& sm, Ring<kSegmentStages>& ring, const SegmentCut& cut, int begin,
                                             int end, const CUtensorMap* weights, int weight_row, const CUtensorMap* rows,
                                             int row) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) - kSegmentWarps;
  for (int c = begin / kChunk; c * kChunk < end; c += cut.most) {
    const int chunks = min(cut.most, (end - c * kChunk + kChunk - 1) / kChunk), boxes = chunks * cut.boxes();
    mbar_wait(&sm.empty[ring.at()], ring.phase() ^ 1);
    if (warp == 0 && lane == 0) mbar_expect(&sm.full[ring.at()], boxes * kBoxBytes);
    __syncwarp();
    const uint32_t to = smem_u32(sm.stages[ring.at()]);
    for (int i = lane * kSegmentCopyWarps + warp; i < boxes; i += 32 * kSegmentCopyWarps) {
      const int chunk = i / cut.boxes(), box = i - chunk * cut.boxes();
      const bool weight = box < cut.groups;
      box_copy(to + i * kBoxBytes, weight ? weights : rows, weight ? weight_row + box * 8 : row + (box - cut.groups) * 8,
               (c + chunk) * (kChunk / 64), &sm.full[ring.at()]);
    }
    ring.next();
  }
}

__device__ __forceinline__ void copy_units(const SegmentArgs& p, SegmentShared& sm, Ring<kSegmentStages>& ring, int count) {
  for (int n = 0; n < count; ++n) {
    const SegmentUnit& u = sm.units[n];
    if (u.rank == 0) continue;
    const SegmentCut cut(u);
    copy_columns(sm, ring, cut, 0, p.pair.d_in, &p.pair.maps[0][0], u.a_row, &p.x, u.place);
    copy_columns(sm, ring, cut, u.begin, u.end, &p.pair.maps[1][0], u.b_row, &p.y[u.module], u.place);
  }
}

// ---------------------------------------------------------------- shrink
// Of a warp's k: ranks 8 * i + g and rows 8 * half + 16 * j + 2 * q and the next, in pair_kernel's two chains.
template <int J>
using SegmentSums = float[2][kSegmentRank / 16][J][4];

// Calls f with the place of each of a lane's sums: of chains, of row and rank beside the lane's first.
template <int J, class F>
__device__ __forceinline__ void each_sum(int own_blocks, F f) {
#pragma unroll
  for (int j = 0; j < J; ++j)
#pragma unroll
    for (int i = 0; i < kSegmentRank / 8; ++i)
#pragma unroll
      for (int c = 0; c < 2; ++c)
        if (j < own_blocks) f(i / 2, j, i % 2 * 2 + c, j * 16 + c, i * 8);
}

// Adds the warps' parts in order, one warp of each half after the other, and leaves h.
template <int J>
__device__ __forceinline__ void add_in_turn(SegmentShared& sm, const SegmentUnit& u, int own_blocks, SegmentSums<J>& acc) {
  constexpr int LD = SegmentShared::kSumLd, H = SegmentShared::kHLd;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, part = warp % kConsumers, g = lane >> 2, q = lane & 3;
  const int row = warp / kConsumers * 8 + q * 2;
  float* sums = sm.sums + row * LD + g;
  __nv_bfloat16* h = sm.h + row * H + g;
  auto each = [&](auto f) { each_sum<J>(own_blocks, f); };
  each([&](int i, int j, int c, int, int) { acc[0][i][j][c] += acc[1][i][j][c]; });
#pragma unroll 1
  for (int turn = 0; turn < kConsumers; ++turn) {
    if (turn == part) {  // all loads before all stores, or they would wait for each other
      each([&](int i, int j, int c, int n, int r) { acc[1][i][j][c] = part > 0 ? sums[n * LD + r] : 0.f; });
      each([&](int i, int j, int c, int, int) { acc[0][i][j][c] += acc[1][i][j][c]; });
      if (part < kConsumers - 1) {
        each([&](int i, int j, int c, int n, int r) { sums[n * LD + r] = acc[0][i][j][c]; });
      } else {
        each([&](int i, int j, int c, int n, int r) {
          h[n * H + r] = __float2bfloat16(g + r < u.rank ? acc[0][i][j][c] * u.scaling : 0.f);
        });
      }
    }
    consumer_barrier(kSegmentWarps * 32);
  }
}

template <int J>
__device__ __forceinline__ void shrink_segment(const PairArgs& p, SegmentShared& sm, Ring<kSegmentStages>& ring,
                                               const SegmentUnit& u) {
  constexpr int GROUPS = kSegmentRank / 8;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, part = warp % kConsumers, half = warp / kConsumers;
  const int g = lane >> 2, q = lane & 3;
  const SegmentCut cut(u);
  const uint32_t mine = (part >> 1) * 1024 + g * 128 + ((((part & 1) * 4 + q) ^ g) << 4);
  uint32_t wa[GROUPS], xa[J];  // groups and blocks past the end read the first: results are not used
#pragma unroll
  for (int i = 0; i < GROUPS; ++i) wa[i] = mine + (i < cut.groups ? i : 0) * kBoxBytes;
#pragma unroll
  for (int j = 0; j < J; ++j) xa[j] = mine + (cut.groups + (half + 2 * j < cut.blocks ? half + 2 * j : 0)) * kBoxBytes;
  SegmentSums<J> acc = {};
  for (int k = 0; k < p.d_in; k += cut.most * kChunk) {
    const int chunks = min(cut.most, (p.d_in - k + kChunk - 1) / kChunk);
    mbar_wait(&sm.full[ring.at()], ring.phase());
    uint32_t at = smem_u32(sm.stages[ring.at()]);
#pragma unroll 1
    for (int c = 0; c < chunks; ++c, at += cut.boxes() * kBoxBytes) {
      uint4 x[J], w[GROUPS];
#pragma unroll
      for (int j = 0; j < J; ++j) x[j] = lds128(at + xa[j]);
#pragma unroll
      for (int i = 0; i < GROUPS; ++i) w[i] = lds128(at + wa[i]);
#pragma unroll
      for (int i = 0; i < GROUPS; i += 2)
#pragma unroll
        for (int j = 0; j < J; ++j) {
          mma_bf16(acc[0][i / 2][j], w[i].x, w[i + 1].x, w[i].y, w[i + 1].y, x[j].x, x[j].y);
          mma_bf16(acc[1][i / 2][j], w[i].z, w[i + 1].z, w[i].w, w[i + 1].w, x[j].z, x[j].w);
        }
    }
    __syncwarp();
    if (lane == 0) mbar_arrive(&sm.empty[ring.at()]);
    ring.next();
  }
  add_in_turn<J>(sm, u, (cut.blocks - half + 1) / 2, acc);
}

// ---------------------------------------------------------------- expand
// Adds h B to 8 rows x 64 columns: `h` and `from`, of y, are where those of this lane lie; a lane has 8 columns.
__device__ __forceinline__ void expand_rows(const Columns<kSegmentRank / 16>& columns, const uint32_t* h, uint32_t from,
                                             __nv_bfloat16* y, int64_t stride, int rows) {
  const int q = threadIdx.x & 3, g = threadIdx.x >> 2 & 7;
  float acc[4][4] = {};
#pragma unroll
  for (int s = 0; s < kSegmentRank / 16; ++s) {
    const uint32_t h0 = h[s * 8], h1 = h[s * 8 + 4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t(&a)[4] = columns.a[s][i];
      mma_bf16(acc[i], a[0], a[1], a[2], a[3], h0, h1);
    }
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int row = q * 2 + e;
    uint4 o = lds128(from + row * 128 + ((g ^ row) << 4));
    o.x = add_bf16x2(o.x, acc[0][e], acc[0][e + 2]);
    o.y = add_bf16x2(o.y, acc[1][e], acc[1][e + 2]);
    o.z = add_bf16x2(o.z, acc[2][e], acc[2][e + 2]);
    o.w = add_bf16x2(o.w, acc[3][e], acc[3][e + 2]);
    if (row < rows) __stcs(reinterpret_cast<uint4*>(y + row * stride) + g, o);
  }
}

// Warps share out a stage's pieces of 64 columns, and of one piece blocks of 8 rows.
__device__ __forceinline__ void expand_segment(const PairArgs& p, SegmentShared& sm, Ring<kSegmentStages>& ring,
                                               const SegmentUnit& u) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, q = lane & 3;
  const SegmentCut cut(u);
  const auto* h = reinterpret_cast<const uint32_t*>(sm.h + g * SegmentShared::kHLd) + q;
  for (int first = u.begin; first < u.end; first += cut.most * kChunk) {
    const int pieces = min(cut.most, (u.end - first + kChunk - 1) / kChunk) * 2, sharers = kSegmentWarps / pieces;
    const int piece = warp % pieces, column = first + piece * 64;
    mbar_wait(&sm.full[ring.at()], ring.phase());
    if (warp / pieces < sharers && column < u.end) {
      const uint32_t weights = smem_u32(sm.stages[ring.at()]) + piece / 2 * cut.boxes() * kBoxBytes + piece % 2 * 1024;
      Columns<kSegmentRank / 16> columns;
      columns.take(weights, kBoxBytes, u.rank);
      for (int b = warp / pieces; b < cut.blocks; b += sharers)
        expand_rows(columns, h + b * 8 * (SegmentShared::kHLd / 2), weights + (cut.groups + b) * kBoxBytes,
                     p.modules[u.module].y + static_cast<int64_t>(u.place + b * 8) * p.d_out + column, p.d_out, u.rows - b * 8);
    }
    __syncwarp();
    if (lane == 0) mbar_arrive(&sm.empty[ring.at()]);
    ring.next();
  }
}

// ---------------------------------------------------------------- a CTA
__device__ __forceinline__ void serve_units(const PairArgs& p, SegmentShared& sm, Ring<kSegmentStages>& ring, int count) {
  for (int n = 0; n < count; ++n) {
    const SegmentUnit& u = sm.units[n];
    if (u.rank == 0) continue;
    if (u.rows <= 16) shrink_segment<1>(p, sm, ring, u);
    else shrink_segment<2>(p, sm, ring, u);
    expand_segment(p, sm, ring, u);
  }
}

__global__ void __launch_bounds__(kSegmentThreads, 2) segment_kernel(const __grid_constant__ SegmentArgs p) {
  extern __shared__ __align__(1024) unsigned char segment_raw[];
  auto& sm = *reinterpret_cast<SegmentShared*>(segment_raw);
  if (threadIdx.x == kSegmentThreads - 32) {
    for (int i = 0; i < kSegmentStages; ++i) mbar_init(&sm.full[i], 1), mbar_init(&sm.empty[i], kSegmentWarps);
    fence_barriers();
    prefetch_map(&p.pair.maps[0][0]), prefetch_map(&p.x), prefetch_map(&p.pair.maps[1][0]);
    for (int m = 0; m < p.pair.num_modules; ++m) prefetch_map(&p.y[m]);
  }
  Ring<kSegmentStages> ring;
  int left = kSegmentUnits;
  for (int first = 0; left >= kSegmentUnits; first += kSegmentUnits) {
    left = look_up(p.pair, sm, first);
    __syncthreads();
    const int count = min(left, kSegmentUnits);
    if (threadIdx.x < kSegmentWarps * 32) serve_units(p.pair, sm, ring, count);
    else copy_units(p, sm, ring, count);
    __syncthreads();  // all are through with these units
  }
}

}  // namespace lora_jax
