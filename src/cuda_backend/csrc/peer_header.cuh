// Seals and checks headers: serving/transport/csrc/header.h for the device.
#pragma once
#include "peer_state.cuh"
#include "ptx.cuh"

namespace lora_jax {

constexpr uint32_t kPeerMagic = 0x4C4A5401;
constexpr int kHeaderWords = sizeof(PeerHeader) / 4, kChecksumWord = 1;

struct CrcTables {  // of the bytes of a word, so that a header takes 16 steps and not 512
  uint32_t values[4][256];
};
constexpr CrcTables crc_tables() {
  CrcTables t{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t c = i;
    for (int k = 0; k < 8; ++k) c = c & 1 ? 0xEDB88320u ^ (c >> 1) : c >> 1;
    t.values[0][i] = c;
  }
  for (int table = 1; table < 4; ++table)
    for (uint32_t i = 0; i < 256; ++i)
      t.values[table][i] = t.values[0][t.values[table - 1][i] & 255] ^ (t.values[table - 1][i] >> 8);
  return t;
}
static __device__ const CrcTables kCrc = crc_tables();
constexpr int kCrcWords = sizeof(CrcTables) / 4;

// Brings the tables near, by the whole CTA and before they are needed: a header has 16 steps, each of
// which would wait for memory. They are there after the CTA's next barrier.
__device__ __forceinline__ void bring_crc(int* tables) {
  const int* from = reinterpret_cast<const int*>(&kCrc);
  for (int i = threadIdx.x; i < kCrcWords; i += blockDim.x) tables[i] = __ldg(from + i);
}

union HeaderWords {
  PeerHeader header;
  uint32_t words[kHeaderWords];
  uint4 quads[kHeaderWords / 4];
};

__device__ __forceinline__ uint32_t checksum(const HeaderWords& h, const int* tables) {
  uint32_t crc = ~0u;
#pragma unroll
  for (int i = 0; i < kHeaderWords; ++i) {
    crc ^= i == kChecksumWord ? 0 : h.words[i];
    crc = tables[768 + (crc & 255)] ^ tables[512 + (crc >> 8 & 255)] ^ tables[256 + (crc >> 16 & 255)] ^ tables[crc >> 24];
  }
  return ~crc;
}

__device__ __forceinline__ PeerLink* load_link(PeerLink* const* place) {  // anew: the host may have written
  return reinterpret_cast<PeerLink*>(load_acquire_sys(reinterpret_cast<const uint64_t*>(place)));
}

// Writes the header in front of a payload that is there already, then steps the counter.
__device__ __forceinline__ void post(unsigned char* slot, uint64_t* counter, PeerHeader header, const int* crc) {
  HeaderWords h{header};
  h.header.magic = kPeerMagic, h.header.reserved = 0;
  h.header.checksum = checksum(h, crc);
  for (int i = 0; i < kHeaderWords / 4; ++i) reinterpret_cast<uint4*>(slot)[i] = h.quads[i];
  fence_sys();  // the payload of all CTAs too: they were seen before
  store_release_sys(counter, header.sequence);
}

// Reads the header once from memory that the peer may write; says whether it is whole.
__device__ __forceinline__ bool read_header(const unsigned char* slot, PeerHeader* header, const int* crc) {
  HeaderWords h;
  for (int i = 0; i < kHeaderWords / 4; ++i) h.quads[i] = __ldcv(reinterpret_cast<const uint4*>(slot) + i);
  *header = h.header;
  return h.header.magic == kPeerMagic && h.header.reserved == 0 && h.header.checksum == checksum(h, crc);
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
