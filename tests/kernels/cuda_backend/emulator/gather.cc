// Host entry points of the emulated all-gather, over plain arrays: one call a device, side by side.
#include "all_gather/all_gather.cuh"

#include "driver.cuh"

extern "C" {

int64_t gather_bytes_of(int devices) { return gather_bytes(devices); }
int64_t most_word_bytes(int devices) { return std::min(kWordBytes, kMostWordBytes / (devices - 1)); }
unsigned gather_status(const unsigned char* memory) { return reinterpret_cast<const GatherHead*>(memory)->status; }

int all_gather(const unsigned char* x, unsigned char* y, int rows, int units, int devices, int me, int patience_ms,
               unsigned char* const* memory, int parts, const int* source, const int* owner) {
  GatherArgs args{reinterpret_cast<const uint4*>(x), reinterpret_cast<uint4*>(y), static_cast<uint32_t>(rows),
                  static_cast<uint32_t>(units), devices, me, static_cast<uint64_t>(patience_ms) * 1000000,
                  source, owner};
  turn_memory(args, memory);
  return launch_gather(args, static_cast<GatherParts>(parts), nullptr);
}
}
