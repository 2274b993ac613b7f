// Attention between all patches of one image, heads of 72: softmax(scale q k^T) v.
//
// A CTA takes 128 queries of a head, 64 for each of two consumer warpgroups, and walks over all keys in
// blocks, the last one first: a row's bits depend on its image alone. One thread of a third warpgroup brings blocks
// by the copy engine into a ring. A warpgroup issues the products of the next block's logits and those of
// this block's values together, and takes exponentials meanwhile; the two take turns in issuing, so that
// one's exponentials fall into the other's products. No branch stands between a product and the wait for
// it: the assembler would wait before the branch.
// Columns 72 to 79 of a head, which products of 16 take too, lie outside the tensor and come as zeros.
#pragma once
#include "device/swizzled_map.cuh"
#include "device/wgmma.cuh"

namespace lora_jax {

constexpr int kHeadDim = 72, kValueTiles = kHeadDim / 8;
constexpr int kImageRows = 128;   // queries of a CTA
constexpr int kImageKeys = 176;   // of a block
constexpr int kImageStages = 2, kImageThreads = 384, kImageConsumers = 2;
constexpr int kKeyTiles = kImageKeys / 8, kKeySteps = kImageKeys / 16;
template <int ROWS>
constexpr int kRowBytes = ROWS * 256;  // two blocks of 64 columns

struct ImageAttentionArgs {
  CUtensorMap q_map, k_map, v_map;
  __nv_bfloat16* out;  // [patches, heads, 72]
  const int* num_patches;
  int patches, heads;
  float scale_log2;  // scale / ln 2
  int none;          // 0, which the compiler does not know
};

struct ImageAttentionShared {
  alignas(1024) unsigned char q[kRowBytes<kImageRows>];
  alignas(1024) unsigned char k[kImageStages][kRowBytes<kImageKeys>];
  alignas(1024) unsigned char v[kImageStages][kRowBytes<kImageKeys>];
  uint64_t q_full, k_full[kImageStages], k_empty[kImageStages], v_full[kImageStages], v_empty[kImageStages];
};

struct ImageRing {
  int at = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next() {
    if (++at == kImageStages) at = 0, phase ^= 1;
  }
};

template <int ROWS>
__device__ __forceinline__ void bring_rows(unsigned char* to, const CUtensorMap* map, int row, int head,
                                           uint64_t* full) {
  mbar_expect(full, kRowBytes<ROWS>);
  for (int i = 0; i < 2; ++i) tile_copy(smem_u32(to) + i * ROWS * 128, map, i * 64, row, head, 0, full);
}

__device__ __forceinline__ void produce_patches(const ImageAttentionArgs& p, ImageAttentionShared& sm, int first,
                                                int head, int blocks) {
  bring_rows<kImageRows>(sm.q, &p.q_map, first, head, &sm.q_full);
  ImageRing ring;
  for (int number = 0; number < blocks; ++number, ring.next()) {
    const int block = number == 0 ? blocks - 1 : number - 1;
    mbar_wait(&sm.k_empty[ring.at], ring.phase ^ 1);
    bring_rows<kImageKeys>(sm.k[ring.at], &p.k_map, block * kImageKeys, head, &sm.k_full[ring.at]);
    mbar_wait(&sm.v_empty[ring.at], ring.phase ^ 1);
    bring_rows<kImageKeys>(sm.v[ring.at], &p.v_map, block * kImageKeys, head, &sm.v_full[ring.at]);
  }
}

struct ImageConsumer {
  const ImageAttentionArgs& p;
  ImageAttentionShared& sm;
  int group, num_patches, blocks;
  ImageRing keys, values;
  float s[kKeyTiles * 4];            // logits, then exponentials, of rows g and g + 8
  float o[kValueTiles * 4], top[2], sum[2], shrink[2];
  uint32_t weights[kKeySteps][4];    // the exponentials as operand of the values' product

