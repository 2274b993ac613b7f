// Host entry points of the emulated kernels of a tower, over plain arrays; what csrc/*.cu does for XLA.
#include <vector>

#include "dense_matmul/dense_matmul.cuh"
#include "image_attention/image_attention.cuh"

#include "driver.cuh"

extern "C" {

int turned_attention(const Bf16* qkv, const float* cos, const float* sin, Bf16* out, int patches, int heads,
                     int num_patches, float scale) {
  const int blocks = image_blocks(patches);
  std::vector<uint4> laid(3 * heads * blocks * kBlockBytes / 16, uint4{~0u, ~0u, ~0u, ~0u});
  auto* bytes = reinterpret_cast<unsigned char*>(laid.data());
  const ImageHeadsArgs turn{qkv, cos, sin, &num_patches, bytes, patches, heads, blocks};
  if (const cudaError_t e = launch_image_heads(turn, nullptr)) return e;
  const ImageAttentionArgs args{bytes, out, &num_patches, patches, heads, blocks, scale * 1.4426950408889634f};
  return launch_image_attention(args, nullptr);
}

int dense_matmul(const Bf16* x, const Bf16* w, const Bf16* bias, const Bf16* addend, const int* sizes, Bf16* y) {
  DenseArgs args{};
  args.bias = bias, args.addend = addend, args.num_rows = sizes + 3, args.y = y;
  args.rows = sizes[0], args.d_out = sizes[1], args.d_in = sizes[2];
  return launch_dense_matmul(args, x, w, sizes[4] != 0, nullptr);
}

}  // extern "C"
