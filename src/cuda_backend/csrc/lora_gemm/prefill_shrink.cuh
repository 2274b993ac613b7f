// The shrink of adapters with many rows on Hopper: h = scaling * x A^T, by tiles.
//
// A tile is up to 128 rows of one segment, in any order of rows. Its kernel gives each row the bits of
// pair_kernel (lora_gemm/items.cuh): the same products in each mma, the same order of sums. So the choice
// between the two kernels may depend on the batch without changing a result.
//
// A cluster of 4 CTAs works through a tile. Each CTA takes one of the four parts of the sums over k, so that
// A leaves L2 once a tile. One warp brings A in boxes, three bring rows of x 16 bytes at a time, both stages
// ahead of the four that multiply. Weights are the 16-row operand of mma and rows the 8-column operand, as
// pair_kernel has them: a warp has 32 ranks of a share of the rows, for shared memory is what binds. CTAs send
// each other the parts of their rows, and add them in order.
//
// Where a tile is, whose it is and which rows it has stands in one record (lora_gemm/prefill_tiles.cuh). Threads that copy read
// it themselves, as soon as the kernel begins: rows of x are on their way before it is known whose they are. A
// shrink alone is one kernel for items and tiles (lora_gemm/shrink.cuh).
#pragma once
#include "device/arithmetic.cuh"
#include "lora_gemm/prefill_stages.cuh"

namespace lora_jax {

// Of a CTA, for the tiles of its cluster, one after the other, and for some of an adapter's ranks at a time. What a tile
// is gets read anew wherever it is wanted: the sums of those that multiply leave no register for it.
template <int RANKS>
struct TileShrink {
  static constexpr int kRankParts = RANKS / kWarpRanks, kRowParts = kShrinkWarps / kRankParts;
  static constexpr int kMostBlocks = kTileRows / 8 / kRowParts;  // of 8 rows, of a warp
  static constexpr int kRow = RANKS / 16 * 8;                    // float4s of 2 rows' parts
  using Stages = ShrinkStages<RANKS>;

  const TileArgs& p;
  uint32_t phases = 0;  // of the stages, a bit each, as this thread has seen them
  uint32_t pass = 0;    // passes done
  int at = 0;           // the tile among those of all modules
  int first_rank = 0;   // of the pass

  __device__ __forceinline__ explicit TileShrink(const TileArgs& p) : p(p) {}

  __device__ __forceinline__ uint32_t memory() const { return smem_u32(shrink_memory()); }
  __device__ __forceinline__ ShrinkBarriers& bars() const { return shrink_barriers(); }
  static __device__ __forceinline__ int clusters() { return gridDim.x / kCluster; }
  __device__ __forceinline__ int tiles() const { return load_now(p.cut + 3); }
  __device__ __forceinline__ int of_module(int n) const { return p.num_modules == 1 ? n : n % tiles(); }
  __device__ __forceinline__ int module() const { return p.num_modules == 1 ? 0 : at / tiles(); }
  __device__ __forceinline__ Item tile() const { return load_item_now(&p.tiles[of_module(at)].shrink); }
  __device__ __forceinline__ int rows() const { return load_now(&p.tiles[of_module(at)].shrink.num_rows); }
  __device__ __forceinline__ int rank(int slot) const {
    return min(load_now(p.modules[module()].entries + slot * 5 + 2), p.max_rank);
  }
  // Of the pass, of 8 ranks. Where they are as many as may be, boxes are tall ones.
  __device__ __forceinline__ int groups(int slot) const { return divide_up(max(min(rank(slot) - first_rank, RANKS), 0), 8); }
  // Of 128 columns that have some of this CTA's part.
  __device__ __forceinline__ int steps() const { return max(p.d_in - cluster_rank() * 32 + 127, 0) / 128; }
  // Blocks of 8 rows of a warp, for as many as there is code for.
  static __device__ __forceinline__ int share(int rows) {
    const int blocks = divide_up(divide_up(rows, 8), kRowParts);
    return blocks > 6 ? kMostBlocks : blocks;
  }

  __device__ __forceinline__ void wait(uint64_t* bars, int slot) {
    mbar_wait(&bars[slot], phases >> slot & 1);
    phases ^= 1u << slot;
  }

