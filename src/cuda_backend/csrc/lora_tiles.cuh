// The shrink of adapters with many rows on Hopper: h = scaling * x A^T, by tiles.
//
// A tile is up to 128 rows of one segment, in any order of rows. Its kernel gives a row the very bits that
// pair_kernel (lora_gemm.cuh) gives it: the same products in each mma, the same order of sums. So which of
// them serves a segment may follow from the batch, and no result shows it.
//
// A cluster of 4 CTAs works through a tile. Each CTA takes one of the four parts of the sums over k, so that
// A leaves L2 once a tile. All threads bring x, 16 bytes at a time, and some of them boxes of A, several stages
// ahead. Weights are the 16-row operand of mma and rows the 8-column operand, as pair_kernel has them: warps
// share out ranks by 16 and rows by 8. CTAs send each other the parts of their rows, and add them in order.
//
// Where a tile is, whose it is and which rows it has stands in one record (row_tiles.cuh), which is asked for
// as soon as the kernel begins. A shrink alone is one kernel for items and tiles (lora_both.cuh).
#pragma once
#include "cluster.cuh"
#include "tile_args.cuh"

namespace lora_jax {

constexpr int kCluster = 4;          // CTAs, and parts of a sum over k
constexpr int kShrinkWarps = 8, kShrinkThreads = kShrinkWarps * 32;
constexpr int kMostRankOfPass = 64;  // of higher ranks x is read once more
constexpr int kBoxSteps = 2;         // of 128 columns, of which a CTA has 32, that one copy of A brings
constexpr int kTallBox = 4;          // groups of 8 ranks that it brings where the adapter has them; else one
constexpr int kMostStages = 7;
constexpr int kShrinkBytes = 113 * 1024;  // of shared memory: two CTAs fit an SM
static_assert(kCluster == kConsumers, "sums must have the order of pair_kernel");

struct ShrinkBarriers {
  uint64_t full[kMostStages], parts_full, parts_empty;
};
// What all threads of a CTA need to know of its tile.
struct alignas(16) ShrinkSite {
  Item tile;
  int tiles;  // that there are
  int module, rank, a_row;
  float scaling;
  alignas(16) uint32_t rows[kTileRows / 2];
};
// Stages come first, then the parts that the cluster's CTAs send, as long as they are; then this. Between lie
// the barriers of the items, if a kernel has such.
constexpr int kShrinkEnd = 1024, kShrinkRoom = kShrinkBytes - kShrinkEnd;
struct ShrinkEnd {
  ShrinkSite site;
  unsigned char between[kShrinkEnd - sizeof(ShrinkSite) - sizeof(ShrinkBarriers)];
  ShrinkBarriers bars;
};
static_assert(sizeof(ShrinkEnd) == kShrinkEnd);
__device__ __forceinline__ ShrinkEnd& shrink_end(unsigned char* shared) {
  return *reinterpret_cast<ShrinkEnd*>(shared + kShrinkRoom);
}

// By one thread.
__device__ __forceinline__ void make_shrink_barriers(ShrinkBarriers& bars) {
  for (uint64_t& full : bars.full) mbar_init(&full, 1);
  mbar_init(&bars.parts_full, 1);
  mbar_init(&bars.parts_empty, kShrinkWarps * kCluster);
  fence_barriers();
}

// What a warp knows of a tile while it is on its way.
struct ComingSite {
  int4 record;  // 16 bytes a lane
  int tiles, module, rank, a_offset, a_stride;
  float scaling;

