// Numbers that the host writes while the device computes what comes before them: the device waits until
// the host has said that they are there, and copies them out of the host's memory.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "device/ptx.cuh"

namespace lora_jax {

constexpr int kBoardThreads = 256, kBoardCtas = 1024;
constexpr int kBoardHeader = 64;  // bytes: the number of the newest values, then nothing
constexpr uint64_t kBoardPatience = 20'000'000'000;  // ns; a host that writes so late has a fault
enum BoardState { kBoardUnasked, kBoardThere, kBoardLate };

struct BoardArgs {
  const uint32_t* where;  // low and high half of the address in the host's memory
  const int* number;      // of the values that are waited for; 0: none are
  int* values;
  int* state;  // a BoardState
  int64_t count;
};

__device__ __forceinline__ const unsigned char* board_of(const BoardArgs& p) {
  return reinterpret_cast<const unsigned char*>(static_cast<uint64_t>(p.where[1]) << 32 | p.where[0]);
}

__global__ void __launch_bounds__(32) board_wait_kernel(const BoardArgs p) {
  if (threadIdx.x) return;
  const uint64_t want = static_cast<uint32_t>(*p.number), start = now_nanos();
  BoardState state = kBoardUnasked;
  if (want) {
    const uint64_t* newest = reinterpret_cast<const uint64_t*>(board_of(p));
    state = kBoardThere;
    while (poll_acquire_sys(newest) != want)
      if (now_nanos() - start > kBoardPatience) {
        state = kBoardLate;
        break;
      }
  }
  *p.state = state;
}

// Values that came late are 0, as those that nobody asked for.
__global__ void __launch_bounds__(kBoardThreads) board_copy_kernel(const BoardArgs p) {
  const bool is_there = *p.state == kBoardThere;
  const int* from = reinterpret_cast<const int*>(board_of(p) + kBoardHeader);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kBoardThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kBoardThreads + threadIdx.x; i < p.count; i += stride)
    p.values[i] = is_there ? __ldcv(from + i) : 0;
}

inline cudaError_t launch_board(const BoardArgs& args, cudaStream_t stream) {
  board_wait_kernel<<<1, 32, 0, stream>>>(args);
  const int64_t ctas = (args.count + kBoardThreads - 1) / kBoardThreads;
  board_copy_kernel<<<static_cast<int>(ctas < kBoardCtas ? ctas : kBoardCtas), kBoardThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace lora_jax
