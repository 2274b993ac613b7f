// The shrink of adapters with many rows on Hopper: h = scaling * x A^T, by tiles.
//
// A tile is up to 128 rows of one segment, in any order of rows. Its kernel gives a row the very bits that
// pair_kernel (lora_gemm.cuh) gives it: the same products in each mma, the same order of sums. So which of
// them serves a segment may follow from the batch, and no result shows it.
//
// A cluster of 4 CTAs works through a tile. Each CTA takes one of the four parts of the sums over k, so that
// A leaves L2 once a tile. One warp brings A in boxes, three bring rows of x 16 bytes at a time, both stages
// ahead of the four that multiply. Weights are the 16-row operand of mma and rows the 8-column operand, as
// pair_kernel has them: a warp has 32 ranks of a share of the rows, for shared memory is what binds. CTAs send
// each other the parts of their rows, and add them in order.
//
// Where a tile is, whose it is and which rows it has stands in one record (row_tiles.cuh), which is asked for
// as soon as the kernel begins. A shrink alone is one kernel for items and tiles (lora_both.cuh).
#pragma once
#include "cluster.cuh"
#include "tile_args.cuh"

namespace lora_jax {

constexpr int kCluster = 4;                                // CTAs, and parts of a sum over k
constexpr int kShrinkWarps = 4;                            // that multiply
constexpr int kWeightBoxWarp = kShrinkWarps;               // that brings A
constexpr int kFirstCopyWarp = kWeightBoxWarp + 1, kCopyWarps = 3;  // that bring x
constexpr int kShrinkThreads = (kFirstCopyWarp + kCopyWarps) * 32;
constexpr int kMostRankOfPass = 64;  // of higher ranks x is read once more
constexpr int kWarpRanks = 32;       // of a warp that multiplies
constexpr int kBoxSteps = 2;         // of 128 columns, of which a CTA has 32, that one copy of A brings
constexpr int kTallBox = kWarpRanks / 8;  // groups of 8 ranks that it brings where the adapter has them; else one
constexpr int kMostStages = 6;
constexpr int kShrinkBytes = 113 * 1024;  // of shared memory: two CTAs fit an SM
static_assert(kCluster == kConsumers, "sums must have the order of pair_kernel");

struct ShrinkBarriers {
  uint64_t full[kMostStages], empty[kMostStages], parts_full, parts_empty;
};
// A tile and its rows, as they stand in its record.
struct alignas(16) ShrinkSite {
  Item tile;
  uint32_t rows[kTileRows / 2];
  __device__ __forceinline__ int row(int n) const {
    const uint32_t both = rows[n % (kTileRows / 2)];
    return n < kTileRows / 2 ? both & 0xffff : both >> 16;
  }
};
static_assert(sizeof(ShrinkSite) == sizeof(TileRecord) - offsetof(TileRecord, shrink));
// Stages come first, then the parts that the cluster's CTAs send, then this. What barriers of items lie in must
// not be written over: parts that came to lie there were wrong now and then, where two such CTAs shared an SM.
struct ShrinkEnd {
  ShrinkSite site;
  ShrinkBarriers bars;
};
constexpr int kShrinkRoom = 110 * 1024, kShrinkEnd = 111 * 1024;
static_assert(kShrinkEnd + sizeof(ShrinkEnd) <= kShrinkBytes);
__device__ __forceinline__ ShrinkEnd& shrink_end(unsigned char* shared) {
  return *reinterpret_cast<ShrinkEnd*>(shared + kShrinkEnd);
}

// By one thread.
__device__ __forceinline__ void make_shrink_barriers(ShrinkBarriers& bars) {
  for (int i = 0; i < kMostStages; ++i) {
    mbar_init(&bars.full[i], 1 + kCopyWarps * 32);
    mbar_init(&bars.empty[i], kShrinkWarps);
  }
  mbar_init(&bars.parts_full, 1);
  mbar_init(&bars.parts_empty, kShrinkThreads / 32 * kCluster);
  fence_barriers();
}

// By a warp, which then waits for its copies: asks for a tile, whether there is one or not.
__device__ __forceinline__ void fetch_site(const TileArgs& p, int tile, ShrinkSite& site) {
  const int lane = threadIdx.x & 31;
  const auto* from = reinterpret_cast<const int4*>(&p.tiles[min(tile, p.most_tiles - 1)].shrink);
  if (lane < static_cast<int>(sizeof site / 16)) copy_16(smem_u32(&site) + lane * 16, from + lane, 16);
}
// By a CTA's first thread: the grid's first ones bring all entries near, which are wanted as soon as a tile
// is known.
__device__ __forceinline__ void prefetch_entries(const TileArgs& p) {
  const int64_t at = int64_t{128} * blockIdx.x;
  if (at < int64_t{20} * p.num_slots) prefetch_l2(reinterpret_cast<const char*>(p.modules[0].entries) + at);
}

// Of a CTA that shrinks up to 8 * BLOCKS rows a warp: what a stage holds, and how many there are.
template <int RANKS, int BLOCKS>
struct ShrinkStages {
  static constexpr int kRowParts = kShrinkWarps * kWarpRanks / RANKS, kRows = BLOCKS * 8 * kRowParts;
  static constexpr int kSteps = kRows <= 48 ? 4 : 2;                    // of 128 columns
  static constexpr int kBoxes = RANKS * 64 * kBoxSteps;                 // bytes of all boxes of the same steps
  static constexpr int kWeights = kBoxes / kBoxSteps * kSteps, kBytes = kWeights + kRows * 64 * kSteps;
  static constexpr int kFit = (kShrinkRoom - kRows * RANKS * 4) / kBytes, kDepth = kFit < kMostStages ? kFit : kMostStages;
  static_assert(kDepth >= 3);
};

// A pass over a tile: some of its adapter's ranks.
struct ShrinkPass {
  int module, rank, first_rank, blocks;  // of 8 rows
  int a_row, boxes, box_groups;          // its rows of A, in boxes of so many groups of 8
};

// Of a CTA, for the tiles of its cluster, one after the other.
template <int RANKS>
struct TileShrink {
  static constexpr int kRankParts = RANKS / kWarpRanks, kRowParts = kShrinkWarps / kRankParts;
  static constexpr int kMostBlocks = kTileRows / 8 / kRowParts;  // of 8 rows, of a warp
  static constexpr int kRow = RANKS / 16 * 8;                    // float4s of 2 rows' parts

