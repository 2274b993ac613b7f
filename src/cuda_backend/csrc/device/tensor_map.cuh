// The driver's function that makes tensor maps, found without linking the driver.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

namespace lora_jax {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

inline EncodeTiled encode_tiled() {
  static const EncodeTiled found = [] {
    void* f = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &result);
    return reinterpret_cast<EncodeTiled>(f);
  }();
  return found;
}

}  // namespace lora_jax
