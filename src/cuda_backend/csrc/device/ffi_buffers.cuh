// Buffers and errors of XLA FFI, as the entry points of single launches take them.
#pragma once
#include <cuda_bf16.h>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using S32 = ffi::Buffer<ffi::S32>;
using F32 = ffi::Buffer<ffi::F32>;
using BF16 = ffi::Buffer<ffi::BF16>;

namespace lora_jax {

static ffi::Error status(cudaError_t e) {
  return e == cudaSuccess ? ffi::Error::Success() : ffi::Error::Internal(cudaGetErrorString(e));
}
// Of no elements: none.
static const __nv_bfloat16* data(const BF16& b) {
  return b.element_count() ? static_cast<const __nv_bfloat16*>(b.untyped_data()) : nullptr;
}
static __nv_bfloat16* data(ffi::Result<BF16>& b) {
  return b->element_count() ? static_cast<__nv_bfloat16*>(b->untyped_data()) : nullptr;
}

}  // namespace lora_jax

#define LORA_JAX_ON_STREAM ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>()