  __device__ __forceinline__ ComingSite(const TileArgs& p, int module, int tile) : module(module) {
    const int lane = threadIdx.x & 31;
    tiles = __ldg(p.cut + 3);
    const auto* from = reinterpret_cast<const int4*>(&p.tiles[min(tile, p.most_tiles - 1)].shrink);
    record = __ldg(from + min(lane, 16));
    // There may be no such tile; what is read for it then must be there.
    const int slot = min(static_cast<unsigned>(__shfl_sync(~0u, record.x, 0)), p.num_slots - 1u);
    const int* entry = p.modules[module].entries + slot * 5;
    a_offset = __ldg(entry), rank = __ldg(entry + 2), a_stride = __ldg(entry + 3);
    scaling = __ldg(p.modules[module].scaling + slot);
  }
  __device__ __forceinline__ void tell(const TileArgs& p, ShrinkSite& site) const {
    const int lane = threadIdx.x & 31;
    if (lane == 0) {
      site.tile = Item{record.x, record.y, record.z, record.w};
      site.tiles = tiles, site.module = module, site.rank = min(rank, p.max_rank), site.a_row = a_offset + record.y * a_stride;
      site.scaling = scaling;
    } else if (lane <= kTileRows / 8) {
      *reinterpret_cast<int4*>(site.rows + (lane - 1) * 4) = record;
    }
  }
};

// Of a CTA that shrinks up to 8 * BLOCKS rows a warp: what a stage holds, and how many there are.
template <int RANKS, int BLOCKS>
struct ShrinkStages {
  static constexpr int kRankParts = RANKS / 16, kRowParts = kShrinkWarps / kRankParts;
  static constexpr int kRows = BLOCKS * 8 * kRowParts, kSteps = kRows <= 64 ? 4 : 2;  // of 128 columns
  static constexpr int kThreadRows = kRows < 64 ? kRows : 64;                         // that have threads at a time
  static constexpr int kParts = kRows * RANKS * 4, kBox = RANKS * 64 * kBoxSteps;     // bytes, of all boxes that make one
  static constexpr int kWeights = kBox / kBoxSteps * kSteps, kBytes = kWeights + kRows * 64 * kSteps;
  static constexpr int kFit = (kShrinkRoom - kParts) / kBytes, kDepth = kFit < kMostStages ? kFit : kMostStages;
  static_assert(kDepth >= 2);
};

// Of a CTA, for the tiles of its cluster, one after the other.
template <int RANKS>
struct TileShrink {
  static constexpr int kRankParts = RANKS / 16, kRowParts = kShrinkWarps / kRankParts;
  static constexpr int kMostBlocks = kTileRows / 8 / kRowParts;  // of 8 rows, of a warp

  const TileArgs& p;
  unsigned char* const shared;
  ShrinkEnd& end;
  const int part, steps;  // of 128 columns that have some of this CTA's part
  uint32_t phases = 0;    // of the stages, a bit each
  uint32_t pass = 0;      // passes done

  __device__ __forceinline__ TileShrink(const TileArgs& p, unsigned char* shared)
      : p(p), shared(shared), end(shrink_end(shared)), part(cluster_rank()),
        steps(max(p.d_in - cluster_rank() * 32 + 127, 0) / 128) {}

  // Ranks of a pass: rows of A from `row` on, in boxes of so many groups of 8.
  struct Weights {
    int row, boxes, box_groups;
  };

  // Four threads bring 64 bytes of a row, or of one and that 64 on; of less than 64 rows several share the steps.
  template <class S>
  __device__ __forceinline__ uint32_t find_row(int thread, int ahead) const {  // where its part begins, in 16 bytes
    const int n = (thread >> 2) % S::kThreadRows + ahead;
    const uint32_t rows = end.site.rows[n % 64], row = n < 64 ? rows & 0xffff : rows >> 16;
    return row * (p.d_in / 8) + (steps > 0 ? part * 4 : 0) + (thread & 3);
  }
  // Asks for stage n. Of rows and steps that there are not: zeros.
  template <class S>
  __device__ __forceinline__ void fetch(const Weights& w, const uint32_t (&x)[2], int n, int slot) {
    constexpr int kSpread = 64 / S::kThreadRows;
    const int thread = thread_anew(), row = (thread >> 2) % S::kThreadRows, first = (thread >> 2) / S::kThreadRows;
    const uint32_t stage = smem_u32(shared) + slot * S::kBytes, to = stage + S::kWeights + (thread & 3) * 16;
    const auto* from = reinterpret_cast<const uint4*>(p.x);
#pragma unroll
    for (int i = 0; i * 64 < S::kRows; ++i)
      if (first < kSpread && row + i * 64 < S::kRows)
#pragma unroll
        for (int j = 0; j < S::kSteps; j += kSpread) {
          const int step = n * S::kSteps + first + j;
          copy_ahead(to + ((first + j) * S::kRows + row + i * 64) * 64, from + (x[i] + step * 16),
                     step < steps && row + i * 64 < end.site.tile.num_rows ? 16 : 0);
        }
    if (thread == 0) mbar_expect(&end.bars.full[slot], w.boxes * w.box_groups * 512 * S::kSteps);
#pragma unroll
    for (int half = 0; half < S::kSteps / kBoxSteps; ++half) {
      const int box = (thread / 32 + kShrinkWarps - half * 2) % kShrinkWarps;
      if (thread % 32 == 0 && box < w.boxes)
        tile_copy(stage + half * S::kBox + box * w.box_groups * 512 * kBoxSteps, &p.a_parts[part / 2][w.box_groups > 1], 0,
                  w.row + box * w.box_groups * 8, n * S::kSteps + half * kBoxSteps, part, &end.bars.full[slot]);
    }
  }

