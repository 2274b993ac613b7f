// Calls of the ops that make each row of an array of the row alone: norms and activations.
#pragma once
#include "buffers.h"
#include "norm.h"
#include "silu.h"

namespace lora_jax {

template <class T, ffi::DataType dtype>
ffi::Error RmsNormCall(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer addend,
                       ffi::AnyBuffer weight, S32 num_rows, ffi::Result<ffi::AnyBuffer> out,
                       ffi::RemainingRets sum, float eps) {
  if (!all_of<dtype>(x, addend, weight, *out)) return WrongTypes("rms_norm");
  RmsNorm<T> g{data<T>(x), data<T>(addend), data<T>(weight), nullptr, data<T>(out)};
  g.rows = x.dimensions()[0], g.size = x.dimensions()[1], g.eps = eps;
  g.real_rows = std::clamp<int64_t>(num_rows.typed_data()[0], 0, g.rows);
  if (g.addend) {
    auto total = sum.get<ffi::AnyBuffer>(0);
    if (!total || !all_of<dtype>(**total)) return WrongTypes("rms_norm");
    g.sum = data<T>(*total);
  }
  run_rms_norm(pool, g);
  return ffi::Error::Success();
}

template <class T, ffi::DataType dtype>
ffi::Error LayerNormCall(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weight,
                         ffi::AnyBuffer bias, ffi::Result<ffi::AnyBuffer> out, float eps) {
  if (!all_of<dtype>(x, weight, bias, *out)) return WrongTypes("layer_norm");
  run_layer_norm(pool, LayerNorm<T>{data<T>(x), data<T>(weight), data<T>(bias), data<T>(out),
                                    x.dimensions()[0], x.dimensions()[1], eps});
  return ffi::Error::Success();
}

template <class T, ffi::DataType dtype>
ffi::Error SiluTimesCall(ffi::ThreadPool pool, ffi::AnyBuffer gate, ffi::AnyBuffer up,
                         S32 num_rows, ffi::Result<ffi::AnyBuffer> out) {
  if (!all_of<dtype>(gate, up, *out)) return WrongTypes("silu_times");
  SiluTimes<T> g{data<T>(gate), data<T>(up), data<T>(out), int64_t(gate.dimensions()[0])};
  g.real_rows = std::clamp<int64_t>(num_rows.typed_data()[0], 0, g.rows);
  g.width = gate.dimensions()[1];
  run_silu_times(pool, g);
  return ffi::Error::Success();
}

}  // namespace lora_jax