  __device__ __forceinline__ ImageConsumer(const ImageAttentionArgs& p, ImageAttentionShared& sm, int num_patches,
                                           int blocks)
      : p(p), sm(sm), group(threadIdx.x / 128 - 1), num_patches(num_patches), blocks(blocks) {
#pragma unroll
    for (int i = 0; i < kValueTiles * 4; ++i) o[i] = 0;
    top[0] = top[1] = -INFINITY, sum[0] = sum[1] = 0;
  }

  __device__ __forceinline__ void issue_logits() {
    mbar_wait(&sm.k_full[keys.at], keys.phase);
    const uint32_t q = smem_u32(sm.q) + group * 64 * 128, k = smem_u32(sm.k[keys.at]);
    wgmma_begin();
#pragma unroll
    for (int step = 0; step < 5; ++step) {
      const uint32_t column = step % 4 * 32, block = step / 4 * 128;
      wgmma_rows(s, wgmma_operand(q + block * kImageRows + column), wgmma_operand(k + block * kImageKeys + column),
                 step > 0);
    }
    wgmma_commit();
  }
  __device__ __forceinline__ void issue_values() {
    mbar_wait(&sm.v_full[values.at], values.phase);
    const uint32_t v = smem_u32(sm.v[values.at]);
    wgmma_begin();
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step)
      wgmma_columns_72(o, weights[step], wgmma_operand(v + step * 16 * 128, kImageKeys * 128));
    wgmma_commit();
  }
  // `after`: what must be there before; the assembler would wait for the values before it.
  __device__ __forceinline__ void leave(uint64_t* empty, ImageRing& ring, int after = 0) {
    mbar_arrive_if(&empty[ring.at], (threadIdx.x % 128 | (after & p.none)) == 0);
    ring.next();
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
      shrink[r] = exp2_approx(top[r] - most);
      float added = 0;
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
        for (int e = n * 4 + r * 2; e < n * 4 + r * 2 + 2; ++e)
          added += s[e] = exp2_approx(__fmaf_rn(s[e], p.scale_log2, -most));
      top[r] = most, sum[r] = __fmaf_rn(sum[r], shrink[r], added);
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

  // One warpgroup issues products after the other.
  __device__ __forceinline__ void take_turn() { named_barrier_wait(2 + group, 256); }
  __device__ __forceinline__ void give_turn() { named_barrier_arrive(3 - group, 256); }

  __device__ __forceinline__ void run() {
    mbar_wait(&sm.q_full, 0);
    if (group == 1) give_turn();
    issue_logits();
    wgmma_wait<0>();
    wgmma_settle(s);
    leave(sm.k_empty, keys);
    hide();
    soften();
    pack();
#pragma unroll 1
    for (int left = blocks - 1; left > 0; --left) {
      take_turn();
      issue_logits();
      issue_values();
      give_turn();
      wgmma_wait<1>();
      wgmma_settle(s);
      soften();
      leave(sm.k_empty, keys, __float_as_int(sum[0]) | __float_as_int(sum[1]));
      wgmma_settle(s);  // before the wait: the compiler would let it begin after
      wgmma_wait<0>();
      wgmma_settle(s), wgmma_settle(o);
      leave(sm.v_empty, values);
      if (__any_sync(~0u, shrink[0] != 1.f || shrink[1] != 1.f)) {  // the maximum rarely grows
#pragma unroll
        for (int i = 0; i < kValueTiles * 4; ++i) o[i] *= shrink[i / 2 % 2];
      }
      pack();
    }
    if (group == 0) take_turn();
    issue_values();
    wgmma_wait<0>();
    wgmma_settle(o);
  }

  // Rows past the image are zeros.
  __device__ __forceinline__ void store(int first, int head) {
    const int row = first + group * 64 + (threadIdx.x % 128) / 32 * 16 + (threadIdx.x & 31) / 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int mine = row + r * 8;
      float total = sum[r] + __shfl_xor_sync(~0u, sum[r], 1);
      total += __shfl_xor_sync(~0u, total, 2);
      const float inverse = mine < num_patches ? 1 / total : 0;
      if (mine >= p.patches) continue;
      __nv_bfloat16* to = p.out + (static_cast<int64_t>(mine) * p.heads + head) * kHeadDim + (threadIdx.x & 3) * 2;
#pragma unroll
      for (int n = 0; n < kValueTiles; ++n)
        *reinterpret_cast<uint32_t*>(to + n * 8) =
            mine < num_patches ? bf16x2(o[n * 4 + r * 2] * inverse, o[n * 4 + r * 2 + 1] * inverse) : 0;
    }
  }
};

