// Values that the host writes while the device computes the layers before their use. The device waits until the
// host has posted them, and copies them from host memory. Values that come too late are not copied; the board's
// header then says so.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "device/ptx.cuh"

namespace lora_jax {

constexpr int kBoardThreads = 256, kBoardCtas = 1024;
constexpr int kBoardHeader = 64;    // bytes: the number of the newest values, then those of late ones
constexpr int kBoardLatePlaces = 7;  // number n is told at place n % 7: few steps are out at a time
constexpr uint64_t kBoardAny = ~0ull;  // as the newest number: nobody is to wait any more
constexpr uint64_t kBoardPatience = 20'000'000'000;  // ns
constexpr int kBoardNothing = -1;  // each value that nobody asked for, or that came late
enum BoardState { kBoardAbsent, kBoardThere };

struct BoardArgs {
  const uint32_t* where;  // low and high half of the address in the host's memory
  const int* number;      // of the values that are waited for; 0: none are
  int* values;
  int* state;  // a BoardState
  int64_t count;
};

__device__ __forceinline__ unsigned char* board_of(const BoardArgs& p) {
  return reinterpret_cast<unsigned char*>(static_cast<uint64_t>(p.where[1]) << 32 | p.where[0]);
}

__global__ void __launch_bounds__(32) board_wait_kernel(const BoardArgs p) {
  if (threadIdx.x) return;
  const uint64_t want = static_cast<uint32_t>(*p.number), start = now_nanos();
  BoardState state = kBoardAbsent;
  if (want) {
    uint64_t* header = reinterpret_cast<uint64_t*>(board_of(p));
    state = kBoardThere;
    for (uint64_t newest; (newest = poll_acquire_sys(header)) != want && newest != kBoardAny;)
      if (now_nanos() - start > kBoardPatience) {
        store_release_sys(header + 1 + want % kBoardLatePlaces, want);
        state = kBoardAbsent;
        break;
      }
  }
  *p.state = state;
}

__global__ void __launch_bounds__(kBoardThreads) board_copy_kernel(const BoardArgs p) {
  const bool is_there = *p.state == kBoardThere;
  const int* from = reinterpret_cast<const int*>(board_of(p) + kBoardHeader);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kBoardThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kBoardThreads + threadIdx.x; i < p.count; i += stride)
    p.values[i] = is_there ? __ldcv(from + i) : kBoardNothing;
}

inline cudaError_t launch_board(const BoardArgs& args, cudaStream_t stream) {
  board_wait_kernel<<<1, 32, 0, stream>>>(args);
  const int64_t ctas = (args.count + kBoardThreads - 1) / kBoardThreads;
  board_copy_kernel<<<static_cast<int>(ctas < kBoardCtas ? ctas : kBoardCtas), kBoardThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace lora_jax
