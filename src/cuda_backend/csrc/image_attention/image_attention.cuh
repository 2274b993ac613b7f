// Attention between all patches of one image, heads of 72: softmax(scale q k^T) v.
//
// A CTA takes 192 queries of a head, 64 for each of three consumer warpgroups, and walks over all keys in
// blocks, the last one first. One thread of a fourth warpgroup brings blocks, which lie in memory as they
// are read (image_heads.cuh), by the copy engine into a ring. A warpgroup issues the products of the next
// block's logits and those of this block's values together, and takes exponentials meanwhile; those of one
// warpgroup fall into the products of the others. No branch stands between a product and the wait for
// it: the assembler would wait before the branch.
//
// Tiles that do not fill all SMs once more are cut into three of 64 queries. There each warpgroup takes every
// third block of keys, and the first one adds up what they found. A row's bits depend on its image alone.
#pragma once
#include "device/arithmetic.cuh"
#include "device/wgmma.cuh"
#include "image_attention/image_heads.cuh"

namespace lora_jax {

constexpr int kImageGroups = 3, kGroupRows = 64, kImageRows = kImageGroups * kGroupRows;  // queries of a CTA
constexpr int kImageKeys = 112, kImageStages = 4, kImageThreads = 128 + kImageGroups * 128;
constexpr int kKeyTiles = kImageKeys / 8, kKeySteps = kImageKeys / 16, kValueTiles = kPieces;
constexpr int kImageTurn = 132;                // CTAs that run at once on a Hopper GPU
constexpr int kMostCut = 2 * kImageTurn / 3;  // tiles that are cut: their parts take two thirds of a turn
constexpr int kFound = kValueTiles * 4 + 2;   // what a thread of a warpgroup found

template <int ROWS>
constexpr int kRowBytes = ROWS / 8 * kBlockBytes;

struct ImageAttentionArgs {
  const unsigned char* heads_in;  // [3, heads, blocks, 10, 8, 16]
  __nv_bfloat16* out;             // [patches, heads, 72]
  const int* num_patches;
  int patches, heads, blocks;
  float scale_log2;  // scale / ln 2
};

struct ImageAttentionShared {
  alignas(128) unsigned char q[kRowBytes<kImageRows>];
  alignas(128) unsigned char k[kImageStages][kRowBytes<kImageKeys>];
  alignas(128) unsigned char v[kImageStages][kRowBytes<kImageKeys>];
  uint64_t q_full, k_full[kImageStages], k_empty[kImageStages], v_full[kImageStages], v_empty[kImageStages];
};

// What a CTA computes: queries from `first` on, 64 where `cut`, else 192; or zeros past the image.
struct ImageTile {
  int first, head;
  bool cut, blank;
};

__device__ __forceinline__ ImageTile image_tile(const ImageAttentionArgs& p, int num_patches, int number) {
  const int real = (num_patches + kImageRows - 1) / kImageRows, all = (p.patches + kImageRows - 1) / kImageRows;
  const int tiles = real * p.heads, rest = tiles % kImageTurn, cut = rest <= kMostCut ? rest : 0, whole = tiles - cut;
  if (number < whole) return {number % real * kImageRows, number / real, false, false};
  number -= whole;
  if (number < cut * kImageGroups) {
    const int tile = whole + number / kImageGroups;
    const int first = tile % real * kImageRows + number % kImageGroups * kGroupRows;
    return {first, tile / real, true, first >= num_patches};
  }
  number -= cut * kImageGroups;
  const int past = all - real;
  if (number >= past * p.heads) return {p.patches, 0, false, true};
  return {(real + number % past) * kImageRows, number / past, false, true};
}

struct ImageRing {
  int at = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next(int count = 1) {
    at += count;
    if (at >= kImageStages) at -= kImageStages, phase ^= 1;
  }
};

template <int ROWS>
__device__ __forceinline__ void bring_rows(unsigned char* to, const ImageAttentionArgs& p, int part, int row, int head,
                                           uint64_t* full) {
  const int64_t block = (static_cast<int64_t>(part) * p.heads + head) * p.blocks + row / 8;
  mbar_expect(full, kRowBytes<ROWS>);
  bulk_copy(smem_u32(to), p.heads_in + block * kBlockBytes, kRowBytes<ROWS>, full);
}

__device__ __forceinline__ void produce_patches(const ImageAttentionArgs& p, ImageAttentionShared& sm, ImageTile tile,
                                                int blocks) {
  if (tile.cut)
    bring_rows<kGroupRows>(sm.q, p, 0, tile.first, tile.head, &sm.q_full);
  else
    bring_rows<kImageRows>(sm.q, p, 0, tile.first, tile.head, &sm.q_full);
  ImageRing ring;
  for (int number = 0; number < blocks; ++number, ring.next()) {
    const int row = (number == 0 ? blocks - 1 : number - 1) * kImageKeys;
    mbar_wait(&sm.k_empty[ring.at], ring.phase ^ 1);
    bring_rows<kImageKeys>(sm.k[ring.at], p, 1, row, tile.head, &sm.k_full[ring.at]);
    mbar_wait(&sm.v_empty[ring.at], ring.phase ^ 1);
    bring_rows<kImageKeys>(sm.v[ring.at], p, 2, row, tile.head, &sm.v_full[ring.at]);
  }
}

struct ImageConsumer {
  const ImageAttentionArgs& p;
  ImageAttentionShared& sm;
  ImageTile tile;
  int group, num_patches, blocks, stride;
  ImageRing keys, values;
  float s[kKeyTiles * 4];                        // logits, then exponentials, of rows g and g + 8
  float o[kValueTiles * 4], top[2], shrink[2];  // the last tile of o holds the sums of the weights
  uint32_t weights[kKeySteps][4];                // the exponentials as operand of the values' product

