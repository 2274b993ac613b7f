// Of few_rows.cuh: what a thread reads of a stage, weights and x in pieces and scales for all of them.
//
// `seen` of each is made of a word of every read: a warp lets a stage go once these are here.
#pragma once
#include "grouped_matmul/codings.cuh"
#include "grouped_matmul/few_rows_args.cuh"

namespace lora_jax {

template <Coding C, int G, int ROWS, int W, int TILES, bool GATED>
struct FewRowsStage {
  using Layout = FewRowsLayout<C, G, ROWS, W, TILES>;
  static constexpr int kColumns = Layout::kWeightRows / (GATED ? 2 : 1);  // of d_out in a tile
  static constexpr int kStep = kStepColumns<C>;
  static constexpr int kLoad = kStep / 4;                  // columns of a piece: 16 x 32 bytes of weights, of plain ones x 64
  static constexpr int kScaleWords = scale_words<C, G>();  // of a row in a stage

  // The first of 16 rows of weights of a stage that are a warp's.
  __device__ __forceinline__ static int weight_row(int tile, int warp) {
    return GATED ? tile * W * 16 + warp * 16 : (warp * TILES + tile) * 16;
  }

  // Where a thread finds its part of a stage.
  struct Places {
    uint32_t words[4], scales;  // of 32 bytes of a row; of the first tile
    uint32_t looked_at;         // of kAffine: scales of one row of the warp's 32 or 16
    XPlaces<C> x;
    __device__ __forceinline__ Places() {
      const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        words[i] = weight_row(0, warp) * kRowBytes + (lane & 15) * kRowBytes + (((i * 2 + lane / 16) ^ (lane & 7)) << 4);
      const int row = weight_row(0, warp) + lane / 4;
      scales = Layout::kWeights + Layout::kX + row * (C == Coding::kAffine ? 1 : kScaleWords) * 4;
      looked_at = scales + (lane % 4 / 2 % TILES * kApart + lane % 2 * 8) * 4;
    }
  };
  static constexpr int kPlane = Layout::kWeightRows * 4;   // of kAffine: bytes of a word of all rows of a stage
  static constexpr int kApart = GATED ? W * 16 : 16;  // rows of weights from a warp's tile to its next
  static constexpr int kTileApart = (GATED ? kApart * kBlocks<C> : kApart) * kRowBytes;  // bytes; a matrix has its blocks together
  template <int N>
  static constexpr int kBlock = (N == 8 ? 8 : ROWS) * kRowBytes;  // of x, from 64 columns to the next
  // What a thread has of kLoad columns of a stage. Of each tile rows 0 to 7, rows 8 to 15, the same 16 bytes further.
  template <int N>
  struct Piece {
    uint32_t words[TILES][kBlocks<C>][4], x[N / 8][kLoad / 32][4];
    __device__ __forceinline__ void load(uint32_t stage, const Places& places, int i) {
      const uint32_t block = stage + i * kBlocks<C> / 4 * kColumns * kRowBytes;
#pragma unroll
      for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int q = 0; q < kBlocks<C>; ++q)
          ldmatrix(words[t][q], block + places.words[(i * kBlocks<C> + q) % 4] + t * kTileApart);
#pragma unroll
      for (int n = 0; n < N / 8; ++n)
#pragma unroll
        for (int c = 0; c < kLoad / 32; ++c)
          places.x.load(x[n][c], stage + Layout::kWeights + n * 8 * kRowBytes, i * kLoad + c * 32, kBlock<N>);
    }
    // Made of a word of each read.
    __device__ __forceinline__ uint32_t seen() const {
      uint32_t all = 0;
#pragma unroll
      for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int q = 0; q < kBlocks<C>; ++q) all ^= words[t][q][0];
#pragma unroll
      for (int n = 0; n < N / 8; ++n)
#pragma unroll
        for (int c = 0; c < kLoad / 32; ++c) all ^= x[n][c][0] ^ x[n][c][2];
      return all;
    }
  };
  struct Scales {
    uint32_t words[TILES][2][kScaleWords ? kScaleWords : 1];  // of kAffine those of one row, to look at
    __device__ __forceinline__ void load(uint32_t stage, const Places& places) {
      if constexpr (kScaleWords == 0) return;
      if constexpr (C == Coding::kAffine) {
        for (int w = 0; w < kSlots<C, G>; ++w) words[0][0][w] = lds32(stage + places.looked_at + w * kPlane);
        return;
      }
#pragma unroll
      for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int high = 0; high < 2; ++high)
          load_words(words[t][high], stage + places.scales + (t * kApart + high * 8) * kScaleWords * 4);
    }
    __device__ __forceinline__ uint32_t seen() const {
      uint32_t all = 0;
      if constexpr (C == Coding::kAffine) {
        for (int w = 0; w < kSlots<C, G>; ++w) all ^= words[0][0][w];
      } else if constexpr (kScaleWords > 0) {
#pragma unroll
        for (int i = 0; i < TILES * 2 * kScaleWords; ++i) all ^= words[i / (2 * kScaleWords)][i / kScaleWords % 2][i % kScaleWords];
      }
      return all;
    }
    // Whether some are so large, or so precise, that a decoder takes more instructions.
    __device__ __forceinline__ bool wide(const FewRowsArgs& p, int step) const {
      if constexpr (C != Coding::kAffine) return are_wide<C>(words);
      const int before = (threadIdx.x & 31) / 4 * p.scale_groups, first = before + p.scale_at(step * kSlots<C, G>);
      const int last = before + p.scale_at(step * kSlots<C, G> + kSlots<C, G> - 1);
      const int most = AffinePlace(last, first, p.scales_narrow, false).scale_word;
      bool any = false;
      for (int w = 0; w < kSlots<C, G>; ++w) any |= w <= most && is_affine_wide(words[0][0][w], p.scales_narrow);
      return any;
    }
  };
  // Of kAffine: what a thread decodes a piece by.
  template <bool WIDE>
  struct Affine {
    static constexpr int kGroups = C == Coding::kAffine && kLoad > G ? kLoad / G : 1;
    AffineGroup<WIDE> groups[TILES][2][kGroups];
    __device__ __forceinline__ void load(const FewRowsArgs& p, uint32_t stage, const Places& places, int step, int i) {
      const uint32_t none = kThirtyTwo + static_cast<uint32_t>(-p.first) * 0x10001;
      const int before = (threadIdx.x & 31) / 4 * p.scale_groups, first = before + p.scale_at(step * kSlots<C, G>);
      const bool zeros = p.matrices[0].zeros;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const int element = before + p.scale_at(step * kSlots<C, G> + i * kLoad / G + g);
        const AffinePlace place(element, first, p.scales_narrow, zeros);
        const uint32_t scale = stage + places.scales + place.scale_word * kPlane;
        const uint32_t zero = stage + places.scales + (kAffineScaleWords<kSlots<C, G>> + place.zero_word) * kPlane;
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
          for (int high = 0; high < 2; ++high) {
            const int row = (t * kApart + high * 8) * 4;
            groups[t][high][g].load(lds32(scale + row), zeros ? lds32(zero + row) : 0, place, none);
          }
      }
    }
    __device__ __forceinline__ uint32_t seen() const {
      uint32_t all = 0;
      if constexpr (C == Coding::kAffine)
#pragma unroll
        for (int i = 0; i < TILES * 2 * kGroups; ++i) {
          const AffineGroup<WIDE>& group = groups[i / (2 * kGroups)][i / kGroups % 2][i % kGroups];
          all ^= group.scale ^ group.zero;
        }
      return all;
    }
  };
};

}  // namespace lora_jax