  // By one warp: boxes of A, lane by lane. Its adapter's entry comes by one load, and no division is waited for.
  __device__ __forceinline__ void bring_weights(const ShrinkRows& tile) {
    const int part = cluster_rank(), lane = threadIdx.x & 31;
    const int word = load_now(p.modules[module()].entries + tile.slot() * 5 + min(lane, 4));
    const Stages s(share(tile.count));
    const int count = divide_up(steps(), s.steps);
    const int a_begin = __shfl_sync(~0u, word, 0), rank = __shfl_sync(~0u, word, 2), of_expert = __shfl_sync(~0u, word, 3);
    const int groups = divide_up(max(min(min(rank, p.max_rank) - first_rank, RANKS), 0), 8);
    const bool tall = groups * 8 == RANKS;
    const int boxes = tall ? kRankParts : max(groups, 1), of_box = tall ? kTallBox : 1;
    const int half = lane >= boxes * 2 ? 2 : lane >= boxes, box = lane - half * boxes;
    const bool brings = groups > 0 && half < s.steps / kBoxSteps;
    const int a_row = a_begin + tile.expert() * of_expert + first_rank + box * of_box * 8;
    const uint32_t to = memory() + half * Stages::kBoxes + box * of_box * 512 * kBoxSteps;
    const CUtensorMap* map = &p.a_parts[part / 2][tall];
    int slot = 0;
#pragma unroll 1
    for (int n = 0; n < count; ++n, slot = slot + 1 == s.depth ? 0 : slot + 1) {
      if (n >= s.depth) wait(bars().empty, slot);
      if (lane == 0) mbar_expect(&bars().full[slot], groups * 512 * s.steps);
      __syncwarp();
      if (brings) tile_copy(to + slot * s.bytes, map, 0, a_row, n * s.steps + half * kBoxSteps, part, &bars().full[slot]);
    }
  }
  // By the copy warps: four threads bring 64 bytes of a row, by as few instructions as may be: what one warp issues
  // alone is slow. Rows that there are not have sums that nobody takes.
  template <int STEPS>
  __device__ __forceinline__ void bring_rows(const ShrinkRows& rows, const Stages& s) {
    const int first = ShrinkRows::first(), q = threadIdx.x & 3, steps = this->steps(), count = divide_up(steps, STEPS);
    const uint32_t to = memory() + s.weights + first * 64 + q * 16, of_step = s.rows * 64;
    const __nv_bfloat16* from[kRowTimes];  // the next stage's part of each row
#pragma unroll
    for (int i = 0; i < kRowTimes; ++i) from[i] = p.x + int64_t{rows.row(i)} * p.d_in + cluster_rank() * 32 + q * 8;
    int slot = 0;
#pragma unroll 1
    for (int n = 0; n < count; ++n, slot = slot + 1 == s.depth ? 0 : slot + 1) {
      if (n >= s.depth) wait(bars().empty, slot);
      const uint32_t stage = to + slot * s.bytes;
      if ((n + 1) * STEPS <= steps) {
#pragma unroll
        for (int i = 0; i < kRowTimes; ++i)
          if (first + i * kRowsAtOnce < rows.count)
#pragma unroll
            for (int j = 0; j < STEPS; ++j) copy_ahead(stage + j * of_step + i * kRowsAtOnce * 64, from[i] + j * 128, 16);
      } else {
        bring_rest(rows.count, steps - n * STEPS, STEPS, stage, of_step, from);
      }
      copies_arrive(&bars().full[slot]);
#pragma unroll
      for (int i = 0; i < kRowTimes; ++i) from[i] += STEPS * 128;
    }
  }
  // Of a stage that has fewer steps than others: zeros for those that there are not.
  __device__ __forceinline__ void bring_rest(int rows, int there, int steps, uint32_t to, uint32_t of_step,
                                             const __nv_bfloat16* (&from)[kRowTimes]) {
#pragma unroll 1
    for (int j = 0; j < steps; ++j)
#pragma unroll
      for (int i = 0; i < kRowTimes; ++i)
        if (ShrinkRows::first() + i * kRowsAtOnce < rows)
          copy_ahead(to + j * of_step + i * kRowsAtOnce * 64, from[i] + (j < there ? j * 128 : 0), j < there ? 16 : 0);
  }
  __device__ __forceinline__ void bring_rows(const ShrinkRows& rows) {
    const Stages s(share(rows.count));
    if (s.steps == 4) bring_rows<4>(rows, s);
    else bring_rows<2>(rows, s);
  }

  // Sums of the two chains, of 16 ranks and 8 rows each: a lane has ranks g and g + 8 of rows 2 * q and the next.
  template <int BLOCKS>
  using Sums = float[2][kWarpRanks / 16][BLOCKS][4];