  const TileArgs& p;
  unsigned char* const shared;
  ShrinkEnd& end;
  const int part, steps;   // of 128 columns that have some of this CTA's part
  uint32_t phases = 0;     // of the stages, a bit each, as this thread has seen them
  uint32_t pass = 0;       // passes done

  __device__ __forceinline__ TileShrink(const TileArgs& p, unsigned char* shared)
      : p(p), shared(shared), end(shrink_end(shared)), part(cluster_rank()),
        steps(max(p.d_in - cluster_rank() * 32 + 127, 0) / 128) {}

  __device__ __forceinline__ void wait(uint64_t* bars, int slot) {
    mbar_wait(&bars[slot], phases >> slot & 1);
    phases ^= 1u << slot;
  }

  // By one warp: boxes of A, lane by lane.
  template <int BLOCKS>
  __device__ __forceinline__ void bring_weights(const ShrinkPass& w) {
    using S = ShrinkStages<RANKS, BLOCKS>;
    const int lane = thread_anew() & 31, count = divide_up(steps, S::kSteps), half = lane / w.boxes, box = lane - half * w.boxes;
    const uint32_t to = smem_u32(shared) + half * S::kBoxes + box * w.box_groups * 512 * kBoxSteps;
    const CUtensorMap* map = &p.a_parts[part / 2][w.box_groups > 1];
    int slot = 0;
#pragma unroll 1
    for (int n = 0; n < count; ++n, slot = slot + 1 == S::kDepth ? 0 : slot + 1) {
      if (n >= S::kDepth) wait(end.bars.empty, slot);
      if (lane == 0) mbar_expect(&end.bars.full[slot], w.boxes * w.box_groups * 512 * S::kSteps);
      __syncwarp();
      if (half < S::kSteps / kBoxSteps)
        tile_copy(to + slot * S::kBytes, map, 0, w.a_row + box * w.box_groups * 8, n * S::kSteps + half * kBoxSteps, part,
                  &end.bars.full[slot]);
    }
  }
  // By the copy warps: four threads bring 64 bytes of a row. Of rows and steps that there are not: zeros.
  template <int BLOCKS>
  __device__ __forceinline__ void bring_rows() {
    using S = ShrinkStages<RANKS, BLOCKS>;
    constexpr int kAtOnce = kCopyWarps * 8, kTimes = (S::kRows + kAtOnce - 1) / kAtOnce;  // rows
    const int thread = thread_anew() - kFirstCopyWarp * 32, first = thread >> 2, count = divide_up(steps, S::kSteps);
    const uint32_t to = smem_u32(shared) + S::kWeights + first * 64 + (thread & 3) * 16;
    const auto* from = reinterpret_cast<const uint4*>(p.x);
    uint32_t x[kTimes];  // where their parts begin, in 16 bytes
#pragma unroll
    for (int i = 0; i < kTimes; ++i)
      x[i] = end.site.row(min(first + i * kAtOnce, kTileRows - 1)) * (p.d_in / 8) + part * 4 + (thread & 3);
    const int rows = end.site.tile.num_rows;
    int slot = 0;
#pragma unroll 1
    for (int n = 0; n < count; ++n, slot = slot + 1 == S::kDepth ? 0 : slot + 1) {
      if (n >= S::kDepth) wait(end.bars.empty, slot);
#pragma unroll
      for (int i = 0; i < kTimes; ++i)
        if (first + i * kAtOnce < S::kRows)
#pragma unroll
          for (int j = 0; j < S::kSteps; ++j) {
            const int step = n * S::kSteps + j;
            const bool there = step < steps && first + i * kAtOnce < rows;
            copy_ahead(to + slot * S::kBytes + (j * S::kRows + i * kAtOnce) * 64, from + (there ? x[i] + step * 16 : 0),
                       there ? 16 : 0);
          }
      copies_arrive(&end.bars.full[slot]);
    }
  }

