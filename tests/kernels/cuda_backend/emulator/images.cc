// Host entry point of the emulated attention between patches, over plain arrays.
#include "image_attention/image_attention.cuh"

#include "driver.cuh"

extern "C" {

int image_attention(const Bf16* q, const Bf16* k, const Bf16* v, Bf16* out, int patches, int heads, int num_patches,
                    float scale) {
  ImageAttentionArgs args{};
  args.out = out, args.num_patches = &num_patches, args.patches = patches, args.heads = heads;
  args.scale_log2 = scale * 1.4426950408889634f;
  return launch_image_attention(args, q, k, v, nullptr);
}

}  // extern "C"
