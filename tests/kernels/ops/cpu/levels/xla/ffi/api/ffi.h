// In place of XLA's header: a thread pool whose helpers run at once.
#pragma once
#include <cstdint>

namespace xla::ffi {

struct ThreadPool {
  int64_t threads;
  int64_t num_threads() const { return threads; }
  template <class Work>
  void Schedule(Work work) {
    work();
  }
};

}  // namespace xla::ffi