  template <int BLOCKS>
  __device__ __forceinline__ void multiply(Sums<BLOCKS>& acc) {
    constexpr Stages s(BLOCKS);
    static_assert(s.depth >= 3);
    const int thread = thread_anew(), warp = thread >> 5, lane = thread & 31, ranks = warp % kRankParts;
    const int count = divide_up(steps(), s.steps);
    const bool tall = groups(tile().slot) * 8 == RANKS;
    const uint32_t nothing = p.max_rank >> 16;  // 0, which the compiler does not know
    const uint32_t turn = BLOCKS > 5 ? 0 : nothing;  // above, registers run out
    const uint32_t weights = memory() + ranks * kTallBox * 512 * kBoxSteps + lane * 16;
    const uint32_t rows = memory() + s.weights + warp / kRankParts * BLOCKS * 512 + lane * 16;
    const uint32_t next_group = tall ? 512 : 512 * kBoxSteps, next_step = tall ? kTallBox * 512 : 512;
    int slot = 0;
#pragma unroll 1
    for (int n = 0; n < count; ++n, slot = slot + 1 == s.depth ? 0 : slot + 1) {
      wait(bars().full, slot);
      const uint32_t stage = slot * s.bytes;
      uint32_t last = 0;
#pragma unroll
      for (int step = 0; step < s.steps; ++step) {
        const uint32_t of_step = weights + stage + step / kBoxSteps * Stages::kBoxes + step % kBoxSteps * next_step;
        // Words of two rows in the order in which mma takes four registers. By xor: moves the compiler would make
        // anew for each mma, four of them.
        uint32_t a[kWarpRanks / 16][2][4];
#pragma unroll
        for (int i = 0; i < kTallBox; ++i) {
          const uint4 v = lds128_in_order(of_step + i * next_group);
          a[i / 2][0][i % 2] = v.x ^ turn, a[i / 2][0][i % 2 + 2] = v.y ^ turn;
          a[i / 2][1][i % 2] = v.z ^ turn, a[i / 2][1][i % 2 + 2] = v.w ^ turn;
        }
#pragma unroll
        for (int j = 0; j < BLOCKS; ++j) {
          const uint4 x = lds128_in_order(rows + stage + (step * s.rows + j * 8) * 64);
          last = x.w;
#pragma unroll
          for (int i = 0; i < kWarpRanks / 16; ++i) {
            mma_bf16(acc[0][i][j], a[i][0][0], a[i][0][1], a[i][0][2], a[i][0][3], x.x, x.y);
            mma_bf16(acc[1][i][j], a[i][1][0], a[i][1][1], a[i][1][2], a[i][1][3], x.z, x.w);
          }
        }
      }
      if (n + s.depth >= count) continue;
      __syncwarp();
      if (lane == 0) mbar_arrive(&bars().empty[slot] + (last & nothing));  // once the last word is here
    }
  }

