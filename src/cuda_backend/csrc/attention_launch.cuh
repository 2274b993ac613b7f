// Host side of paged attention: tensor maps, sizes of the stages, launches.
#pragma once
#include "paged_attention.cuh"
#include "swizzled_map.cuh"

namespace lora_jax {

constexpr int kSharedBytes = 232448;  // that a CTA of Hopper can have

// Views pages [pages, page_size, heads, dim] as [page, head, dim / 64, place, 64]: a box is 16 places
// of `box_heads` heads, each 128-byte piece swizzled by its place.
inline cudaError_t page_map(CUtensorMap* map, const void* pages, int64_t num_pages, int64_t page_size, int64_t heads,
                            int64_t dim, int64_t box_heads) {
  const cuuint64_t dims[] = {64, static_cast<cuuint64_t>(page_size), static_cast<cuuint64_t>(dim / 64),
                             static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(num_pages)};
  const cuuint64_t row = static_cast<cuuint64_t>(dim) * 2;
  const cuuint64_t strides[] = {heads * row, 128, row, page_size * heads * row};
  const cuuint32_t box[] = {64, kTile, static_cast<cuuint32_t>(dim / 64), static_cast<cuuint32_t>(box_heads), 1};
  return swizzled_map<5>(map, pages, dims, strides, box);
}

inline cudaError_t launch_attention_units(const AttentionUnitsArgs& args, cudaStream_t stream) {
  attention_units_kernel<<<1, kScanThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

template <int NT>
cudaError_t launch_attention_columns(const AttentionArgs& args, int threads, int shared, cudaStream_t stream) {
  const auto kernel = attention_kernel<NT>;
  cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  int device = 0, sms = 0;
  if (e == cudaSuccess) e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  if (e != cudaSuccess) return e;
  kernel<<<sms, threads, shared, stream>>>(args);
  return cudaGetLastError();
}

// Fills in what follows from the sizes, and launches; cudaErrorInvalidValue for sizes that the caller
// should not have let through. Needs cta_heads and token_groups.
inline cudaError_t launch_attention(AttentionArgs& args, cudaStream_t stream) {
  args.slices = (args.v_dim + 127) / 128, args.head_groups = args.kv_heads / args.cta_heads;
  args.k_bytes = args.cta_heads * args.k_dim * kTile * 2;
  args.v_bytes = args.latent ? 0 : args.cta_heads * args.v_dim * kTile * 2;
  const int consumers = args.cta_heads * args.slices * args.token_groups, stage = args.k_bytes + args.v_bytes;
  const int queries = args.token_groups * args.cta_heads * 16 * q_stride(args.k_dim);
  const int room = (kSharedBytes - kAttentionHeader - queries) / stage;
  args.stages = room < kMostStages ? room : kMostStages;
  if (args.stages < 2 || consumers > kMostConsumers) return cudaErrorInvalidValue;
  const int shared = kAttentionHeader + args.stages * stage + queries, threads = (consumers + 1) * 32;
  const cudaError_t e = args.v_dim == 64 ? launch_attention_columns<8>(args, threads, shared, stream)
                                         : launch_attention_columns<16>(args, threads, shared, stream);
  if (e != cudaSuccess) return e;
  combine_kernel<<<args.tokens, 256, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace lora_jax
