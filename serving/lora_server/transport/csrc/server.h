// The server's end: takes the clients' messages in turn and pushes results back.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

#include "channel.h"

namespace transport {

struct Seat : Channel {
  uint64_t seen = 0;  // of the client's request counter
};

class Server {
 public:
  Server(const int64_t* numbers, std::shared_ptr<Mapping> bell)
      : shapes(numbers), bell_memory(std::move(bell)) {}

  const Shapes shapes;
  const std::shared_ptr<Mapping> bell_memory;
  std::atomic<uint64_t> dropped{0};

  int64_t attach(std::shared_ptr<Seat> seat) {
    std::lock_guard<std::mutex> hold(mutex_);
    seats_[++last_] = std::move(seat);
    return last_;
  }
  void detach(int64_t client) {
    std::lock_guard<std::mutex> hold(mutex_);
    seats_.erase(client);
  }
  bool aborted() const { return abort_; }
  void abort() {
    abort_ = true;
    ring_bell();
    if (std::shared_ptr<Mapping> mapped = ring()) wake_bits(word(*mapped), bit_);
  }
  // From now on sleeps on the ring of its only client, which steps that once for many servers.
  void sleep_on(std::shared_ptr<Mapping> ring, uint32_t bit) {
    {
      std::lock_guard<std::mutex> hold(mutex_);
      bit_ = bit;
      ring_ = std::move(ring);
    }
    ring_bell();
  }

  // The number of the client whose message `header` describes, or -1 when time is up or aborted.
  int64_t receive(uint64_t limit_nanos, Header* header, Patience patience = {}) {
    int64_t found = -1;
    auto ready = [&] { return (found = scan(header)) >= 0; };
    auto stop = [&] { return abort_.load(); };
    if (stop()) return -1;
    uint64_t deadline = now() + limit_nanos;
    if (std::shared_ptr<Mapping> mapped = ring()) {
      Ring place{&word(*mapped), bit_, &bell() + 1};
      wait_until(place, deadline, ready, stop, patience);
    } else {
      auto woken = [&] { return stop() || ring() != nullptr; };
      wait_until(bell(), deadline, ready, woken, patience);
    }
    return found;
  }

  // The client's slots; nothing where it has gone.
  std::shared_ptr<Seat> seat(int64_t client) { return find(client); }

  // False if the client is gone or has another epoch. `results` has a pointer for each output; null
  // means that they are in the slot already.
  bool answer(int64_t client, Header header, const char* const* results) {
    std::shared_ptr<Seat> seat = find(client);
    if (!seat || seat->epoch != header.epoch) return false;
    char* slot = seat->response_slot(shapes);
    header.num_bytes = 0;
    if (header.kind == kResponse) {
      const Site& site = shapes.sites[header.site];
      for (size_t k = 0; results && k < site.d_outs.size(); ++k)
        std::memcpy(slot + site.offsets[k], results[k],
                    size_t(header.rows * site.d_outs[k] * shapes.delta_itemsize));
      header.num_bytes = shapes.response_bytes(header.site, header.rows);
    }
    header = seal(header);
    std::memcpy(slot, &header, sizeof header);
    seat->responses().value.store(header.sequence);
    wake(seat->responses());
    return true;
  }

 private:
  Counter& bell() const { return *reinterpret_cast<Counter*>(bell_memory->data()); }
  std::shared_ptr<Mapping> ring() {
    std::lock_guard<std::mutex> hold(mutex_);
    return ring_;
  }
  void ring_bell() {
    bell().value.fetch_add(1);
    wake(bell());
  }
  static std::atomic<uint64_t>& word(const Mapping& ring) {
    return *reinterpret_cast<std::atomic<uint64_t>*>(ring.data());
  }
  std::shared_ptr<Seat> find(int64_t client) {
    std::lock_guard<std::mutex> hold(mutex_);
    auto at = seats_.find(client);
    return at == seats_.end() ? nullptr : at->second;
  }

  // Looks at every client once, beginning behind the one that was served last.
  int64_t scan(Header* header) {
    std::lock_guard<std::mutex> hold(mutex_);
    auto at = seats_.upper_bound(served_);
    for (size_t i = 0; i < seats_.size(); ++i, ++at) {
      if (at == seats_.end()) at = seats_.begin();
      Seat& seat = *at->second;
      uint64_t arrivals = seat.requests().value.load();
      if (arrivals == seat.seen) continue;
      bool newer = arrivals > seat.seen;
      seat.seen = arrivals;
      if (newer && accept(seat, arrivals, header)) return served_ = at->first;
      dropped += 1;
    }
    return -1;
  }

  bool accept(const Seat& seat, uint64_t arrivals, Header* header) const {
    if (!read_header(seat.request_slot(), header)) return false;
    return header->epoch == seat.epoch && header->sequence == arrivals &&
           header->kind == kRequest && header->layer >= 0 && header->layer < shapes.layers &&
           header->site >= 0 && header->site < int32_t(shapes.sites.size()) && header->rows >= 1 &&
           header->rows <= shapes.max_rows &&
           header->num_bytes == shapes.request_bytes(header->site, header->rows);
  }

  std::atomic<bool> abort_{false};
  std::mutex mutex_;
  std::shared_ptr<Mapping> ring_;
  std::atomic<uint32_t> bit_{0};
  std::map<int64_t, std::shared_ptr<Seat>> seats_;
  int64_t last_ = 0, served_ = 0;
};

}  // namespace transport
