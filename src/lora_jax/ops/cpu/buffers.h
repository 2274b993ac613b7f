// Buffers of XLA FFI calls as the kernels take them.
#pragma once
#include <optional>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using S32 = ffi::Buffer<ffi::S32>;
using F32 = ffi::Buffer<ffi::F32>;
using U8 = ffi::Buffer<ffi::U8>;

namespace lora_jax {

template <class T, ffi::DataType dtype>
const T* data(const ffi::Buffer<dtype>& b) {
  return b.element_count() ? static_cast<const T*>(b.untyped_data()) : nullptr;
}
template <class T>
const T* data(const ffi::AnyBuffer& b) {
  return b.element_count() ? static_cast<const T*>(b.untyped_data()) : nullptr;
}
template <class T>
T* data(ffi::Result<ffi::AnyBuffer>& b) {
  return static_cast<T*>(b->untyped_data());
}

// Calls of one op for several types take buffers of any type: XLA's code that unpacks arguments is
// then compiled once for all of them, a third less to compile. The calls check the types.
template <ffi::DataType dtype, class... Buffers>
bool all_of(const Buffers&... buffers) {
  return ((buffers.element_type() == dtype) && ...);
}
inline ffi::Error WrongTypes(const char* op) {
  return ffi::Error::InvalidArgument(std::string(op) + ": a buffer has another type than the call");
}

// Rest arguments of a call, one after the other.
class Rest {
 public:
  explicit Rest(const ffi::RemainingArgs& of) : of_(of) {}
  // An empty optional past the last, or for what is no buffer.
  std::optional<ffi::AnyBuffer> next() {
    auto found = of_.get<ffi::AnyBuffer>(at_++);
    return found ? std::optional<ffi::AnyBuffer>(*found) : std::nullopt;
  }

 private:
  const ffi::RemainingArgs& of_;
  size_t at_ = 0;
};

}  // namespace lora_jax
