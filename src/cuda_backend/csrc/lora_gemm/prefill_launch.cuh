// Host side of the tile kernels, for one translation unit. Nothing here allocates or waits.
#pragma once
#include "device/launch_early.cuh"
#include "lora_gemm/prefill_gated.cuh"
#include "lora_gemm/prefill_with_items.cuh"
#include "lora_gemm/shrink.cuh"
#include "lora_gemm/prefill_shrink.cuh"
#include "lora_gemm/prefill_pair.cuh"
#include "lora_gemm/prefill_tiles.cuh"
#include "device/swizzled_map.cuh"

namespace lora_jax {

inline int cluster_ctas(int sms) { return max(sms * 2 / kCluster, 1) * kCluster; }  // two on an SM

inline cudaError_t launch_row_tiles(RowTilesArgs args, cudaStream_t stream) {
  int sms = 0;
  cudaError_t e = count_sms(&sms);
  constexpr auto shrink = shrink_tiles_kernel<kMostRankOfPass>;
  constexpr int more_than_half = kShrinkBytes + 4096;  // of an SM's
  if (e == cudaSuccess) e = cudaFuncSetAttribute(shrink, cudaFuncAttributeMaxDynamicSharedMemorySize, more_than_half);
  if (e == cudaSuccess) e = count_clusters(&args.clusters, shrink, kCluster, cluster_ctas(sms), kShrinkThreads, kShrinkBytes);
  if (e == cudaSuccess) e = count_clusters(&args.apart, shrink, kCluster, cluster_ctas(sms), kShrinkThreads, more_than_half);
  const int bytes = static_cast<int>(sizeof(RowTilesShared)) + args.rows * 4;
  if (e == cudaSuccess) e = cudaFuncSetAttribute(row_tiles_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (e != cudaSuccess) return e;
  row_tiles_kernel<<<1, kScanThreads, bytes, stream>>>(args);
  return cudaGetLastError();
}

// Views h of all modules as rows: a box is 64 ranks of a unit's. Past its end there are zeros.
inline cudaError_t h_map(TileArgs* args) {
  const cuuint64_t rows = static_cast<cuuint64_t>(args->num_modules) * args->num_rows, bytes = args->h_stride * 2;
  const cuuint64_t dims[] = {static_cast<cuuint64_t>(args->h_stride), rows, 1, 1};
  const cuuint64_t strides[] = {bytes, bytes * rows, bytes * rows};
  const cuuint32_t box[] = {64, kUnitRows, 1, 1};
  return swizzled_map<4>(&args->h_rows, args->h, dims, strides, box, CU_TENSOR_MAP_L2_PROMOTION_NONE);
}

// Views each y as [pieces of 64 columns][row][64]: a box is a unit whose rows are neighbours.
inline cudaError_t y_maps(TileArgs* args) {
  const cuuint64_t dims[] = {64, static_cast<cuuint64_t>(args->num_rows), static_cast<cuuint64_t>(args->d_out / 64)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(args->d_out) * 2, 128};
  const cuuint32_t box[] = {64, kUnitRows, kPieces};
  cudaError_t e = cudaSuccess;
  for (int m = 0; m < args->num_modules && e == cudaSuccess; ++m)
    e = swizzled_map<3>(&args->y_boxes[m], args->modules[m].y, dims, strides, box, CU_TENSOR_MAP_L2_PROMOTION_NONE);
  return e;
}
inline cudaError_t expand_maps(TileArgs* args) {
  const cudaError_t e = h_map(args);
  return e == cudaSuccess && args->accumulate ? y_maps(args) : e;
}

template <int STEPS, int STAGES>
cudaError_t launch_expand_tiles(const TileArgs& args, int sms, cudaStream_t stream) {
  constexpr int bytes = sizeof(ExpandShared<STEPS, STAGES>);
  const auto kernel = expand_tiles_kernel<STEPS, STAGES>;
  const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  return e == cudaSuccess ? launch_early(kernel, sms, kTileThreads, bytes, stream, args) : e;
}

// Of kCluster CTAs each, early or not: see launch_early.
template <class Args>
cudaError_t launch_clusters(void (*kernel)(Args), int ctas, int threads, int shared, cudaStream_t stream, const Args& args,
                            bool early) {
  cudaLaunchAttribute attributes[3];
  unsigned count = cluster_attributes(attributes, kCluster);
  if (early) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  const cudaLaunchConfig_t config{dim3(ctas), dim3(threads), static_cast<size_t>(shared), stream, attributes, count};
  return cudaLaunchKernelEx(&config, kernel, args);
}

template <int RANKS>
cudaError_t launch_shrink_tiles(const TileArgs& args, int sms, cudaStream_t stream, bool early) {
  const auto kernel = shrink_tiles_kernel<RANKS>;
  const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShrinkBytes);
  return e == cudaSuccess ? launch_clusters(kernel, cluster_ctas(sms), kShrinkThreads, kShrinkBytes, stream, args, early) : e;
}

inline cudaError_t launch_shrink_tiles(const TileArgs& args, int sms, cudaStream_t stream, bool early) {
  return args.max_rank <= 32 ? launch_shrink_tiles<32>(args, sms, stream, early)
                             : launch_shrink_tiles<kMostRankOfPass>(args, sms, stream, early);
}

cudaError_t launch_tiles(TileArgs args, cudaStream_t stream) {
  int sms = 0;
  cudaError_t e = count_sms(&sms);
  if (e == cudaSuccess && args.shrink) e = launch_shrink_tiles(args, sms, stream, true);
  if (e == cudaSuccess && args.expand) e = expand_maps(&args);
  if (e == cudaSuccess && args.expand) e = launch_expand_tiles<8, 8>(args, sms, stream);
  return e;
}

cudaError_t launch_pair_tiles(TileArgs args, CallState* state, cudaStream_t stream) {
  const auto kernel = pair_tiles_kernel<kMostRankOfBoth, 6>;
  int sms = 0;
  cudaError_t e = count_sms(&sms);
  args.shrunk = &state->shrunk;
  if (e == cudaSuccess) e = expand_maps(&args);
  if (e == cudaSuccess) e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShrinkBytes);
  return e == cudaSuccess ? launch_clusters(kernel, cluster_ctas(sms), kTileThreads, kShrinkBytes, stream, args, true) : e;
}