  __device__ __forceinline__ ImageConsumer(const ImageAttentionArgs& p, ImageAttentionShared& sm, ImageTile tile,
                                           int num_patches, int blocks)
      : p(p), sm(sm), tile(tile), group(static_cast<int>(threadIdx.x) / 128 - 1), num_patches(num_patches),
        blocks(blocks), stride(tile.cut ? kImageGroups : 1) {
#pragma unroll
    for (int i = 0; i < kValueTiles * 4; ++i) o[i] = 0;
    top[0] = top[1] = -INFINITY;
    if (tile.cut) keys.next(group), values.next(group);
  }

  __device__ __forceinline__ void issue_logits() {
    mbar_wait(&sm.k_full[keys.at], keys.phase);
    const uint32_t q = smem_u32(sm.q) + (tile.cut ? 0 : group * kRowBytes<kGroupRows>), k = smem_u32(sm.k[keys.at]);
    wgmma_begin();
#pragma unroll
    for (int step = 0; step < kPieces / 2; ++step)
      wgmma_rows(s, wgmma_pieces(q + step * 256, 128, kBlockBytes), wgmma_pieces(k + step * 256, 128, kBlockBytes),
                 step > 0);
    wgmma_commit();
  }
  __device__ __forceinline__ void issue_values() {
    mbar_wait(&sm.v_full[values.at], values.phase);
    const uint32_t v = smem_u32(sm.v[values.at]);
    wgmma_begin();
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step)
      wgmma_columns(o, weights[step], wgmma_pieces(v + step * 2 * kBlockBytes, kBlockBytes, 128));
    wgmma_commit();
  }
  // `after` is no negative number, but must be there before: the assembler would wait for the values first.
  __device__ __forceinline__ void leave(uint64_t* empty, ImageRing& ring, float after = 0) {
    mbar_arrive_if(&empty[ring.at], (threadIdx.x % 128 == 0) & !(after < 0));
    ring.next(stride);
  }

