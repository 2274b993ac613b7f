// Random shapes, guarded memory and mutated headers for the fuzz of the transport's parsers.
#pragma once
#include <sanitizer/asan_interface.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "client.h"
#include "relay.h"
#include "server.h"

#define CHECK(condition)                                                        \
  do {                                                                          \
    if (!(condition)) {                                                         \
      std::fprintf(stderr, "%s:%d: %s is false\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                             \
    }                                                                           \
  } while (false)

namespace fuzz {

using namespace transport;

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  uint64_t bits() { return engine_(); }
  int64_t below(int64_t limit) { return int64_t(engine_() % uint64_t(limit)); }
  int64_t from(int64_t low, int64_t high) { return low + below(high - low + 1); }
  bool chance(int percent) { return below(100) < percent; }
  template <class T>
  T any(std::initializer_list<T> values) {
    return values.begin()[below(int64_t(values.size()))];
  }
  void fill(void* at, size_t size) {
    for (size_t i = 0; i < size; ++i) static_cast<char*>(at)[i] = char(bits());
  }

 private:
  std::mt19937_64 engine_;
};

inline int64_t up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// The numbers of Shapes as serving/lora_server/transport/shapes.py lays them out.
struct Layout {
  std::vector<int64_t> numbers;
  int64_t request_end = 0, response_end = 0;  // bytes of the slots that hold something

  explicit Layout(Random& random) {
    int64_t layers = random.from(1, 4), rows = random.from(1, 9);
    int64_t item = random.any<int64_t>({2, 4}), delta = item == 4 ? 4 : random.any<int64_t>({2, 4});
    int64_t experts = up(64 + 4 * rows, 64), first = up(experts + 4 * rows, 64);
    int64_t sites = random.from(1, 3), widest = 0;
    std::vector<int64_t> tail;
    response_end = 64;
    for (int64_t s = 0; s < sites; ++s) {
      int64_t d_in = random.from(1, 40), outs = random.from(1, 3), at = 64;
      widest = std::max(widest, d_in);
      tail.insert(tail.end(), {d_in, outs});
      for (int64_t k = 0; k < outs; ++k) {
        int64_t width = random.from(1, 40), end = at + rows * width * delta;
        tail.insert(tail.end(), {width, at});
        response_end = std::max(response_end, end);
        at = up(end, 64);
      }
    }
    request_end = first + rows * widest * item;
    numbers = {layers, rows, item, delta, 64, experts, first, up(request_end, 4096),
               up(response_end, 4096), sites};
    numbers.insert(numbers.end(), tail.begin(), tail.end());
  }
};

// Memory of a channel whose unused bytes are poisoned: a touch of them ends the program.
struct Guarded {
  std::shared_ptr<Mapping> memory, bell;
  std::vector<std::pair<char*, size_t>> poisoned;

  explicit Guarded(const Layout& layout) {
    Shapes shapes(layout.numbers.data());
    memory = map(shapes.channel_bytes());
    bell = map(Shapes::kPage);
    char* at = memory->data();
    poison(at + sizeof(Channel::Counters), at + Shapes::kPage);
    char *request = at + Shapes::kPage, *response = request + shapes.request_slot;
    poison(request + layout.request_end, response);
    poison(response + layout.response_end, response + shapes.response_slot);
  }
  ~Guarded() {
    for (auto [at, size] : poisoned) ASAN_UNPOISON_MEMORY_REGION(at, size);
  }
  Guarded(const Guarded&) = delete;

  template <class Side>
  void give(Side* side, uint64_t epoch) const {
    side->memory = memory, side->bell_memory = bell, side->epoch = epoch;
  }

 private:
  static std::shared_ptr<Mapping> map(size_t bytes) {
    int fd = memfd_create("fuzz", MFD_CLOEXEC);
    CHECK(fd >= 0 && ftruncate(fd, off_t(bytes)) == 0);
    auto mapping = Mapping::open(fd, bytes);
    close(fd);
    CHECK(mapping);
    return mapping;
  }
  void poison(char* from, char* to) {
    if (to <= from) return;
    ASAN_POISON_MEMORY_REGION(from, size_t(to - from));
    poisoned.emplace_back(from, size_t(to - from));
  }
};

inline Header request_of(Random& random, const Shapes& shapes, uint64_t epoch, uint64_t sequence) {
  int32_t site = int32_t(random.below(int64_t(shapes.sites.size())));
  int32_t rows = int32_t(random.from(1, shapes.max_rows));
  int32_t layer = int32_t(random.below(shapes.layers));
  return seal({0, 0, epoch, sequence, layer, site, rows, kRequest, int64_t(random.below(9)),
               shapes.request_bytes(site, rows), 0});
}

inline Header answer_to(const Header& request, const Shapes& shapes) {
  Header header = request;
  header.kind = kResponse;
  header.num_bytes = shapes.response_bytes(request.site, request.rows);
  return seal(header);
}

// A field set to a value at or beyond an edge.
inline void mutate_field(Random& random, const Shapes& shapes, Header* header) {
  int32_t edge = random.any<int32_t>({0, 1, 2, 3, 4, -1, INT32_MIN, INT32_MAX,
                                      int32_t(shapes.max_rows), int32_t(shapes.max_rows) + 1,
                                      int32_t(shapes.layers), int32_t(shapes.sites.size()),
                                      int32_t(random.bits())});
  uint64_t wide = random.any<uint64_t>({0, 1, UINT64_MAX, 1ull << 63, header->num_bytes + 1,
                                        header->num_bytes - 1, header->sequence + 1, random.bits()});
  switch (random.below(9)) {
    case 0: header->epoch = wide; break;
    case 1: header->sequence = wide; break;
    case 2: header->layer = edge; break;
    case 3: header->site = edge; break;
    case 4: header->rows = edge; break;
    case 5: header->kind = edge; break;
    case 6: header->table_version = int64_t(wide); break;
    case 7: header->num_bytes = wide; break;
    default:  // consistent with itself: the size is that of the rows
      header->rows = edge;
      if (header->site >= 0 && header->site < int32_t(shapes.sites.size()) && edge > 0)
        header->num_bytes = header->kind == kRequest ? shapes.request_bytes(header->site, edge)
                                                     : shapes.response_bytes(header->site, edge);
  }
}

// Whole, with fields at their edges under a right checksum, with bits turned, or random.
inline Header mutated(Random& random, const Shapes& shapes, Header header) {
  int64_t kind = random.below(10);
  if (kind < 2) return header;
  if (kind < 8) {
    for (int64_t n = random.from(1, 3); n > 0; --n) mutate_field(random, shapes, &header);
    return seal(header);
  }
  if (kind == 8) {
    char* bytes = reinterpret_cast<char*>(&header);
    for (int64_t n = random.from(1, 4); n > 0; --n) bytes[random.below(64)] ^= 1 << random.below(8);
    return header;
  }
  random.fill(&header, sizeof header);
  return random.chance(50) ? seal(header) : header;
}

}  // namespace fuzz
