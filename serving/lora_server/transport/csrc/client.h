// The client's end: copies rows into servers' landing slots, waits for results and adds them.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "channel.h"

namespace transport {

enum Status : int32_t { kArrived = 0, kTimedOut = 1, kAborted = 2, kRefused = 3 };

struct BF16 {
  uint16_t bits;
};
inline float to_float(float x) { return x; }
inline float to_float(BF16 x) {
  uint32_t wide = uint32_t(x.bits) << 16;
  float out;
  std::memcpy(&out, &wide, 4);
  return out;
}
inline void round_to(float x, float* out) { *out = x; }
inline void round_to(float x, BF16* out) {
  uint32_t wide;
  std::memcpy(&wide, &x, 4);
  uint32_t rounded = (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
  out->bits = uint16_t(x == x ? rounded : (wide >> 16) | 0x40);
}
template <class Y, class D>
void add_row(Y* y, const D* delta, int64_t width) {
  for (int64_t i = 0; i < width; ++i) round_to(to_float(y[i]) + to_float(delta[i]), &y[i]);
}

struct Counts {
  std::atomic<uint64_t> pushes{0}, bytes_sent{0}, waits{0}, timed_out{0}, aborted{0}, refused{0},
      dropped{0}, wait_nanos{0}, longest_wait{0};
  std::atomic<uint64_t> by_length[64]{};  // waits of [2^i, 2^(i+1)) ns that ended well
};

// One server as a client sees it, for one epoch.
struct Link : Channel {
  std::atomic<bool> lost{false};
  uint64_t sequence = 0;     // of the last push
  int64_t under_way = 0;     // rows pushed and not waited for
  int64_t site = 0, layer = 0;
};

// A map of rows as the step has it; see PushRows in base.py.
struct Rows {
  int64_t num_rows, servers;
  const int32_t *to_server, *to_adapter, *to_expert;

  // Rows for each server, in order; false if a number lies outside.
  bool split(std::vector<std::vector<int32_t>>* lists) const {
    lists->assign(servers, {});
    for (int64_t row = 0; row < num_rows; ++row) {
      if (to_server[row] < 0) continue;
      if (to_server[row] >= servers) return false;
      (*lists)[to_server[row]].push_back(int32_t(row));
    }
    return true;
  }
};

// An engine shares its cores with its tenants: what it spins they wait.
constexpr Patience kEngine{kYieldNanos, kSleepNanos, 0};

class Client {
 public:
  // With `each`, servers are tenants who do not know each other: what one answered counts whatever
  // the others did.
  Client(const int64_t* numbers, int64_t servers, bool fetch, bool each)
      : shapes(numbers), fetch_(fetch), each_(each), links_(servers) {}

  const Shapes shapes;
  Counts counts;

  // Before the first push; servers that are shown the memory may sleep on it.
  void set_ring(std::shared_ptr<Mapping> ring) { ring_ = std::move(ring); }
  std::atomic<uint64_t> limit_nanos{20'000'000};
  std::atomic<bool> abort{false};

  int64_t servers() const { return int64_t(links_.size()); }

  void attach(int64_t server, std::shared_ptr<Link> link) {
    std::lock_guard<std::mutex> hold(mutex_);
    std::swap(links_[server], link);
    if (link) lose(*link);
  }
  // Ends the waits for this server, unless it has joined anew since.
  void detach(int64_t server, uint64_t epoch) {
    std::shared_ptr<Link> link = find(server);
    if (link && link->epoch == epoch) lose(*link);
  }
  bool lost(int64_t server) {
    std::shared_ptr<Link> link = find(server);
    return !link || link->lost;
  }

  // Returns what is wrong with the arguments, or nothing.
  std::string push(int64_t site, int64_t layer, int64_t version, const Rows& rows, const char* x) {
    std::vector<std::vector<int32_t>> lists;
    if (layer < 0 || layer >= shapes.layers) return "push: the layer lies outside the plan";
    if (!rows.split(&lists)) return "push: a row's server is not one of the client's";
    for (const auto& list : lists)
      if (int64_t(list.size()) > shapes.max_rows)
        return "push: " + std::to_string(list.size()) + " rows for one server, its slot holds " +
               std::to_string(shapes.max_rows);
    std::lock_guard<std::mutex> hold(mutex_);
    std::vector<Link*> sent;
    for (int64_t server = 0; server < servers(); ++server) {
      Link* link = links_[server].get();
      if (lists[server].empty() || !link || link->lost) continue;
      if (link->under_way) {  // nobody waited: the server may still read the slot
        lose(*link);
        continue;
      }
      link->under_way = int64_t(lists[server].size());
      link->site = site, link->layer = layer;
      send(*link, lists[server], rows, version, x);
      if (ring_)
        sent.push_back(link);
      else
        wake(link->bell());
    }
    if (ring_) wake_all(sent);
    return "";
  }

  // Adds to every y what its server answered, if all did or each counts alone; `status` has one
  // entry per server.
  std::string wait_add(int64_t site, const Rows& rows, const std::vector<char*>& ys, bool wide_y,
                       int32_t* status) {
    std::vector<std::vector<int32_t>> lists;
    if (!rows.split(&lists)) return "wait_add: a row's server is not one of the client's";
    uint64_t start = now(), deadline = start + limit_nanos;
    std::vector<std::shared_ptr<Link>> links(servers());
    bool all = true, any = false;
    for (int64_t server = 0; server < servers(); ++server) {
      status[server] = kArrived;
      if (lists[server].empty()) continue;
      links[server] = find(server);
      status[server] = wait(links[server].get(), site, int64_t(lists[server].size()), deadline);
      all = all && status[server] == kArrived, any = true;
      if (each_ && status[server] == kArrived)  // while the next ones still compute
        add(*links[server], site, lists[server], ys, wide_y);
    }
    if (any) count_wait(now() - start, all);
    if (!all || each_) return "";
    for (int64_t server = 0; server < servers(); ++server)
      if (links[server]) add(*links[server], site, lists[server], ys, wide_y);
    return "";
  }

 private:
  std::shared_ptr<Link> find(int64_t server) {
    std::lock_guard<std::mutex> hold(mutex_);
    return links_[server];
  }
  static void lose(Link& link) {
    link.lost = true;
    wake(link.responses());
  }

  // One system call for all servers that sleep on the ring: it makes all of them runnable before
  // any of them takes this thread's core.
  void wake_all(const std::vector<Link*>& sent) {
    if (sent.empty()) return;
    auto& word = *reinterpret_cast<std::atomic<uint64_t>*>(ring_->data());
    word.fetch_add(1);
    uint32_t bits = 0;
    for (Link* link : sent) {
      if (link->at_ring().sleepers.load()) bits |= ring_bit(link->epoch);
      wake(link->bell());  // one that does not have the ring yet
    }
    if (bits) wake_bits(word, bits);
  }

  void send(Link& link, const std::vector<int32_t>& list, const Rows& rows, int64_t version,
            const char* x) {
    char* slot = link.request_slot();
    int32_t* adapters = reinterpret_cast<int32_t*>(slot + shapes.adapters_offset);
    int32_t* experts = reinterpret_cast<int32_t*>(slot + shapes.experts_offset);
    char* out = slot + shapes.rows_offset;
    size_t width = size_t(shapes.sites[link.site].d_in * shapes.itemsize);
    for (size_t i = 0, run; i < list.size(); i += run) {
      for (run = 1; i + run < list.size() && list[i + run] == list[i] + int32_t(run); ++run) {
      }
      std::memcpy(adapters + i, rows.to_adapter + list[i], run * 4);
      std::memcpy(experts + i, rows.to_expert + list[i], run * 4);
      std::memcpy(out + i * width, x + size_t(list[i]) * width, run * width);
    }
    uint64_t bytes = shapes.request_bytes(link.site, int64_t(list.size()));
    Header header = seal({0, 0, link.epoch, ++link.sequence, int32_t(link.layer),
                          int32_t(link.site), int32_t(list.size()), kRequest, version, bytes, 0});
    std::memcpy(slot, &header, sizeof header);
    link.requests().value.store(link.sequence);
    link.bell().value.fetch_add(1);
    counts.pushes += 1;
    counts.bytes_sent += bytes;
  }

  int32_t wait(Link* link, int64_t site, int64_t num_rows, uint64_t deadline) {
    counts.waits += 1;
    if (!link || link->lost || link->under_way != num_rows || link->site != site) {
      if (link && link->under_way) lose(*link);  // not if it joined between push and wait
      counts.aborted += 1;
      return kAborted;
    }
    auto stop = [&] { return link->lost.load() || abort.load(); };
    Counter& responses = link->responses();
    for (uint64_t want = link->sequence;;) {
      auto ready = [&] { return !stop() && responses.value.load() >= want; };
      const Patience patience = each_ ? kEngine : Patience{};
      if (!wait_until(responses, deadline, ready, stop, patience)) return fail(*link, stop());
      uint64_t seen = responses.value.load();
      Header header;
      if (accept(*link, num_rows, &header)) {
        link->under_way = 0;
        if (header.kind == kResponse) return kArrived;
        counts.refused += 1;
        return kRefused;
      }
      counts.dropped += 1;
      if (now() >= deadline) return fail(*link, false);
      want = seen + 1;
    }
  }

  int32_t fail(Link& link, bool stopped) {
    lose(link);
    (stopped ? counts.aborted : counts.timed_out) += 1;
    return stopped ? kAborted : kTimedOut;
  }

  bool accept(const Link& link, int64_t num_rows, Header* header) const {
    if (!read_header(link.response_slot(shapes), header)) return false;
    if (header->epoch != link.epoch || header->sequence != link.sequence) return false;
    if (header->layer != link.layer || header->site != link.site) return false;
    if (header->kind == kRefusal) return header->rows == 0 && header->num_bytes == 0;
    return header->kind == kResponse && header->rows == num_rows &&
           header->num_bytes == shapes.response_bytes(link.site, num_rows);
  }

  void add(Link& link, int64_t site, const std::vector<int32_t>& list,
           const std::vector<char*>& ys, bool wide_y) {
    const char* slot = link.response_slot(shapes);
    const Site& s = shapes.sites[site];
    bool wide_delta = shapes.delta_itemsize == 4;
    std::unique_lock<std::mutex> hold(mutex_, std::defer_lock);
    if (fetch_) hold.lock();
    for (size_t k = 0; k < s.d_outs.size(); ++k) {
      int64_t width = s.d_outs[k];
      const char* deltas = slot + s.offsets[k];
      if (fetch_) {  // pull: the results are read over before they are used
        fetched_.assign(deltas, deltas + list.size() * width * shapes.delta_itemsize);
        deltas = fetched_.data();
      }
      for (size_t i = 0; i < list.size(); ++i) {
        const char* d = deltas + int64_t(i) * width * shapes.delta_itemsize;
        char* y = ys[k] + int64_t(list[i]) * width * (wide_y ? 4 : 2);
        if (wide_y && wide_delta)
          add_row(reinterpret_cast<float*>(y), reinterpret_cast<const float*>(d), width);
        else if (wide_delta)
          add_row(reinterpret_cast<BF16*>(y), reinterpret_cast<const float*>(d), width);
        else if (!wide_y)
          add_row(reinterpret_cast<BF16*>(y), reinterpret_cast<const BF16*>(d), width);
        else
          add_row(reinterpret_cast<float*>(y), reinterpret_cast<const BF16*>(d), width);
      }
    }
  }

  void count_wait(uint64_t nanos, bool well) {
    counts.wait_nanos += nanos;
    if (well) counts.by_length[63 - __builtin_clzll(nanos | 1)] += 1;
    uint64_t longest = counts.longest_wait;
    while (nanos > longest && !counts.longest_wait.compare_exchange_weak(longest, nanos)) {
    }
  }

  const bool fetch_, each_;
  std::shared_ptr<Mapping> ring_;
  std::vector<char> fetched_;
  std::mutex mutex_;  // links_, fetched_, and one push at a time
  std::vector<std::shared_ptr<Link>> links_;
};

}  // namespace transport
