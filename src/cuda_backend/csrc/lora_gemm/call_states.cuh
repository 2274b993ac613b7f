// Owners of the CallState of each LoRA call in XLA's programs. XLA makes one owner per call when it loads the
// program; the first launch on a device allocates its memory there. So two calls never share a state, in any
// streams or graphs, and XLA runs one call of a program once at a time.
#pragma once
#include <memory>
#include <mutex>

#include "lora_gemm/units.cuh"
#include "xla/ffi/api/ffi.h"

namespace lora_jax {

constexpr int kMostDevices = 64, kStatesOfBlock = 4096;

// Makes zeroed memory, once in thousands of calls: while the thread's stream may be capturing, which its
// mode would not allow.
inline cudaError_t allocate_zeros(void** memory, size_t bytes) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaError_t e = cudaThreadExchangeStreamCaptureMode(&mode);
  if (e != cudaSuccess) return e;
  cudaStream_t stream = nullptr;
  e = cudaMalloc(memory, bytes);
  if (e == cudaSuccess) e = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (e == cudaSuccess) e = cudaMemsetAsync(*memory, 0, bytes, stream);
  if (e == cudaSuccess) e = cudaStreamSynchronize(stream);
  if (stream) cudaStreamDestroy(stream);
  cudaThreadExchangeStreamCaptureMode(&mode);
  return e;
}

// Gives out states of each device, which nobody gives back: they are 32 bytes, and a program that has been
// dropped may still run.
class CallStates {
 public:
  cudaError_t take(int device, CallState** state) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Block& block = of_device_[device];
    if (block.left == 0) {
      void* memory = nullptr;
      const cudaError_t e = allocate_zeros(&memory, kStatesOfBlock * sizeof(CallState));
      if (e != cudaSuccess) return e;
      block = Block{static_cast<CallState*>(memory), kStatesOfBlock};
    }
    *state = block.next++, --block.left;
    return cudaSuccess;
  }

 private:
  struct Block {
    CallState* next;
    int left;
  };
  std::mutex mutex_;
  Block of_device_[kMostDevices] = {};
};
inline CallStates call_states;

// What XLA keeps of a call.
class CallStateOwner {
 public:
  inline static xla::ffi::TypeId id = {};
  // Finds the call's state on the current device.
  cudaError_t find(CallState** state) {
    int device = 0;
    cudaError_t e = cudaGetDevice(&device);
    if (e == cudaSuccess && device >= kMostDevices) e = cudaErrorInvalidDevice;
    if (e != cudaSuccess) return e;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!of_device_[device]) e = call_states.take(device, &of_device_[device]);
    *state = of_device_[device];
    return e;
  }

 private:
  std::mutex mutex_;
  CallState* of_device_[kMostDevices] = {};
};

inline xla::ffi::ErrorOr<std::unique_ptr<CallStateOwner>> own_call_state() {
  return std::make_unique<CallStateOwner>();
}

}  // namespace lora_jax
