// Seals and checks headers: serving/transport/csrc/header.h for the device.
#pragma once
#include "peer_state.cuh"
#include "ptx.cuh"

namespace lora_jax {

constexpr uint32_t kPeerMagic = 0x4C4A5401;
constexpr int kHeaderWords = sizeof(PeerHeader) / 4, kChecksumWord = 1;
static_assert(kHeaderWords == 16);  // half a warp

// What each half byte of a header adds to its CRC-32, which is linear: [half byte of a word][value][word],
// so that lanes with a word each find theirs in different banks.
struct CrcTables {
  uint32_t values[8][16][kHeaderWords];
};
constexpr uint32_t crc_step(uint32_t crc) {  // a byte of zeros
  for (int k = 0; k < 8; ++k) crc = crc & 1 ? 0xEDB88320u ^ (crc >> 1) : crc >> 1;
  return crc;
}
constexpr CrcTables crc_tables() {
  CrcTables t{};
  uint32_t bits[8]{};  // what each bit of a byte adds, from the last byte to the first
  for (int k = 0; k < 8; ++k) bits[k] = crc_step(1u << k);
  for (int byte = 4 * kHeaderWords - 1; byte >= 0; --byte) {
    for (int value = 0; value < 16; ++value)
      for (int k = 0; k < 4; ++k) {
        if (!(value >> k & 1)) continue;
        t.values[byte % 4 * 2][value][byte / 4] ^= bits[k];
        t.values[byte % 4 * 2 + 1][value][byte / 4] ^= bits[4 + k];
      }
    for (uint32_t& bit : bits) bit = crc_step(bit);
  }
  return t;
}
constexpr uint32_t crc_of_zeros() {
  uint32_t crc = ~0u;
  for (int byte = 0; byte < 4 * kHeaderWords; ++byte) crc = crc_step(crc);
  return ~crc;
}
static __device__ const CrcTables kCrc = crc_tables();
constexpr uint32_t kCrcOfZeros = crc_of_zeros();
constexpr int kCrcWords = sizeof(CrcTables) / 4;

// Brings the tables near, by the whole CTA and before they are needed. They are there after the CTA's
// next barrier.
__device__ __forceinline__ void bring_crc(int* tables) {
  const int* from = reinterpret_cast<const int*>(&kCrc);
  for (int i = threadIdx.x; i < kCrcWords; i += blockDim.x) tables[i] = __ldg(from + i);
}

union HeaderWords {
  PeerHeader header;
  uint32_t words[kHeaderWords];
  uint4 quads[kHeaderWords / 4];
};

// Of a header whose words the lanes of a warp have, twice over.
__device__ __forceinline__ uint32_t checksum(uint32_t word, const int* tables) {
  const int lane = threadIdx.x & 31, place = lane % kHeaderWords, half = lane / kHeaderWords;
  if (place == kChecksumWord) word = 0;
  uint32_t crc = 0;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const int digit = 4 * half + k;
    crc ^= tables[(digit * 16 + (word >> 4 * digit & 15)) * kHeaderWords + place];
  }
  for (int step = 16; step; step /= 2) crc ^= __shfl_xor_sync(0xffffffffu, crc, step);
  return crc ^ kCrcOfZeros;
}

__device__ __forceinline__ PeerLink* load_link(PeerLink* const* place) {  // anew: the host may have written
  return reinterpret_cast<PeerLink*>(load_acquire_sys(reinterpret_cast<const uint64_t*>(place)));
}

// One warp; `sealed` is shared memory.
__device__ __forceinline__ void seal(PeerHeader header, HeaderWords* sealed, const int* crc) {
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
__device__ __forceinline__ bool read_header(const unsigned char* slot, PeerHeader* header, const int* crc) {
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
