// Seals and checks headers: serving/lora_server/transport/csrc/header.h for the device.
#pragma once
#include "peer/state.cuh"
#include "device/ptx.cuh"

namespace lora_jax {

constexpr uint32_t kPeerMagic = 0x4C4A5401;
constexpr int kHeaderWords = sizeof(PeerHeader) / 4, kChecksumWord = 1;
static_assert(kHeaderWords == 16);  // half a warp

// A lane's part of a CRC-32, which is linear: it has 16 bits of a header, and this is what the last one
// of them adds; each bit before adds one step more.
struct CrcParts {
  uint32_t values[2 * kHeaderWords];
};
__host__ __device__ constexpr uint32_t crc_step(uint32_t crc) {  // a bit of zero
  return crc & 1 ? 0xEDB88320u ^ (crc >> 1) : crc >> 1;
}
constexpr CrcParts crc_parts() {
  CrcParts parts{};
  uint32_t bit = 1;
  for (int t = 32 * kHeaderWords - 1; t >= 0; --t) {
    bit = crc_step(bit);
    if (t % 16 == 15) parts.values[t / 16 % 2 * kHeaderWords + t / 32] = bit;
  }
  return parts;
}
constexpr uint32_t crc_of_zeros() {
  uint32_t crc = ~0u;
  for (int bit = 0; bit < 32 * kHeaderWords; ++bit) crc = crc_step(crc);
  return ~crc;
}
static __device__ const CrcParts kCrc = crc_parts();
constexpr uint32_t kCrcOfZeros = crc_of_zeros();

// What this lane's bits are weighed by: to be asked for before it is needed.
__device__ __forceinline__ uint32_t crc_part() { return __ldg(&kCrc.values[threadIdx.x & 31]); }

union HeaderWords {
  PeerHeader header;
  uint32_t words[kHeaderWords];
  uint4 quads[kHeaderWords / 4];
};

// Of a header whose words the lanes of a warp have, twice over.
__device__ __forceinline__ uint32_t checksum(uint32_t word, uint32_t part) {
  const int lane = threadIdx.x & 31;
  if (lane % kHeaderWords == kChecksumWord) word = 0;
  const uint32_t bits = lane / kHeaderWords ? word >> 16 : word;
  uint32_t crc = 0;
#pragma unroll
  for (int bit = 15; bit >= 0; --bit) {
    crc ^= bits >> bit & 1 ? part : 0;
    part = crc_step(part);
  }
  for (int step = 16; step; step /= 2) crc ^= __shfl_xor_sync(0xffffffffu, crc, step);
  return crc ^ kCrcOfZeros;
}

__device__ __forceinline__ PeerLink* load_link(PeerLink* const* place) {  // anew: the host may have written
  return reinterpret_cast<PeerLink*>(load_acquire_sys(reinterpret_cast<const uint64_t*>(place)));
}

// One warp; `sealed` is shared memory.
__device__ __forceinline__ void seal(PeerHeader header, HeaderWords* sealed, uint32_t crc) {
  const int lane = threadIdx.x & 31;
  header.magic = kPeerMagic, header.reserved = 0;
  if (lane == 0) sealed->header = header;
  __syncwarp();
  const uint32_t sum = checksum(sealed->words[lane % kHeaderWords], crc);
  if (lane == 0) sealed->header.checksum = sum;
}

// Writes a sealed header in front of a payload that is there already, then steps the counter: behind
// the payload of all CTAs too, since their tickets were seen before.
__device__ __forceinline__ void post(unsigned char* slot, uint64_t* counter, const HeaderWords& sealed) {
  for (int i = 0; i < kHeaderWords / 4; ++i) reinterpret_cast<uint4*>(slot)[i] = sealed.quads[i];
  store_release_sys(counter, sealed.header.sequence);
}

// One warp reads the header once from memory that the peer may write: all of it for every lane. Says
// whether it is whole.
__device__ __forceinline__ bool read_header(const unsigned char* slot, PeerHeader* header, uint32_t crc) {
  const uint32_t word = __ldcv(reinterpret_cast<const uint32_t*>(slot) + threadIdx.x % kHeaderWords);
  const uint32_t sum = checksum(word, crc);
  HeaderWords h;
#pragma unroll
  for (int i = 0; i < kHeaderWords; ++i) h.words[i] = __shfl_sync(0xffffffffu, word, i);
  *header = h.header;
  return h.header.magic == kPeerMagic && h.header.reserved == 0 && h.header.checksum == sum;
}

__device__ __forceinline__ uint64_t request_bytes(const PeerShapes& s, int site, int rows) {
  return static_cast<uint64_t>(rows) * (8 + s.sites[site].d_in * s.itemsize);
}
__device__ __forceinline__ uint64_t response_bytes(const PeerShapes& s, int site, int rows) {
  int64_t width = 0;
  for (int k = 0; k < s.sites[site].num_outs; ++k) width += s.sites[site].widths[k];
  return static_cast<uint64_t>(rows) * width * s.delta_itemsize;
}

}  // namespace lora_jax