  // Sums of the two chains, of 16 ranks and 8 rows each: a lane has ranks g and g + 8 of rows 2 * q and the next.
  template <int BLOCKS>
  using Sums = float[2][kWarpRanks / 16][BLOCKS][4];

  template <int BLOCKS>
  __device__ __forceinline__ void multiply(const ShrinkPass& w, Sums<BLOCKS>& acc) {
    using S = ShrinkStages<RANKS, BLOCKS>;
    const int thread = thread_anew(), warp = thread >> 5, lane = thread & 31, ranks = warp % kRankParts;
    const int count = divide_up(steps, S::kSteps);
    const bool tall = w.box_groups > 1;
    const uint32_t nothing = p.max_rank >> 16;  // 0, which the compiler does not know
    const uint32_t weights = smem_u32(shared) + ranks * kTallBox * 512 * kBoxSteps + lane * 16;
    const uint32_t rows = smem_u32(shared) + S::kWeights + warp / kRankParts * BLOCKS * 512 + lane * 16;
    const uint32_t next_group = tall ? 512 : 512 * kBoxSteps, next_step = tall ? kTallBox * 512 : 512;
    int slot = 0;
#pragma unroll 1
    for (int n = 0; n < count; ++n, slot = slot + 1 == S::kDepth ? 0 : slot + 1) {
      wait(end.bars.full, slot);
      const uint32_t stage = slot * S::kBytes;
      uint32_t last = 0;
#pragma unroll
      for (int step = 0; step < S::kSteps; ++step) {
        const uint32_t of_step = weights + stage + step / kBoxSteps * S::kBoxes + step % kBoxSteps * next_step;
        uint4 a[kTallBox];
#pragma unroll
        for (int i = 0; i < kTallBox; ++i) a[i] = lds128_in_order(of_step + i * next_group);
#pragma unroll
        for (int j = 0; j < BLOCKS; ++j) {
          const uint4 x = lds128_in_order(rows + stage + (step * S::kRows + j * 8) * 64);
          last = x.w;
#pragma unroll
          for (int i = 0; i < kWarpRanks / 16; ++i) {
            const uint4 &lo = a[i * 2], &hi = a[i * 2 + 1];
            mma_bf16(acc[0][i][j], lo.x, hi.x, lo.y, hi.y, x.x, x.y);
            mma_bf16(acc[1][i][j], lo.z, hi.z, lo.w, hi.w, x.z, x.w);
          }
        }
      }
      if (n + S::kDepth >= count) continue;
      __syncwarp();
      if (lane == 0) mbar_arrive(&end.bars.empty[slot] + (last & nothing));  // once the last word is here
    }
  }

