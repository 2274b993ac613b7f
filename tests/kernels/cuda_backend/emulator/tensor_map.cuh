// The driver's function that makes tensor maps, for the emulator.
#pragma once
#include "cuda_emulator.h"

namespace lora_jax {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);
inline EncodeTiled encode_tiled() { return &cuTensorMapEncodeTiled; }

}  // namespace lora_jax