  // Sums of the two chains, of 16 ranks and 8 rows each: a lane has ranks g and g + 8 of rows 2 * q and the next.
  template <int BLOCKS>
  __device__ __forceinline__ void multiply(const Weights& w, float (&acc)[2][BLOCKS][4]) {
    using S = ShrinkStages<RANKS, BLOCKS>;
    const int thread = thread_anew(), warp = thread >> 5, lane = thread & 31, ranks = warp % kRankParts;
    const int count = (steps + S::kSteps - 1) / S::kSteps;
    const bool tall = w.box_groups > 1;
    const uint32_t weights = smem_u32(shared) + (tall ? ranks / 2 * kTallBox * 1024 + ranks % 2 * 1024 : ranks * 2048) + lane * 16;
    const uint32_t next_group = tall ? 512 : 1024, next_step = tall ? kTallBox * 512 : 512;
    const uint32_t rows = smem_u32(shared) + S::kWeights + warp / kRankParts * BLOCKS * 512 + lane * 16;
    const uint32_t x[2] = {find_row<S>(thread, 0), S::kRows > 64 ? find_row<S>(thread, 64) : 0};
    int fill = 0;  // where the stage goes that is asked for; the next one in the ring is the oldest
#pragma unroll 1
    for (int n = 1 - S::kDepth; n < count; ++n) {
      const int slot = fill + 1 == S::kDepth ? 0 : fill + 1;
      if (n >= 0) {
        copies_wait<S::kDepth - 2>();
        mbar_wait(&end.bars.full[slot], phases >> slot & 1);
        phases ^= 1u << slot;
        consumer_barrier(kShrinkThreads);  // all rows are there, and all have read the stage before
      }
      if (n + S::kDepth - 1 < count) fetch<S>(w, x, n + S::kDepth - 1, fill);
      copies_commit();
      fill = slot;
      if (n < 0) continue;
      const uint32_t stage = slot * S::kBytes;
#pragma unroll
      for (int step = 0; step < S::kSteps; ++step) {
        const uint32_t of_step = stage + step / kBoxSteps * S::kBox + step % kBoxSteps * next_step;
        const uint4 lo = lds128_in_order(weights + of_step), hi = lds128_in_order(weights + of_step + next_group);
#pragma unroll
        for (int j = 0; j < BLOCKS; ++j) {
          const uint4 x = lds128_in_order(rows + stage + (step * S::kRows + j * 8) * 64);
          mma_bf16(acc[0][j], lo.x, hi.x, lo.y, hi.y, x.x, x.y);
          mma_bf16(acc[1][j], lo.z, hi.z, lo.w, hi.w, x.z, x.w);
        }
      }
    }
  }

