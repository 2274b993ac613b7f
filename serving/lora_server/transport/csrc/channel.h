// Memory that two processes share, and where things lie in it (serving/lora_server/transport/shapes.py).
#pragma once
#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "header.h"
#include "wait.h"

namespace transport {

// A mapping that lives as long as anybody holds it, so that nothing is unmapped under a reader.
class Mapping {
 public:
  static std::shared_ptr<Mapping> open(int fd, size_t bytes) {
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) return nullptr;
    return std::shared_ptr<Mapping>(new Mapping(static_cast<char*>(at), bytes));
  }
  ~Mapping() { munmap(data_, bytes_); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  Mapping(char* data, size_t bytes) : data_(data), bytes_(bytes) {}
  char* data_;
  size_t bytes_;
};

struct Site {
  int64_t d_in;
  std::vector<int64_t> d_outs, offsets;  // of each output in a response slot
};

// The numbers of a serving.lora_server.transport.shapes.Shapes, in the order of library.numbers().
struct Shapes {
  int64_t layers, max_rows, itemsize, delta_itemsize;
  int64_t adapters_offset, experts_offset, rows_offset, request_slot, response_slot;
  std::vector<Site> sites;

  explicit Shapes(const int64_t* numbers) {
    int64_t* fields[] = {&layers,         &max_rows,    &itemsize,     &delta_itemsize,
                         &adapters_offset, &experts_offset, &rows_offset, &request_slot,
                         &response_slot};
    for (int64_t* field : fields) *field = *numbers++;
    sites.resize(*numbers++);
    for (Site& site : sites) {
      site.d_in = *numbers++;
      int64_t outs = *numbers++;
      for (int64_t i = 0; i < outs; ++i) {
        site.d_outs.push_back(*numbers++);
        site.offsets.push_back(*numbers++);
      }
    }
  }
  uint64_t request_bytes(int64_t site, int64_t rows) const {
    return uint64_t(rows) * (8 + sites[site].d_in * itemsize);
  }
  uint64_t response_bytes(int64_t site, int64_t rows) const {
    uint64_t width = 0;
    for (int64_t d : sites[site].d_outs) width += d;
    return uint64_t(rows) * width * delta_itemsize;
  }
  size_t channel_bytes() const { return kPage + size_t(request_slot + response_slot); }
  static constexpr size_t kPage = 4096;
};

// One pair's memory: counters, the slot that the client writes, the slot that the server writes.
struct Channel {
  std::shared_ptr<Mapping> memory, bell_memory;
  uint64_t epoch = 0;

  struct Counters {
    Counter requests, responses;
  };
  Counter& requests() const { return reinterpret_cast<Counters*>(memory->data())->requests; }
  Counter& responses() const { return reinterpret_cast<Counters*>(memory->data())->responses; }
  // Rung with every request: the server sleeps on one counter for all its clients. Behind it is
  // that of a server that sleeps on its client's ring.
  Counter& bell() const { return *reinterpret_cast<Counter*>(bell_memory->data()); }
  Counter& at_ring() const { return (&bell())[1]; }
  char* request_slot() const { return memory->data() + Shapes::kPage; }
  char* response_slot(const Shapes& s) const { return request_slot() + s.request_slot; }
};

}  // namespace transport
