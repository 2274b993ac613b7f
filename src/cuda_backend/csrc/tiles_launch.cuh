// Host side of the tile kernels, for one translation unit. Nothing here allocates or waits.
#pragma once
#include "expand_tiles.cuh"
#include "launch_early.cuh"
#include "pair_tiles.cuh"
#include "row_tiles.cuh"

namespace lora_jax {

inline cudaError_t count_sms(int* sms) {
  int device = 0;
  const cudaError_t e = cudaGetDevice(&device);
  return e == cudaSuccess ? cudaDeviceGetAttribute(sms, cudaDevAttrMultiProcessorCount, device) : e;
}

using ShrinkMemory = ShrinkShared<2, 4>;
constexpr auto kShrinkKernel = shrink_tiles_kernel<ShrinkMemory>;
static_assert(sizeof(ShrinkMemory) <= 227 * 1024, "a CTA must fit an SM");

inline cudaError_t allow_shrink_memory() {
  return cudaFuncSetAttribute(kShrinkKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(ShrinkMemory));
}
inline int shrink_ctas(int sms) { return max(sms / kCluster, 1) * kCluster; }

inline cudaError_t launch_row_tiles(RowTilesArgs args, cudaStream_t stream) {
  int sms = 0;
  cudaError_t e = count_sms(&sms);
  if (e == cudaSuccess) e = allow_shrink_memory();
  if (e == cudaSuccess) e = count_clusters(&args.clusters, kShrinkKernel, shrink_ctas(sms), kShrinkThreads, sizeof(ShrinkMemory));
  const int bytes = static_cast<int>(sizeof(RowTilesShared)) + args.rows * 4;
  if (e == cudaSuccess) e = cudaFuncSetAttribute(row_tiles_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (e != cudaSuccess) return e;
  row_tiles_kernel<<<1, kScanThreads, bytes, stream>>>(args);
  return cudaGetLastError();
}

inline cudaError_t launch_shrink_tiles(const TileArgs& args, int sms, cudaStream_t stream) {
  const cudaError_t e = allow_shrink_memory();
  if (e != cudaSuccess) return e;
  kShrinkKernel<<<shrink_ctas(sms), kShrinkThreads, sizeof(ShrinkMemory), stream>>>(args);
  return cudaGetLastError();
}

template <int STEPS, int AHEAD, int CTAS>
cudaError_t launch_expand_tiles(const TileArgs& args, int sms, cudaStream_t stream) {
  constexpr int bytes = sizeof(ExpandShared<STEPS>);
  const auto kernel = expand_tiles_kernel<STEPS, AHEAD, CTAS>;
  const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (e != cudaSuccess) return e;
  if (args.behind) return launch_early(kernel, sms * CTAS, kTileThreads, bytes, stream, args);
  kernel<<<sms * CTAS, kTileThreads, bytes, stream>>>(args);
  return cudaGetLastError();
}

inline cudaError_t launch_expand_tiles(const TileArgs& args, int sms, cudaStream_t stream) {
  if (args.max_rank <= 32) return launch_expand_tiles<2, 3, 2>(args, sms, stream);
  if (args.max_rank <= 64) return launch_expand_tiles<4, 2, 2>(args, sms, stream);
  return launch_expand_tiles<8, 6, 1>(args, sms, stream);
}

template <int STEPS, int AHEAD, int STAGES>
cudaError_t launch_pair_tiles(const TileArgs& args, int sms, cudaStream_t stream) {
  constexpr int bytes = sizeof(PairTilesShared<STEPS, STAGES>);
  static_assert(bytes <= 227 * 1024, "a CTA must fit an SM");
  const auto kernel = pair_tiles_kernel<STEPS, AHEAD, STAGES>;
  const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (e != cudaSuccess) return e;
  const int ctas = shrink_ctas(sms);
  kernel<<<ctas, kPairThreads, bytes, stream>>>(args);
  return cudaGetLastError();
}

inline cudaError_t launch_pair_tiles(const TileArgs& args, int sms, cudaStream_t stream) {
  if (args.max_rank <= 32) return launch_pair_tiles<2, 6, 4>(args, sms, stream);
  if (args.max_rank <= 64) return launch_pair_tiles<4, 6, 4>(args, sms, stream);
  return launch_pair_tiles<8, 3, 3>(args, sms, stream);
}

cudaError_t launch_tiles(TileArgs args, bool shrink, bool expand, cudaStream_t stream) {
  int sms = 0;
  cudaError_t e = count_sms(&sms);
  if (shrink && expand) return args.behind = false, e == cudaSuccess ? launch_pair_tiles(args, sms, stream) : e;
  args.behind = shrink;
  if (e == cudaSuccess && shrink) e = launch_shrink_tiles(args, sms, stream);
  if (e == cudaSuccess && expand) e = launch_expand_tiles(args, sms, stream);
  return e;
}

}  // namespace lora_jax