  // Keys past the image weigh nothing.
  __device__ __forceinline__ void hide() {
    const int first = (blocks - 1) * kImageKeys + (threadIdx.x & 3) * 2;
#pragma unroll
    for (int i = 0; i < kKeyTiles * 4; ++i)
      if (first + i / 4 * 8 + i % 2 >= num_patches) s[i] = -INFINITY;
  }
  // Exponentials against the running maximum; `shrink` is what earlier sums are worth then.
  __device__ __forceinline__ void soften() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most = s[r * 2];
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) most = fmaxf(most, fmaxf(s[n * 4 + r * 2], s[n * 4 + r * 2 + 1]));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      most = fmaxf(top[r], most * p.scale_log2);
      shrink[r] = exp2_approx(top[r] - most), top[r] = most;
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
        for (int e = n * 4 + r * 2; e < n * 4 + r * 2 + 2; ++e) s[e] = exp2_approx(__fmaf_rn(s[e], p.scale_log2, -most));
    }
  }
  __device__ __forceinline__ void pack() {
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = (step * 2 + i / 2) * 4 + i % 2 * 2;
        weights[step][i] = bf16x2(s[at], s[at + 1]);
      }
  }

  // Takes every `stride`-th block, of a cut tile from the warpgroup's own on.
  __device__ __forceinline__ void run() {
    int left = tile.cut ? (blocks - group + kImageGroups - 1) / kImageGroups : blocks;
    if (left <= 0) return;
    mbar_wait(&sm.q_full, 0);
    issue_logits();
    wgmma_wait<0>();
    wgmma_settle(s);
    leave(sm.k_empty, keys);
    if (!tile.cut || group == 0) hide();
    soften();
    pack();
#pragma unroll 1
    while (--left > 0) {
      issue_logits();
      issue_values();
      wgmma_wait<1>();
      wgmma_settle(s);
      soften();
      leave(sm.k_empty, keys, s[kKeyTiles * 4 - 4] + s[kKeyTiles * 4 - 1]);
      wgmma_settle(s);
      wgmma_wait<0>();
      wgmma_settle(s), wgmma_settle(o);
      leave(sm.v_empty, values);
      if (__any_sync(~0u, shrink[0] != 1.f || shrink[1] != 1.f)) {  // the maximum rarely grows
#pragma unroll
        for (int i = 0; i < kValueTiles * 4; ++i) o[i] *= shrink[i / 2 % 2];
      }
      pack();
    }
    issue_values();
    wgmma_wait<0>();
    wgmma_settle(o);
  }

  // Has the first warpgroup add up what all found in their blocks of keys, in the ring's memory.
  __device__ __forceinline__ void join() {
    float* found = reinterpret_cast<float*>(sm.k) + threadIdx.x % 128;
    const auto place = [](int other, int i) { return ((other - 1) * kFound + i) * 128; };
    named_barrier_wait(2, kImageGroups * 128);  // all have read their blocks
    if (group > 0) {
#pragma unroll
      for (int i = 0; i < kValueTiles * 4; ++i) found[place(group, i)] = o[i];
#pragma unroll
      for (int r = 0; r < 2; ++r) found[place(group, kValueTiles * 4 + r)] = top[r];
    }
    named_barrier_wait(3, kImageGroups * 128);
    if (group > 0) return;
#pragma unroll
    for (int other = 1; other < kImageGroups; ++other) {
      float mine[2], its[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float that = found[place(other, kValueTiles * 4 + r)], most = fmaxf(top[r], that);
        mine[r] = exp2_approx(top[r] - most), its[r] = exp2_approx(that - most), top[r] = most;
      }
#pragma unroll
      for (int i = 0; i < kValueTiles * 4; ++i)
        o[i] = __fmaf_rn(o[i], mine[i / 2 % 2], its[i / 2 % 2] * found[place(other, i)]);
    }
  }

  // Rows past the image are zeros.
  __device__ __forceinline__ void store() {
    const int own = tile.first + (tile.cut ? 0 : group * kGroupRows);
    const int row = own + (threadIdx.x % 128) / 32 * 16 + (threadIdx.x & 31) / 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int mine = row + r * 8;
      const float total = __shfl_sync(~0u, o[kHeadPieces * 4 + r * 2], threadIdx.x & 28);
      const float inverse = mine < num_patches ? 1 / total : 0;
      if (mine >= p.patches) continue;
      __nv_bfloat16* to = p.out + (static_cast<int64_t>(mine) * p.heads + tile.head) * kHeadDim + (threadIdx.x & 3) * 2;
#pragma unroll
      for (int n = 0; n < kHeadPieces; ++n)
        *reinterpret_cast<uint32_t*>(to + n * 8) =
            mine < num_patches ? bf16x2(o[n * 4 + r * 2] * inverse, o[n * 4 + r * 2 + 1] * inverse) : 0;
    }
  }
};