  // Where in shared memory the parts lie: float4s by [part][block][16 ranks][8].
  __device__ __forceinline__ float4* parts(int blocks) const {
    return reinterpret_cast<float4*>(shared + kShrinkRoom - blocks * RANKS * 32);
  }
  // CTA c adds up rows 2 * c and the next of each 8, so all of a lane's sums go to one.
  template <int BLOCKS>
  __device__ __forceinline__ void send_parts(int blocks, const Sums<BLOCKS>& acc) {
    const int thread = thread_anew(), warp = thread >> 5, lane = thread & 31, g = lane >> 2, q = lane & 3;
    const int ranks = warp % kRankParts * (kWarpRanks / 16), first = warp / kRankParts * BLOCKS;
    const uint32_t to = address_in(q, smem_u32(parts(blocks) + (part * blocks + first) * kRow + ranks * 8 + g));
    const uint32_t bar = address_in(q, smem_u32(&end.bars.parts_full));
#pragma unroll
    for (int j = 0; j < BLOCKS; ++j)
      if (first + j < blocks)
#pragma unroll
        for (int i = 0; i < kWarpRanks / 16; ++i) {
          const auto &a = acc[0][i][j], &b = acc[1][i][j];
          cluster_store(to + (j * kRow + i * 8) * 16, make_float4(a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]), bar);
        }
  }
  // By all threads: adds the parts of this CTA's rows in order and writes their h.
  __device__ __forceinline__ void add_parts(const ShrinkPass& w) {
    const Item tile = end.site.tile;
    const float scaling = __ldg(p.modules[w.module].scaling + tile.slot);
    const int past = (w.rank + 7) / 8 * 8, total = w.blocks * kRow;
    const float4* from = parts(w.blocks);
    mbar_wait(&end.bars.parts_full, pass & 1);
    for (int n = threadIdx.x; n < (total + 31) / 32 * 32; n += kShrinkThreads) {
      const int at = min(n, total - 1), g = at & 7, rank = w.first_rank + at / 8 % (RANKS / 16) * 16 + g;
      float s[4] = {};  // ranks of the first row, the second; and those 8 on
#pragma unroll
      for (int k = 0; k < kCluster; ++k) {
        const float4 v = from[k * total + at];
        s[0] += v.x, s[1] += v.y, s[2] += v.z, s[3] += v.w;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) s[i] = rank + i / 2 * 8 < w.rank ? s[i] * scaling : 0.f;
      const int odd = g & 1;  // that lane has the second row of both
      const float low = __shfl_xor_sync(~0u, odd ? s[0] : s[1], 1), high = __shfl_xor_sync(~0u, odd ? s[2] : s[3], 1);
      const int row = at / kRow * 8 + part * 2 + odd, pair = rank - odd;
      if (n >= total || row >= tile.num_rows) continue;
      auto* h = reinterpret_cast<uint32_t*>(h_row(p, w.module, tile.row_begin + row) + pair);
      if (pair < past) h[0] = odd ? bf16x2(low, s[1]) : bf16x2(s[0], low);
      if (pair + 8 < past) h[4] = odd ? bf16x2(high, s[3]) : bf16x2(s[2], high);
    }
  }

  // What a thread that multiplies does for a pass; and one that copies.
  template <int BLOCKS>
  __device__ __forceinline__ void multiply_and_send(const ShrinkPass& w) {
    Sums<BLOCKS> acc = {};
    multiply<BLOCKS>(w, acc);
    if (pass == 0) cluster_all_begun();
    mbar_wait(&end.bars.parts_empty, (pass & 1) ^ 1);
    send_parts<BLOCKS>(w.blocks, acc);
  }
  template <int BLOCKS>
  __device__ __forceinline__ void bring(const ShrinkPass& w) {
    if (threadIdx.x / 32 == kWeightBoxWarp) bring_weights<BLOCKS>(w);
    else bring_rows<BLOCKS>();
    if (pass == 0) cluster_all_begun();
  }
  template <bool MULTIPLIES, int BLOCKS>
  __device__ __forceinline__ void run(const ShrinkPass& w) {
    if constexpr (MULTIPLIES) multiply_and_send<BLOCKS>(w);
    else bring<BLOCKS>(w);
  }

