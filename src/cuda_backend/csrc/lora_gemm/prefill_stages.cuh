// Shared memory of CTAs that shrink tiles (lora_gemm/prefill_shrink.cuh), and their first loads.
#pragma once
#include "device/cluster.cuh"
#include "lora_gemm/prefill_args.cuh"

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
// Stages come first, then the parts that the cluster's CTAs send, then this. What barriers of items lie in must
// not be written over: parts that came to lie there were wrong now and then, where two such CTAs shared an SM.
constexpr int kShrinkRoom = 110 * 1024, kShrinkEnd = 111 * 1024;
static_assert(kShrinkEnd + sizeof(ShrinkBarriers) <= kShrinkBytes);
__device__ __forceinline__ unsigned char* shrink_memory() {
  extern __shared__ __align__(1024) unsigned char shrink_raw[];
  return shrink_raw;
}
__device__ __forceinline__ ShrinkBarriers& shrink_barriers() {
  return *reinterpret_cast<ShrinkBarriers*>(shrink_memory() + kShrinkEnd);
}

// By one thread.
__device__ __forceinline__ void make_shrink_barriers() {
  ShrinkBarriers& bars = shrink_barriers();
  for (int i = 0; i < kMostStages; ++i) {
    mbar_init(&bars.full[i], 1 + kCopyWarps * 32);
    mbar_init(&bars.empty[i], kShrinkWarps);
  }
  mbar_init(&bars.parts_full, 1);
  mbar_init(&bars.parts_empty, kShrinkThreads / 32 * kCluster);
  fence_barriers();
}

// What a thread that copies asks of a tile's record, whether there is such a tile or not: how many rows it has, and
// those that this thread brings a part of; by the warp that brings A, whose the tile is.
constexpr int kRowsAtOnce = kCopyWarps * 8, kRowTimes = (kTileRows + kRowsAtOnce - 1) / kRowsAtOnce;
struct ShrinkRows {
  static constexpr int kWords = kListedRows / kRowsAtOnce;
  static_assert(kRowTimes == 2 * kWords && kListedRows % kRowsAtOnce == 0, "a thread's rows make whole words");
  int count, words[kWords];
  static __device__ __forceinline__ int first() { return static_cast<int>(threadIdx.x) / 4 - kFirstCopyWarp * 8; }
  __device__ __forceinline__ void ask(const TileArgs& p, int tile) {
    const TileRecord& record = p.tiles[min(tile, p.most_tiles - 1)];
    count = load_now(&record.shrink.num_rows);
    if (threadIdx.x / 32 == kWeightBoxWarp) {
      words[0] = load_now(&record.shrink.slot), words[1] = load_now(&record.shrink.expert);
      return;
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = load_now(reinterpret_cast<const int*>(record.rows) + first() + i * kRowsAtOnce);
  }
  __device__ __forceinline__ int slot() const { return words[0]; }
  __device__ __forceinline__ int expert() const { return words[1]; }
  __device__ __forceinline__ uint32_t row(int i) const {
    return static_cast<uint32_t>(words[i % kWords]) >> (i / kWords * 16) & 0xffff;
  }
};
// By a CTA's first thread: the grid's first ones bring all entries near, which are wanted as soon as a tile
// is known.
__device__ __forceinline__ void prefetch_entries(const TileArgs& p) {
  const int64_t at = int64_t{128} * blockIdx.x;
  if (at < int64_t{20} * p.num_slots) prefetch_l2(reinterpret_cast<const char*>(p.modules[0].entries) + at);
}

// How many stages of so many steps fit beside the parts.
__device__ constexpr int stages_that_fit(int ranks, int rows, int steps) {
  const int fit = (kShrinkRoom - rows * ranks * 4) / ((ranks + rows) * 64 * steps);
  return fit < kMostStages ? fit : kMostStages;
}
__device__ constexpr int steps_of_stage(int rows) { return rows <= 48 ? 4 : 2; }
// The number of stages for each number of blocks, in 4 bits of it: a CTA would wait for the division.
__device__ constexpr uint64_t stages_by_blocks(int ranks, int row_parts) {
  uint64_t all = 0;
  for (int blocks = 1; blocks <= kTileRows / 8 / row_parts; ++blocks) {
    const int rows = blocks * 8 * row_parts;
    all |= static_cast<uint64_t>(stages_that_fit(ranks, rows, steps_of_stage(rows))) << blocks * 4;
  }
  return all;
}

// Of a CTA whose warps shrink up to 8 * blocks rows each: what a stage holds, and how many there are.
template <int RANKS>
struct ShrinkStages {
  static constexpr int kRowParts = kShrinkWarps * kWarpRanks / RANKS;
  static constexpr uint64_t kDepths = stages_by_blocks(RANKS, kRowParts);
  static constexpr int kBoxes = RANKS * 64 * kBoxSteps;  // bytes of all boxes of the same steps
  int rows, steps, weights, bytes, depth;                // steps of 128 columns; bytes of weights, of all
  __device__ constexpr explicit ShrinkStages(int blocks)
      : rows(blocks * 8 * kRowParts),
        steps(steps_of_stage(rows)),
        weights(kBoxes / kBoxSteps * steps),
        bytes(weights + rows * 64 * steps),
        depth(kDepths >> blocks * 4 & 15) {}
};

}  // namespace lora_jax
