// Lays out q, k and v of one image as the products read them, with q and k rotated by their patches' angles: blocks
// of 8 patches, and in a block 10 pieces of 8 columns, of which a head of 72 fills 9. The tenth piece is
// zeros, of v a one and zeros: by it the product with the weights sums these up too.
#pragma once
#include "device/arithmetic.cuh"
#include "device/ptx.cuh"

namespace lora_jax {

constexpr int kHeadDim = 72, kHalfHead = kHeadDim / 2, kHeadPieces = kHeadDim / 8, kPieces = kHeadPieces + 1;
constexpr int kBlockBytes = kPieces * 128;  // of 8 patches
constexpr int kTurnedRows = 16, kTurnLoads = 3;  // loads under way of a thread
constexpr int kTurnHeads = 2, kTurnThreads = kTurnedRows * kPieces * kTurnHeads;

struct ImageHeadsArgs {
  const __nv_bfloat16* qkv;  // [patches, 3, heads, 72]
  const float* cos;          // [patches, 36]
  const float* sin;
  const int* num_patches;
  unsigned char* out;  // [3, heads, blocks, 10, 8, 16]
  int patches, heads, blocks;
};

// Four columns turned: x (cos) -+ other (sin).
__device__ __forceinline__ uint2 turn_four(uint2 x, uint2 other, float4 c, float4 s, float sign) {
  const float2 x0 = __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&x.x));
  const float2 x1 = __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&x.y));
  const float2 y0 = __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&other.x));
  const float2 y1 = __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&other.y));
  return make_uint2(bf16x2(x0.x * c.x + sign * y0.x * s.x, x0.y * c.y + sign * y0.y * s.y),
                    bf16x2(x1.x * c.z + sign * y1.x * s.z, x1.y * c.w + sign * y1.y * s.w));
}

// What a piece of every head of a patch is turned by: cos and sin of its columns, four at a time.
struct PieceAngles {
  float4 cos[2], sin[2];
  __device__ __forceinline__ PieceAngles(const ImageHeadsArgs& p, int row, int piece) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = row * kHalfHead + (piece * 8 + i * 4) % kHalfHead;
      cos[i] = __ldg(reinterpret_cast<const float4*>(p.cos + at)), sin[i] = __ldg(reinterpret_cast<const float4*>(p.sin + at));
    }
  }
  __device__ __forceinline__ uint4 turned(const unsigned char* head, int piece) const {
    const uint4 own = *reinterpret_cast<const uint4*>(head + piece * 16);
    uint2 halves[2] = {make_uint2(own.x, own.y), make_uint2(own.z, own.w)};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int from = piece * 8 + i * 4, pair = from < kHalfHead ? from + kHalfHead : from - kHalfHead;
      halves[i] = turn_four(halves[i], *reinterpret_cast<const uint2*>(head + pair * 2), cos[i], sin[i],
                            from < kHalfHead ? -1.f : 1.f);
    }
    return make_uint4(halves[0].x, halves[0].y, halves[1].x, halves[1].y);
  }
};

__global__ void __launch_bounds__(kTurnThreads) image_heads_kernel(const ImageHeadsArgs p) {
  extern __shared__ __align__(16) unsigned char turn_raw[];
  const int wide = p.heads * kHeadPieces, pitch = wide * 16 + 16;  // pieces of a row; its bytes, off the banks of others
  const int part = static_cast<int>(blockIdx.x) % 3, first = static_cast<int>(blockIdx.x) / 3 * kTurnedRows;
  const int count = min(__ldg(p.num_patches), p.patches), rows = min(max(count - first, 0), kTurnedRows);
  const uint4* from = reinterpret_cast<const uint4*>(p.qkv) + (static_cast<int64_t>(first) * 3 + part) * wide;
  for (int base = threadIdx.x; base < rows * wide; base += kTurnThreads * kTurnLoads) {
    uint4 v[kTurnLoads];
#pragma unroll
    for (int i = 0; i < kTurnLoads; ++i) {
      const int at = base + i * kTurnThreads;
      if (at < rows * wide) v[i] = __ldg(from + static_cast<int64_t>(at / wide) * 3 * wide + at % wide);
    }
#pragma unroll
    for (int i = 0; i < kTurnLoads; ++i) {
      const int at = base + i * kTurnThreads;
      if (at < rows * wide) *reinterpret_cast<uint4*>(turn_raw + at / wide * pitch + at % wide * 16) = v[i];
    }
  }
  // A thread has a piece of one patch, and every other head.
  const int row = static_cast<int>(threadIdx.x) % kTurnedRows, slot = static_cast<int>(threadIdx.x) / kTurnedRows;
  const int piece = slot % kPieces, known = row < rows && piece < kHeadPieces;
  const PieceAngles angles(p, known ? first + row : 0, known ? piece : 0);
  __syncthreads();
  unsigned char* to = p.out + (static_cast<int64_t>(part) * p.heads * p.blocks + (first + row) / 8) * kBlockBytes +
                      piece * 128 + row % 8 * 16;
  for (int head = slot / kPieces; head < p.heads; head += kTurnHeads) {
    const unsigned char* own = turn_raw + row * pitch + head * kHeadDim * 2;
    uint4 v = make_uint4(piece == kHeadPieces && part == 2 ? 0x3f80 : 0, 0, 0, 0);
    if (known) v = part < 2 ? angles.turned(own, piece) : *reinterpret_cast<const uint4*>(own + piece * 16);
    *reinterpret_cast<uint4*>(to + static_cast<int64_t>(head) * p.blocks * kBlockBytes) = v;
  }
}

// `blocks` is even: 16 patches are a CTA's.
inline cudaError_t launch_image_heads(const ImageHeadsArgs& p, cudaStream_t stream) {
  const int bytes = kTurnedRows * (p.heads * kHeadPieces + 1) * 16;
  const auto kernel = image_heads_kernel;
  const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (e != cudaSuccess) return e;
  kernel<<<p.blocks * 8 / kTurnedRows * 3, kTurnThreads, bytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace lora_jax