__device__ __forceinline__ void clear_rows(const ImageAttentionArgs& p, int first, int head) {
  const int pieces = kHeadDim / 8, rows = min(kImageRows, p.patches - first);
  for (int i = threadIdx.x; i < rows * pieces; i += kImageThreads)
    reinterpret_cast<uint4*>(p.out + (static_cast<int64_t>(first + i / pieces) * p.heads + head) * kHeadDim)[i % pieces] =
        make_uint4(0, 0, 0, 0);
}

__global__ void __launch_bounds__(kImageThreads, 1)
    image_attention_kernel(const __grid_constant__ ImageAttentionArgs p) {
  extern __shared__ __align__(1024) unsigned char image_raw[];
  auto& sm = *reinterpret_cast<ImageAttentionShared*>(image_raw);
  const int tiles = (p.patches + kImageRows - 1) / kImageRows;
  const int first = blockIdx.x % tiles * kImageRows, head = blockIdx.x / tiles;
  const int num_patches = min(__ldg(p.num_patches), p.patches);
  if (first >= num_patches) {
    clear_rows(p, first, head);
    return;
  }
  if (threadIdx.x == 0) {
    mbar_init(&sm.q_full, 1);
    for (int i = 0; i < kImageStages; ++i) {
      mbar_init(&sm.k_full[i], 1), mbar_init(&sm.v_full[i], 1);
      mbar_init(&sm.k_empty[i], kImageConsumers), mbar_init(&sm.v_empty[i], kImageConsumers);
    }
    fence_barriers();
  }
  __syncthreads();
  const int blocks = (num_patches + kImageKeys - 1) / kImageKeys;
  if (threadIdx.x < 128) {
    fewer_registers<24>();
    if (threadIdx.x == 0) produce_patches(p, sm, first, head, blocks);
  } else {
    more_registers<240>();
    ImageConsumer own(p, sm, num_patches, blocks);
    own.run();
    own.store(first, head);
  }
}

inline cudaError_t launch_image_attention(ImageAttentionArgs& args, const void* q, const void* k, const void* v,
                                          cudaStream_t stream) {
  const cuuint64_t row = static_cast<cuuint64_t>(args.heads) * kHeadDim * 2;
  const cuuint64_t dims[] = {kHeadDim, static_cast<cuuint64_t>(args.patches), static_cast<cuuint64_t>(args.heads), 1};
  const cuuint64_t strides[] = {row, kHeadDim * 2, row};
  const cuuint32_t queries[] = {64, kImageRows, 1, 1}, keys[] = {64, kImageKeys, 1, 1};
  cudaError_t e = swizzled_map<4>(&args.q_map, q, dims, strides, queries);
  if (e == cudaSuccess) e = swizzled_map<4>(&args.k_map, k, dims, strides, keys);
  if (e == cudaSuccess) e = swizzled_map<4>(&args.v_map, v, dims, strides, keys);
  constexpr int bytes = sizeof(ImageAttentionShared);
  const auto kernel = image_attention_kernel;
  if (e == cudaSuccess) e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (e != cudaSuccess) return e;
  const int ctas = (args.patches + kImageRows - 1) / kImageRows * args.heads;
  kernel<<<ctas, kImageThreads, bytes, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace lora_jax