  // Where in shared memory the parts lie: float4s by [part][block][16 ranks][8].
  __device__ __forceinline__ float4* parts(int blocks) const {
    return reinterpret_cast<float4*>(shared + kShrinkRoom - blocks * RANKS * 32);
  }
  // CTA c adds up rows 2 * c and the next of each 8, so all of a lane's sums go to one.
  template <int BLOCKS>
  __device__ __forceinline__ void send_parts(int blocks, const float (&acc)[2][BLOCKS][4]) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    const int ranks = warp % kRankParts, first = warp / kRankParts * BLOCKS;
    const uint32_t to = address_in(q, smem_u32(parts(blocks) + (part * blocks * kRankParts + ranks) * 8 + g));
    const uint32_t bar = address_in(q, smem_u32(&end.bars.parts_full));
#pragma unroll
    for (int j = 0; j < BLOCKS; ++j)
      if (first + j < blocks) {
        const auto &a = acc[0][j], &b = acc[1][j];
        cluster_store(to + (first + j) * kRankParts * 128, make_float4(a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]), bar);
      }
  }
  // Adds the parts of this CTA's rows in order and writes their h.
  __device__ __forceinline__ void add_parts(int blocks, int first_rank) {
    const ShrinkSite& site = end.site;
    const int past = (site.rank + 7) / 8 * 8, total = blocks * kRankParts * 8;
    const float4* from = parts(blocks);
    for (int n = threadIdx.x; n < (total + 31) / 32 * 32; n += kShrinkThreads) {
      const int at = min(n, total - 1), g = at & 7, rank = first_rank + at / 8 % kRankParts * 16 + g;
      float s[4] = {};  // ranks of the first row, the second; and those 8 on
#pragma unroll
      for (int w = 0; w < kCluster; ++w) {
        const float4 v = from[w * total + at];
        s[0] += v.x, s[1] += v.y, s[2] += v.z, s[3] += v.w;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) s[i] = rank + i / 2 * 8 < site.rank ? s[i] * site.scaling : 0.f;
      const int odd = g & 1;  // that lane has the second row of both
      const float low = __shfl_xor_sync(~0u, odd ? s[0] : s[1], 1), high = __shfl_xor_sync(~0u, odd ? s[2] : s[3], 1);
      const int row = at / 8 / kRankParts * 8 + part * 2 + odd, pair = rank - odd;
      if (n >= total || row >= site.tile.num_rows) continue;
      auto* h = reinterpret_cast<uint32_t*>(h_row(p, site.module, site.tile.row_begin + row) + pair);
      if (pair < past) h[0] = odd ? bf16x2(low, s[1]) : bf16x2(s[0], low);
      if (pair + 8 < past) h[4] = odd ? bf16x2(high, s[3]) : bf16x2(s[2], high);
    }
  }

  // The parts of a pass over the tile's rows, for RANKS ranks.
  template <int BLOCKS>
  __device__ __forceinline__ void run(const Weights& w, int blocks) {
    float acc[2][BLOCKS][4] = {};
    multiply<BLOCKS>(w, acc);
    if (pass == 0) cluster_all_begun();
    mbar_wait(&end.bars.parts_empty, (pass & 1) ^ 1);
    send_parts<BLOCKS>(blocks, acc);
  }

  // `last`: nobody waits to hear that the parts have been added up.
  __device__ __forceinline__ void tile(bool last) {
    const ShrinkSite& site = end.site;
    for (int first = 0; first < site.rank; first += RANKS) {
      const int blocks = divide_up(site.tile.num_rows, 8), share = divide_up(blocks, kRowParts);
      const int groups = divide_up(min(site.rank - first, RANKS), 8);
      const bool tall = groups * 8 == RANKS;
      const Weights w{site.a_row + first, tall ? groups / kTallBox : groups, tall ? kTallBox : 1};
      if (threadIdx.x == 0) mbar_expect(&end.bars.parts_full, blocks * RANKS * 32);
      if (share <= 1) run<1>(w, blocks);
      else if (share == 2) run<2>(w, blocks);
      else if (share == 3) run<3>(w, blocks);
      else if (share == 4 || kMostBlocks == 4) run<4>(w, blocks);
      else if (share == 5) run<kMostBlocks < 5 ? 4 : 5>(w, blocks);
      else if (share == 6) run<kMostBlocks < 6 ? 4 : 6>(w, blocks);
      else run<kMostBlocks>(w, blocks);
      mbar_wait(&end.bars.parts_full, pass & 1);
      add_parts(blocks, first);
      ++pass;
      if (last && first + RANKS >= site.rank) return;
      __syncthreads();
      if ((threadIdx.x & 31) < kCluster) cluster_arrive(&end.bars.parts_empty, threadIdx.x & 31);
    }
  }

  // The tiles of this CTA's cluster; the first one's site is there, if it has one.
  __device__ __forceinline__ void all() {
    const int clusters = gridDim.x / kCluster, tiles = end.site.tiles, total = tiles * p.num_modules;
    for (int at = blockIdx.x / kCluster; at < total; at += clusters) {
      if (at >= min(tiles, clusters)) {
        __syncthreads();
        if (threadIdx.x < 32) ComingSite(p, at / tiles, at % tiles).tell(p, end.site);
        __syncthreads();
      }
      tile(at + clusters >= total);
    }
    if (pass == 0) cluster_all_begun();
    else if (end.site.rank == 0) cluster_sync();  // nobody has waited for the others' last arrivals
  }
};

template <int RANKS>
__global__ void __launch_bounds__(kShrinkThreads, 2) shrink_tiles_kernel(const __grid_constant__ TileArgs p) {
  extern __shared__ __align__(1024) unsigned char shrink_raw[];
  let_next_begin();
  ShrinkEnd& end = shrink_end(shrink_raw);
  if (threadIdx.x < 32) ComingSite(p, 0, blockIdx.x / kCluster).tell(p, end.site);
  if (threadIdx.x == 32) make_shrink_barriers(end.bars);
  cluster_begun();
  __syncthreads();
  TileShrink<RANKS>(p, shrink_raw).all();
  wait_for_previous();
}

}  // namespace lora_jax