  // `last`: nobody waits to hear that the parts have been added up.
  template <bool MULTIPLIES>
  __device__ __forceinline__ void tile(int module, bool last) {
    const Item t = end.site.tile;
    const int* entry = p.modules[module].entries + t.slot * 5;
    const int rank = min(__ldg(entry + 2), p.max_rank), a_row = __ldg(entry) + t.expert * __ldg(entry + 3);
    const int blocks = divide_up(t.num_rows, 8), share = divide_up(blocks, kRowParts);
    for (int first = 0; first < rank; first += RANKS) {
      const int groups = divide_up(min(rank - first, RANKS), 8);
      const bool tall = groups * 8 == RANKS;
      const ShrinkPass w{module, rank, first, blocks, a_row + first, tall ? kRankParts : groups, tall ? kTallBox : 1};
      if (threadIdx.x == 0) mbar_expect(&end.bars.parts_full, blocks * RANKS * 32);
      if (share == 1) run<MULTIPLIES, 1>(w);
      else if (share == 2) run<MULTIPLIES, 2>(w);
      else if (share == 3) run<MULTIPLIES, 3>(w);
      else if (share == 4 || kMostBlocks == 4) run<MULTIPLIES, 4>(w);
      else if (share == 5) run<MULTIPLIES, kMostBlocks < 5 ? 4 : 5>(w);
      else if (share == 6) run<MULTIPLIES, kMostBlocks < 6 ? 4 : 6>(w);
      else run<MULTIPLIES, kMostBlocks>(w);
      add_parts(w);
      ++pass;
      if (last && first + RANKS >= rank) return;
      __syncwarp();
      if ((threadIdx.x & 31) < kCluster) cluster_arrive(&end.bars.parts_empty, threadIdx.x & 31);
    }
    if (!last) return;
    if (pass == 0) cluster_all_begun();
    else cluster_sync();  // of rank 0: nobody has waited for the others' last arrivals
  }

  // The tiles of this CTA's cluster; the first one's site is there.
  template <bool MULTIPLIES>
  __device__ __forceinline__ void all() {
    const int clusters = gridDim.x / kCluster, tiles = __ldg(p.cut + 3), total = tiles * p.num_modules;
    const int first = blockIdx.x / kCluster;
#pragma unroll 1
    for (int at = first; at < total; at += clusters) {
      if (at != first) {
        __syncthreads();
        if (threadIdx.x / 32 == kWeightBoxWarp) {
          fetch_site(p, at % tiles, end.site);
          copies_commit();
          copies_wait<0>();
        }
        __syncthreads();
      }
      tile<MULTIPLIES>(at / tiles, at + clusters >= total);
    }
  }
};

// By all threads of a cluster that has tiles; its CTAs have begun to meet, and the site of the first is there.
// Warps that multiply have the registers of those that do not.
template <int RANKS>
__device__ __forceinline__ void shrink_cluster(const TileArgs& p, unsigned char* shared) {
  if (threadIdx.x < kShrinkWarps * 32) {
    more_registers<192>();
    TileShrink<RANKS>(p, shared).template all<true>();
  } else {
    fewer_registers<64>();
    TileShrink<RANKS>(p, shared).template all<false>();
  }
}

template <int RANKS>
__global__ void __launch_bounds__(kShrinkThreads, 2) shrink_tiles_kernel(const __grid_constant__ TileArgs p) {
  extern __shared__ __align__(1024) unsigned char shrink_raw[];
  let_next_begin();
  ShrinkEnd& end = shrink_end(shrink_raw);
  const int warp = threadIdx.x >> 5, cluster = blockIdx.x / kCluster, tiles = __ldg(p.cut + 3);
  // Of one module it is the cluster's own, asked for before it is known how many there are.
  const int first = p.num_modules == 1 ? cluster : cluster % max(tiles, 1);
  if (warp == kWeightBoxWarp) fetch_site(p, first, end.site), copies_commit();
  if (threadIdx.x == 0) prefetch_entries(p);
  if (threadIdx.x == 32) make_shrink_barriers(end.bars);
  if (warp == kWeightBoxWarp) copies_wait<0>();
  if (cluster < tiles * p.num_modules) {
    cluster_begun();
    __syncthreads();
    shrink_cluster<RANKS>(p, shrink_raw);
  }
  wait_for_previous();
}

}  // namespace lora_jax
