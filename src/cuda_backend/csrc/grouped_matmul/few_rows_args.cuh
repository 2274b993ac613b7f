// What a launch of few_rows.cuh is given, its shared memory, and where a warp finds the scales that it brings.
#pragma once
#include "device/ptx.cuh"
#include "grouped_matmul/codings.cuh"

namespace lora_jax {

constexpr int kMostMatrices = 3;
constexpr int kScaleBits = 20;

struct FewRowsMatrix {
  const void* scales;         // [groups, d_out, scale_groups]
  const void* zeros;          // of kAffine, in bytes: the same shape, or null
  const __nv_bfloat16* bias;  // [groups, d_out] or null
  const void* addend;         // [rows, d_out] or null
  __nv_bfloat16* y;           // [rows, d_out]; of up none
  int d_out, first_tile;
};

struct FewRowsArgs {
  CUtensorMap maps[kMostMatrices];  // of weights, two bytes an element; a box is kBlocks of 128 bytes of each row
  CUtensorMap x_maps[2];            // of a stage's columns of x: 8 rows, a tile's
  FewRowsMatrix matrices[kMostMatrices];  // gate and up, or some that are multiplied by one after the other
  const __nv_bfloat16* x;           // [rows, d_in]
  const int* sizes;                 // [groups]
  int rows, groups, d_in, tiles, steps, stages, works;
  int scale_groups, scale_columns;  // of a row; of d_in in each
  uint32_t scale_step;              // of scale_at
  int piece;                        // bytes of scales that are copied at once; 0: a scale's
  bool scales_narrow;               // of kAffine: bfloat16
  bool addends_wide;                // float32
  float first;                      // of integers: the value of code 0
  float table[16];                  // of kTable

  // Which of a row's scales the columns of a slot have: G columns of d_in, of which several may share one.
  __device__ __forceinline__ int scale_at(int slot) const {
    return min(static_cast<int>(slot * scale_step >> kScaleBits), scale_groups - 1);
  }
};

struct FewRowsWork {  // a block of rows of one group
  int group, row, count;
};

// Shared memory: stages of weights, x and scales, then barriers, the table, the list.
template <Coding C, int G, int ROWS, int W, int TILES>
struct FewRowsLayout {
  static constexpr int kWeightRows = W * TILES * 16;
  static constexpr int kWeights = kWeightRows * kRowBytes * kBlocks<C>, kX = ROWS * kStepColumns<C> * 2;
  static constexpr int kBarriers = 256, kTable = C == Coding::kTable ? 2 * kTableBytes : 0;
  static constexpr int kStage = (kWeights + kX + kWeightRows * 4 * scale_words<C, G>() + 1023) & ~1023;
  static __host__ __device__ int fixed(int works) { return kTable + kBarriers + works * 8; }
};

struct FewRowsRing {
  int at = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next(int stages) {
    if (++at == stages) at = 0, phase ^= 1;
  }
};

// Scales, and zero points, of 32 ROWS rows of weights of a tile: where a lane finds those of its rows. Found once for
// a tile: what a stage takes is little more than its copies, as some stages last for 200 ns.
template <Coding C, int G, int ROWS>
struct FewRowsScales {
  static constexpr int kRow = scale_words<C, G>() * 4;  // bytes of a row in a stage
  const unsigned char *scales[ROWS], *zeros[ROWS];

  // Of a tile that begins at `column`; a matrix has `columns` of it, and with gate and up the next has the others.
  __device__ __forceinline__ void find(const FewRowsArgs& p, int matrix, int group, int column, int columns) {
    const int bytes = C == Coding::kAffine && p.scales_narrow ? 2 : kScaleBytes<C>;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const int r = (threadIdx.x & 31) + i * 32, up = r >= columns;
      const FewRowsMatrix& of = p.matrices[matrix + up];
      const int d = min(column + r - up * columns, of.d_out - 1);
      const int64_t first = (static_cast<int64_t>(group) * of.d_out + d) * p.scale_groups;
      scales[i] = static_cast<const unsigned char*>(of.scales) + first * bytes;
      zeros[i] = of.zeros ? static_cast<const unsigned char*>(of.zeros) + first : nullptr;
    }
  }
  __device__ __forceinline__ static const void* word_of(const unsigned char* p) {
    return reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(p) & ~static_cast<uintptr_t>(3));
  }
  // Words of each row that lie together in a stage, from the one on that has the stage's first scale.
  __device__ __forceinline__ void bring_affine(const FewRowsArgs& p, uint32_t to, int step) const {
    constexpr int slots = kSlots<C, G>, plane = ROWS * 32 * 4;
    const int first = p.scale_at(step * slots), last = p.scale_at(step * slots + slots - 1);
    const int bytes = p.scales_narrow ? 2 : 4;
    to += (threadIdx.x & 31) * 4;
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
      words<kAffineScaleWords<slots>>(to + i * 128, plane, scales[i] + first * bytes, scales[i] + last * bytes);
    if (!zeros[0]) return;
    to += kAffineScaleWords<slots> * plane;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) words<kAffineZeroWords<slots>>(to + i * 128, plane, zeros[i] + first, zeros[i] + last);
  }
  template <int MOST>
  __device__ __forceinline__ static void words(uint32_t to, int plane, const unsigned char* from, const unsigned char* last) {
    const auto* word = static_cast<const unsigned char*>(word_of(from));
#pragma unroll
    for (int w = 0; w < MOST; ++w)
      if (word + w * 4 <= last) copy_4(to + w * plane, word + w * 4);
  }
  // Asks for those of a stage.
  __device__ __forceinline__ void bring(const FewRowsArgs& p, uint32_t to, int step) const {
    if constexpr (C == Coding::kAffine) {
      bring_affine(p, to, step);
      return;
    }
    to += (threadIdx.x & 31) * kRow;
    if (p.piece == 0) {
#pragma unroll
      for (int slot = 0; slot < kSlots<C, G>; ++slot) {
        const int at = p.scale_at(step * kSlots<C, G> + slot);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) copy_4(to + i * 32 * kRow + slot * 4, scales[i] + at * 4);
      }
    } else {
      const int all = p.scale_groups * kScaleBytes<C>, first = step * kRow;  // behind d_in x is 0
      if (p.piece == kRow) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
          copy_piece(to + i * 32 * kRow, scales[i] + min(first, all - kRow), kRow, true);
      } else {
        for (int b = 0; b < kRow; b += p.piece)
#pragma unroll
          for (int i = 0; i < ROWS; ++i)
            copy_piece(to + i * 32 * kRow + b, scales[i] + min(first + b, all - p.piece), p.piece, true);
      }
    }
  }
};

}  // namespace lora_jax
