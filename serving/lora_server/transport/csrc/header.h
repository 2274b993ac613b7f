// The 64 bytes in front of every message; serving/lora_server/transport/header.py says the same in Python.
#pragma once
#include <array>
#include <cstdint>
#include <cstring>

namespace transport {

constexpr uint32_t kMagic = 0x4C4A5401;
enum Kind : int32_t { kRequest = 1, kResponse = 2, kRefusal = 3 };

struct Header {
  uint32_t magic;
  uint32_t checksum;  // CRC-32 of all 64 bytes, these four as zero
  uint64_t epoch;
  uint64_t sequence;
  int32_t layer;
  int32_t site;
  int32_t rows;
  int32_t kind;
  int64_t table_version;
  uint64_t num_bytes;
  uint64_t reserved;
};
static_assert(sizeof(Header) == 64);

constexpr std::array<uint32_t, 256> crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t c = i;
    for (int k = 0; k < 8; ++k) c = c & 1 ? 0xEDB88320u ^ (c >> 1) : c >> 1;
    table[i] = c;
  }
  return table;
}

inline uint32_t checksum(Header header) {
  static constexpr std::array<uint32_t, 256> table = crc_table();
  header.checksum = 0;
  unsigned char data[sizeof header];
  std::memcpy(data, &header, sizeof header);
  uint32_t crc = ~0u;
  for (unsigned char byte : data) crc = table[(crc ^ byte) & 255] ^ (crc >> 8);
  return ~crc;
}

// Fills in what every header has.
inline Header seal(Header header) {
  header.magic = kMagic;
  header.reserved = 0;
  header.checksum = checksum(header);
  return header;
}

// Reads a header once from memory that the peer may write, and says whether it is whole.
inline bool read_header(const char* slot, Header* header) {
  std::memcpy(header, slot, sizeof *header);
  asm volatile("" ::: "memory");  // what was read is what is checked and used
  return header->magic == kMagic && header->reserved == 0 && header->checksum == checksum(*header);
}

}  // namespace transport