  // Where in shared memory the parts lie: float4s by [part][block][16 ranks][8].
  __device__ __forceinline__ float4* parts(int blocks) const {
    return reinterpret_cast<float4*>(shrink_memory() + kShrinkRoom - blocks * RANKS * 32);
  }
  // CTA c adds up rows 2 * c and the next of each 8, so all of a lane's sums go to one.
  template <int BLOCKS>
  __device__ __forceinline__ void send_parts(const Sums<BLOCKS>& acc) {
    const int thread = thread_anew(), warp = thread >> 5, lane = thread & 31, g = lane >> 2, q = lane & 3;
    const int blocks = divide_up(rows(), 8), ranks = warp % kRankParts * (kWarpRanks / 16), first = warp / kRankParts * BLOCKS;
    const uint32_t to = address_in(q, smem_u32(parts(blocks) + (cluster_rank() * blocks + first) * kRow + ranks * 8 + g));
    const uint32_t bar = address_in(q, smem_u32(&bars().parts_full));
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
  __device__ __forceinline__ void add_parts() {
    const Item t = tile();
    const int module = this->module(), rank = this->rank(t.slot), past = (rank + 7) / 8 * 8;
    const float scaling = load_now(p.modules[module].scaling + t.slot);
    const int blocks = divide_up(t.num_rows, 8), total = blocks * kRow;
    const float4* from = parts(blocks);
    mbar_wait(&bars().parts_full, pass & 1);
    for (int n = threadIdx.x; n < (total + 31) / 32 * 32; n += kShrinkThreads) {
      const int at = min(n, total - 1), g = at & 7, own = first_rank + at / 8 % (RANKS / 16) * 16 + g;
      float s[4] = {};  // ranks of the first row, the second; and those 8 on
#pragma unroll
      for (int k = 0; k < kCluster; ++k) {
        const float4 v = from[k * total + at];
        s[0] += v.x, s[1] += v.y, s[2] += v.z, s[3] += v.w;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) s[i] = own + i / 2 * 8 < rank ? s[i] * scaling : 0.f;
      const int odd = g & 1;  // that lane has the second row of both
      const float low = __shfl_xor_sync(~0u, odd ? s[0] : s[1], 1), high = __shfl_xor_sync(~0u, odd ? s[2] : s[3], 1);
      const int row = at / kRow * 8 + cluster_rank() * 2 + odd, pair = own - odd;
      if (n >= total || row >= t.num_rows) continue;
      auto* h = reinterpret_cast<uint32_t*>(h_row(p, module, t.row_begin + row) + pair);
      if (pair < past) h[0] = odd ? bf16x2(low, s[1]) : bf16x2(s[0], low);
      if (pair + 8 < past) h[4] = odd ? bf16x2(high, s[3]) : bf16x2(s[2], high);
    }
  }

  template <int BLOCKS>
  __device__ __forceinline__ void multiply_and_send() {
    Sums<BLOCKS> acc = {};
    multiply<BLOCKS>(acc);
    if (pass == 0) cluster_all_begun();
    mbar_wait(&bars().parts_empty, (pass & 1) ^ 1);
    send_parts<BLOCKS>(acc);
  }
  // Of the pass, by a warp that multiplies or by one that copies.
  template <bool MULTIPLIES>
  __device__ __forceinline__ void run(const ShrinkRows& rows) {
    if constexpr (MULTIPLIES) {
      if (threadIdx.x == 0) mbar_expect(&bars().parts_full, divide_up(this->rows(), 8) * RANKS * 32);
      const int share = this->share(this->rows());
      if (share == 1) multiply_and_send<1>();
      else if (share == 2) multiply_and_send<2>();
      else if (share == 3) multiply_and_send<3>();
      else if (share == 4 || kMostBlocks == 4) multiply_and_send<4>();
      else if (share == 5) multiply_and_send<kMostBlocks < 5 ? 4 : 5>();
      else if (share == 6) multiply_and_send<kMostBlocks < 6 ? 4 : 6>();
      else multiply_and_send<kMostBlocks>();
    } else {
      if (threadIdx.x / 32 == kWeightBoxWarp) bring_weights(rows);
      else bring_rows(rows);
      if (pass == 0) cluster_all_begun();
    }
  }

  // The tiles of this CTA's cluster; `rows` are the first one's.
  template <bool MULTIPLIES>
  __device__ __forceinline__ void all(ShrinkRows& rows) {
    at = blockIdx.x / kCluster;
#pragma unroll 1
    while (true) {
      run<MULTIPLIES>(rows);
      add_parts();
      ++pass, first_rank += RANKS;
      const bool whole = first_rank >= rank(tile().slot);
      if (whole && at + clusters() >= tiles() * p.num_modules) return;  // nobody waits to hear that parts have been added up
      __syncwarp();
      if ((threadIdx.x & 31) < kCluster) cluster_arrive(&bars().parts_empty, threadIdx.x & 31);
      if (!whole) continue;
      first_rank = 0, at += clusters();
      if (!MULTIPLIES) rows.ask(p, of_module(at));
      __syncthreads();  // the next tile's stages may be where parts were
    }
  }
};

// By all threads of a cluster that has tiles; its CTAs have begun to meet, and threads that copy have asked for the
// first one's rows. Warps that multiply have the registers of those that do not.
template <int RANKS>
__device__ __forceinline__ void shrink_cluster(const TileArgs& p, ShrinkRows& rows) {
  if (threadIdx.x < kShrinkWarps * 32) {
    more_registers<200>();
    TileShrink<RANKS>(p).template all<true>(rows);
  } else {
    fewer_registers<56>();
    TileShrink<RANKS>(p).template all<false>(rows);
  }
}

template <int RANKS>
__global__ void __launch_bounds__(kShrinkThreads, 2) shrink_tiles_kernel(const __grid_constant__ TileArgs p) {
  let_next_begin();
  const int cluster = blockIdx.x / kCluster;
  const int tiles = load_now(p.cut + 3);
  // Of one module the first tile is the cluster's own, asked for before it is known how many there are.
  ShrinkRows rows;
  if (threadIdx.x >= kWeightBoxWarp * 32) rows.ask(p, p.num_modules == 1 ? cluster : cluster % max(tiles, 1));
  if (threadIdx.x == 0) prefetch_entries(p);
  if (threadIdx.x == 32) make_shrink_barriers();
  if (threadIdx.x == kWeightBoxWarp * 32) prefetch_map(&p.a_parts[cluster_rank() / 2][1]);
  __syncthreads();
  if (cluster < tiles * p.num_modules) {
    cluster_begun();
    shrink_cluster<RANKS>(p, rows);
  }
  wait_for_previous();
}

}  // namespace lora_jax
