#include "cuda_emulator.h"
