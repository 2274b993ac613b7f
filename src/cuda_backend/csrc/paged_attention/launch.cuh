// Host side of paged attention: tensor maps, the ring's size, launches.
#pragma once
#include <algorithm>

#include "paged_attention/coded.cuh"
#include "paged_attention/heads.cuh"
#include "paged_attention/latents.cuh"
#include "paged_attention/prompts.cuh"
#include "device/launch_early.cuh"
#include "device/swizzled_map.cuh"

namespace lora_jax {

constexpr int kSharedBytes = 232448;  // that a CTA of Hopper can have

// Views pages [pages, page_size, heads, dim] as [page, head, dim / 64, place, 64]: a box is 16 places
// of `box_heads` heads and `box_blocks` of the blocks of 64 columns, each 128-byte piece swizzled by its
// place.
inline cudaError_t page_map(CUtensorMap* map, const void* pages, int64_t num_pages, int64_t page_size, int64_t heads,
                            int64_t dim, int64_t box_heads, int64_t box_blocks) {
  const cuuint64_t dims[] = {64, static_cast<cuuint64_t>(page_size), static_cast<cuuint64_t>(dim / 64),
                             static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(num_pages)};
  const cuuint64_t row = static_cast<cuuint64_t>(dim) * 2;
  const cuuint64_t strides[] = {heads * row, 128, row, page_size * heads * row};
  const cuuint32_t box[] = {64, kBox, static_cast<cuuint32_t>(box_blocks), static_cast<cuuint32_t>(box_heads), 1};
  return swizzled_map<5>(map, pages, dims, strides, box);
}

inline cudaError_t launch_attention_units(const AttentionUnitsArgs& args, cudaStream_t stream) {
  attention_units_kernel<<<1, kScanThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

// `scratch`: bytes of shared memory that consumers need besides the ring.
template <class Consumer>
cudaError_t launch_consumers(AttentionArgs& args, int consumers, int scratch, cudaStream_t stream) {
  constexpr int slot_boxes = Consumer::kSlotBoxes;
  const bool coded = args.k_rows != nullptr;
  auto kernel = attention_kernel<Consumer>;
  if constexpr (Consumer::kCoders > 0) kernel = coded ? coded_attention_kernel<Consumer> : kernel;
  else if (coded) return cudaErrorInvalidValue;
  const int slot = slot_boxes * (args.k_bytes + args.v_bytes), threads = coded ? coded_threads(Consumer::kCoders) : kAttentionThreads;
  const int space = kSharedBytes - kAttentionHeader - scratch, room = space / slot;
  constexpr int least = (Consumer::kStep + slot_boxes + slot_boxes - 1) / slot_boxes;  // what is worked on, and a slot on its way
  const bool raw_pages = coded && slot_boxes > 1;  // see coded_words.cuh
  args.slot_boxes = slot_boxes, args.slots = raw_pages ? least : room < kMostSlots ? room : kMostSlots;
  const int raw = raw_pages ? (args.cta_heads * (args.k_dim + kCodedTail)) * (args.v_bytes ? 2 : 1) * kBox : 0;
  args.raw_from = scratch, args.raw_boxes = raw_pages ? std::min(kMostRaw, (space - least * slot) / raw) : 0;
  if (room < least || (raw_pages && args.raw_boxes < 2) || consumers > kMostConsumers) return cudaErrorInvalidValue;
  const int shared = kAttentionHeader + args.slots * slot + scratch + args.raw_boxes * raw;
  cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  int sms = 0;
  if (e == cudaSuccess) e = count_sms(&sms);
  if (e != cudaSuccess) return e;
  kernel<<<sms, threads, shared, stream>>>(args, consumers);
  return cudaGetLastError();
}

template <int KT, int NT>
cudaError_t launch_heads(AttentionArgs& args, cudaStream_t stream) {
  using Prompts = PromptConsumer<KT, NT>;
  using Whole = HeadConsumer<KT, NT, true>;
  using Cut = HeadConsumer<KT, NT, false>;
  const int consumers = args.cta_heads * args.token_groups;
  if (args.many) return launch_consumers<Prompts>(args, consumers, Prompts::kScratch, stream);
  const bool whole = args.part_rows < args.tokens;  // units of several chunks, see may_cut
  return whole ? launch_consumers<Whole>(args, consumers, Whole::kScratch, stream)
               : launch_consumers<Cut>(args, consumers, Cut::kScratch, stream);
}
template <int M>
cudaError_t launch_latent(AttentionArgs& args, cudaStream_t stream) {
  return launch_consumers<LatentConsumer<M>>(args, kMostConsumers, sizeof(LatentShared<M>), stream);
}

// `T`: of the results.
template <class T>
cudaError_t launch_combine(const AttentionArgs& args, cudaStream_t stream) {
  if (args.max_chunks == 1) return cudaSuccess;
  const int64_t warps = static_cast<int64_t>(args.part_rows) * args.q_heads *
                        ((args.v_dim + kCombineColumns - 1) / kCombineColumns);
  const int blocks = static_cast<int>((warps * 32 + kCombineThreads - 1) / kCombineThreads);
  const auto kernel = args.max_chunks > 8 ? combine_kernel<16, T> : combine_kernel<8, T>;
  return launch_early(kernel, blocks, kCombineThreads, 0, stream, args);
}

// Fills in what follows from the sizes, and launches; cudaErrorInvalidValue for sizes that the caller
// should not have let through. Needs cta_heads and token_groups. The parts are not put together yet.
inline cudaError_t launch_attention(AttentionArgs& args, bool latent, cudaStream_t stream) {
  args.head_groups = args.kv_heads / args.cta_heads;
  args.k_bytes = args.cta_heads * args.k_dim * kBox * 2;
  args.v_bytes = latent ? 0 : args.cta_heads * args.v_dim * kBox * 2;
  cudaError_t e = cudaErrorInvalidValue;
  if (!latent && args.k_dim == 128 && args.v_dim == 128) e = launch_heads<8, 16>(args, stream);
  if (!latent && args.k_dim == 64 && args.v_dim == 64) e = launch_heads<4, 8>(args, stream);
  if (latent && args.k_dim == kLatentTiles * 64 && args.kv_heads == 1 && args.v_dim % 64 == 0 && args.v_dim <= 512) {
    e = args.token_groups == 1 ? launch_latent<1>(args, stream) : launch_latent<2>(args, stream);
  }
  return e;
}

// The attention of bfloat16 pages: of units of few neighbours or of all, and `with_prompts` of units of many
// after them. `v_pages` null: latents.
inline cudaError_t launch_paged(AttentionArgs args, const void* k_pages, const void* v_pages, int64_t num_pages,
                                bool with_prompts, cudaStream_t stream) {
  const auto launch = [&](AttentionArgs& a) {
    const int64_t key_blocks = a.many ? 1 : a.k_dim / 64;  // of a box
    cudaError_t e = page_map(&a.k_map, k_pages, num_pages, a.page_size, a.kv_heads, a.k_dim, a.cta_heads, key_blocks);
    if (e == cudaSuccess && v_pages)
      e = page_map(&a.v_map, v_pages, num_pages, a.page_size, a.kv_heads, a.v_dim, a.cta_heads, a.v_dim / 64);
    return e == cudaSuccess ? launch_attention(a, v_pages == nullptr, stream) : e;
  };
  cudaError_t e = launch(args);
  if (e == cudaSuccess && with_prompts) {
    AttentionArgs prompts = args;
    prompts.many = true, prompts.cta_heads = 1, prompts.token_groups = kMostConsumers;
    e = launch(prompts);
  }
  return e == cudaSuccess ? launch_combine<__nv_bfloat16>(args, stream) : e;
}

}  // namespace lora_jax