__device__ __forceinline__ void clear_rows(const ImageAttentionArgs& p, ImageTile tile) {
  const int rows = min(tile.cut ? kGroupRows : kImageRows, p.patches - tile.first);
  for (int i = threadIdx.x; i < rows * kHeadPieces; i += kImageThreads)
    reinterpret_cast<uint4*>(p.out + (static_cast<int64_t>(tile.first + i / kHeadPieces) * p.heads + tile.head) *
                                         kHeadDim)[i % kHeadPieces] = make_uint4(0, 0, 0, 0);
}

__global__ void __launch_bounds__(kImageThreads, 1) image_attention_kernel(const ImageAttentionArgs p) {
  extern __shared__ __align__(128) unsigned char image_raw[];
  auto& sm = *reinterpret_cast<ImageAttentionShared*>(image_raw);
  const int num_patches = min(__ldg(p.num_patches), p.patches);
  const ImageTile tile = image_tile(p, num_patches, static_cast<int>(blockIdx.x));
  if (tile.blank) {
    clear_rows(p, tile);
    return;
  }
  if (threadIdx.x == 0) {
    const int readers = tile.cut ? 1 : kImageGroups;
    mbar_init(&sm.q_full, 1);
    for (int i = 0; i < kImageStages; ++i) {
      mbar_init(&sm.k_full[i], 1), mbar_init(&sm.v_full[i], 1);
      mbar_init(&sm.k_empty[i], readers), mbar_init(&sm.v_empty[i], readers);
    }
    fence_barriers();
  }
  __syncthreads();
  const int blocks = (num_patches + kImageKeys - 1) / kImageKeys;
  if (threadIdx.x < 128) {
    fewer_registers<32>();
    if (threadIdx.x == 0) produce_patches(p, sm, tile, blocks);
  } else {
    more_registers<160>();
    ImageConsumer own(p, sm, tile, num_patches, blocks);
    own.run();
    if (tile.cut) {
      own.join();
      if (own.group > 0) return;
    }
    own.store();
  }
}

// Blocks of 8 rows of each head in memory: tiles of queries and of keys end inside.
inline int image_blocks(int patches) {
  const int queries = (patches + kImageRows - 1) / kImageRows * kImageRows;
  const int keys = (patches + kImageKeys - 1) / kImageKeys * kImageKeys;
  return (queries > keys ? queries : keys) / kTurnedRows * (kTurnedRows / 8);
}

inline cudaError_t launch_image_attention(const ImageAttentionArgs& p, cudaStream_t stream) {
  constexpr int bytes = sizeof(ImageAttentionShared);
  const auto kernel = image_attention_kernel;
  const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (e != cudaSuccess) return e;
  const int tiles = (p.patches + kImageRows - 1) / kImageRows * p.heads, ctas = tiles + kMostCut * (kImageGroups - 1);
  kernel<<<ctas, kImageThreads, bytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace lora_jax