cudaError_t launch_both(BothArgs args, cudaStream_t stream) {
  using S = Shared<3, 35840, kMostRankOfBoth>;
  const auto kernel = both_kernel<3, 35840, kMostRankOfBoth, 6>;
  int sms = 0;
  cudaError_t e = count_sms(&sms);
  if (e == cudaSuccess && args.tiles.shrink) e = launch_shrink_tiles(args.tiles, sms, stream, false);
  if (e == cudaSuccess) e = expand_maps(&args.tiles);
  if (e == cudaSuccess) e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(S));
  if (e != cudaSuccess) return e;
  if (args.tiles.shrink) return launch_early(kernel, sms * 2, kThreads, sizeof(S), stream, args);
  kernel<<<sms * 2, kThreads, sizeof(S), stream>>>(args);
  return cudaGetLastError();
}

template <int NS, int STAGE, int RANKS>
cudaError_t launch_shrinks(const BothArgs& args, cudaStream_t stream) {
  const auto kernel = shrink_kernel<NS, STAGE, RANKS>;
  int sms = 0;
  cudaError_t e = count_sms(&sms);
  if (e == cudaSuccess) e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShrinkBytes);
  return e == cudaSuccess ? launch_clusters(kernel, cluster_ctas(sms), kThreads, kShrinkBytes, stream, args, false) : e;
}
cudaError_t launch_shrinks(const BothArgs& args, cudaStream_t stream) {
  return args.items.max_rank <= 64 ? launch_shrinks<3, 35840, 64>(args, stream)
                                   : launch_shrinks<2, 56320, kMaxRank>(args, stream);
}

// Views a pool [rows, width] as [part][step of 128 columns][row][32]: a box is one part of `groups` x 8 rank rows.
// Where the last step is a half one, it has no parts 2 and 3, and `steps` must leave it out for them.
inline cudaError_t parts_map(CUtensorMap* map, const void* pool, int64_t rows, int64_t width, int64_t steps, int groups) {
  const cuuint64_t dims[] = {32, static_cast<cuuint64_t>(rows), static_cast<cuuint64_t>(max(steps, int64_t{1})), 4};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(width) * 2, 256, 64};
  const cuuint32_t box[] = {32, static_cast<cuuint32_t>(groups * 8), kBoxSteps, 1};
  return swizzled_map<4>(map, pool, dims, strides, box, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_SWIZZLE_NONE);
}
cudaError_t parts_maps(CUtensorMap (&maps)[2][2], const void* pool, int64_t rows, int64_t width) {
  cudaError_t e = cudaSuccess;
  for (int i = 0; i < 4 && e == cudaSuccess; ++i)
    e = parts_map(&maps[i / 2][i % 2], pool, rows, width, (i < 2 ? width + 127 : width) / 128, i % 2 ? kTallBox : 1);
  return e;
}

}  // namespace lora_jax
