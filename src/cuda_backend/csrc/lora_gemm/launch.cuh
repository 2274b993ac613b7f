// Host side of the LoRA kernels: tensor maps and launches. Nothing here allocates or waits, so all of
// it may run while a stream is being captured.
#pragma once
#include "device/launch_early.cuh"
#include "lora_gemm/cluster_launch.cuh"
#include "lora_gemm/decode.cuh"
#include "adapter_items/row_metadata.cuh"
#include "device/swizzled_map.cuh"
#include "lora_gemm/prefill_args.cuh"

namespace lora_jax {

// Views a pool [rows, width] as [width / 64, rows, 64]: a box of [1 << wide, 8, 64] is 8 rank rows x
// 64 << wide columns in one copy, each 128-byte piece swizzled. Copies cover whole lines: fetching more
// of memory than they ask for takes 4 % of its bandwidth (67.8 us against 65.0 for 277 MB on an H200).
inline cudaError_t pool_map(CUtensorMap* map, const void* pool, int64_t rows, int64_t width, int wide) {
  const cuuint64_t dims[] = {64, static_cast<cuuint64_t>(rows), static_cast<cuuint64_t>(width / 64)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(width) * 2, 128};
  const cuuint32_t box[] = {64, 8, 1u << wide};
  return swizzled_map<3>(map, pool, dims, strides, box, CU_TENSOR_MAP_L2_PROMOTION_NONE);
}
// Sets the maps of pool A (0) or B (1). Each copy costs its warp about a hundred cycles, so boxes are
// as wide as stages allow; what a box reads past the end of a unit of B is lost.
inline cudaError_t pool_maps(PairArgs* args, int which, const void* pool, int64_t rows, int64_t width, int wide) {
  args->wide[which] = wide, args->pools[which] = static_cast<const __nv_bfloat16*>(pool);
  const cudaError_t e = pool_map(&args->maps[which][0], pool, rows, width, kNarrow);
  return e == cudaSuccess ? pool_map(&args->maps[which][1], pool, rows, width, wide) : e;
}

inline cudaError_t launch_metadata(const MetadataArgs& args, cudaStream_t stream) {
  constexpr int bytes = sizeof(MetadataShared);
  cudaError_t e = cudaFuncSetAttribute(metadata_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (e != cudaSuccess) return e;
  metadata_kernel<<<1, kScanThreads, bytes, stream>>>(args);
  return cudaGetLastError();
}

// Launches a kernel of items whose shared memory is an S.
template <class S>
cudaError_t launch_items(void (*kernel)(PairArgs), const PairArgs& args, cudaStream_t stream) {
  static_assert(sizeof(S) <= 113 * 1024, "two CTAs must fit an SM");
  cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(S));
  int sms = 0;
  if (e == cudaSuccess) e = count_sms(&sms);
  if (e != cudaSuccess) return e;
  kernel<<<sms * 2, kThreads, sizeof(S), stream>>>(args);
  return cudaGetLastError();
}
template <int NS, int STAGE, int RANKS>
cudaError_t launch_many(const PairArgs& args, cudaStream_t stream) {
  return launch_items<Shared<NS, STAGE, RANKS>>(pair_kernel<NS, STAGE, RANKS>, args, stream);
}
template <int NS, int STAGE, int RANKS>
cudaError_t launch_few(const PairArgs& given, cudaStream_t stream) {
  const PairArgs args = with_widths(given);
  if (!args.shrink) return launch_items<FewShared<NS, STAGE, RANKS>>(few_kernel<NS, STAGE, RANKS>, args, stream);
  return launch_clusters<FewShared<NS, STAGE, RANKS>>(few_kernel<NS, STAGE, RANKS>, args, stream);
}
template <int NS, int STAGE, int RANKS>
cudaError_t launch_few_shrink(const PairArgs& args, cudaStream_t stream) {
  return launch_clusters<FewShrinkShared<NS, STAGE, RANKS>>(few_shrink_kernel<NS, STAGE, RANKS>, args, stream);
}
// Whether adapters are so few that the rows of any batch may be shrunk at once and expanded by groups.
inline bool are_few_slots(const PairArgs& args) {
  int sms = 0;
  if (count_sms(&sms) != cudaSuccess) return false;
  const int blocks = args.d_out / kGroupColumns * args.num_modules;
  return args.shrink && always_at_once(args) && args.num_slots * blocks <= kMostOfCta * sms * 2;
}
// Whether few_kernel is the faster one, by what was timed on an H200: not of a shrink alone, and of both
// phases not where CTAs would have so much to do that drawing it pays.
inline bool are_few(const PairArgs& args) {
  if (!args.small_items || args.num_rows > kFewRows || args.live || !args.expand) return false;
  if (are_few_slots(args)) return true;
  const int64_t most = int64_t{1} * args.num_rows * args.num_modules * args.max_rank * (args.d_in + args.d_out);
  return args.num_rows <= kFewRowsOfMany && (!args.shrink || most <= int64_t{1} << 25 || (args.num_modules == 1 && args.num_rows <= 64));
}

// Stages are as large as two CTAs on an SM leave room for.
inline cudaError_t launch_pair(const PairArgs& args, cudaStream_t stream) {
  if (args.max_rank > 64) return launch_many<2, 56320, 128>(args, stream);
  if (args.num_rows <= kFewRowsOfMany && !args.live && !args.expand) return launch_few_shrink<3, 35840, 64>(args, stream);
  if (are_few(args)) return launch_few<3, 34816, 64>(args, stream);
  // All of a unit is on its way at once: 11.0 us for 11.9 (1024 rows of 194 adapters, Zipf, on an H200).
  if (args.max_rank <= 8 && !args.expand) return launch_many<5, 21504, 32>(args, stream);
  return args.max_rank > 32 ? launch_many<3, 35840, 64>(args, stream) : launch_many<3, 36864, 32>(args, stream);
}

// What the items hold and what the tiles hold, whose rows differ. Where their expand is one kernel, the tiles' rows
// have been shrunk before it. `tiles_last`: where there may well be none, they come behind the items, who then wait for
// nothing: a pair of 1024 rows of 512 adapters of rank 64, Zipf, on an H200 takes 1.8 us more than without the
// question, of one adapter 33.2 us, by items 41.1.
inline cudaError_t launch_with_tiles(const PairArgs& items, const TileArgs& tiles, bool tiles_last,
                                     cudaStream_t stream) {
  const BothArgs both{items, tiles};
  if (!items.expand) return launch_shrinks(both, stream);
  const bool low = items.max_rank <= kMostRankOfBoth;
  if (low && !(items.shrink && tiles_last)) return launch_both(both, stream);
  const cudaError_t e = launch_pair(items, stream);
  if (e != cudaSuccess) return e;
  return low ? launch_pair_tiles(tiles, items.state, stream) : launch_tiles(tiles, stream);
}

}  // namespace lora_jax
