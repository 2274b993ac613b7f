// Host side of the tile kernels, for one translation unit. Nothing here allocates or waits.
#pragma once
#include "launch_early.cuh"
#include "row_tiles.cuh"

namespace lora_jax {

inline cudaError_t count_sms(int* sms) {
  int device = 0;
  const cudaError_t e = cudaGetDevice(&device);
  return e == cudaSuccess ? cudaDeviceGetAttribute(sms, cudaDevAttrMultiProcessorCount, device) : e;
}

inline cudaError_t launch_row_tiles(RowTilesArgs args, cudaStream_t stream) {
  int sms = 0;
  cudaError_t e = count_sms(&sms);
  const int bytes = static_cast<int>(sizeof(RowTilesShared)) + args.rows * 4;
  if (e == cudaSuccess) e = cudaFuncSetAttribute(row_tiles_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (e != cudaSuccess) return e;
  args.clusters = max(sms / kCluster, 1);
  row_tiles_kernel<<<1, kScanThreads, bytes, stream>>>(args);
  return cudaGetLastError();
}

template <int BLOCKS, int STAGES>
cudaError_t launch_shrink_tiles(const TileArgs& args, int sms, cudaStream_t stream) {
  constexpr int bytes = sizeof(ShrinkShared<BLOCKS, STAGES>);
  static_assert(bytes <= 227 * 1024, "a CTA must fit an SM");
  const auto kernel = shrink_tiles_kernel<BLOCKS, STAGES>;
  const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (e != cudaSuccess) return e;
  const int ctas = (sms + kCluster - 1) / kCluster * kCluster;
  kernel<<<ctas, kShrinkThreads, bytes, stream>>>(args);
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
  if (args.max_rank <= 32) return launch_expand_tiles<2, 4, 2>(args, sms, stream);
  if (args.max_rank <= 64) return launch_expand_tiles<4, 6, 1>(args, sms, stream);
  return launch_expand_tiles<8, 4, 1>(args, sms, stream);
}

cudaError_t launch_tiles(TileArgs args, bool shrink, bool expand, cudaStream_t stream) {
  int sms = 0;
  cudaError_t e = count_sms(&sms);
  if (e == cudaSuccess && shrink) e = launch_shrink_tiles<2, 4>(args, sms, stream);
  args.behind = shrink;
  if (e == cudaSuccess && expand) e = launch_expand_tiles(args, sms, stream);
  return e;
}

}  // namespace lora_jax
