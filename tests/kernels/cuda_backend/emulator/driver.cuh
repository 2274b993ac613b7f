// What the drivers share. One is one library, so that a test compiles the kernels that it calls.
#pragma once
#include "cuda_emulator.h"

using namespace lora_jax;
using Bf16 = __nv_bfloat16;

extern "C" void emulate(int sms, unsigned seed) { emu::machine.sms = sms, emu::machine.seed = seed; }
