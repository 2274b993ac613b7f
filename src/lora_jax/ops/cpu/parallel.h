// Runs independent pieces of work on XLA's thread pool. Which thread takes which piece never
// changes a result: a piece computes its outputs alone.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace lora_jax {

// A helper thread costs a few microseconds to wake, so it must have this much to do. With 25 the
// adapters' part of a decode step mostly ran on one core; 8 took 17% (float32) and 37% (bfloat16)
// off it, one run of each on two cores.
constexpr double kMicrosPerThread = 8.0;

// Calls body(i) for every i < items. The caller takes pieces too and returns when all are done, so
// helpers that come late find nothing left and touch nothing of the caller's.
template <class Body>
void parallel_for(xla::ffi::ThreadPool& pool, int64_t items, double micros, const Body& body) {
  int64_t wanted = std::min<int64_t>(items, int64_t(micros / kMicrosPerThread));
  int64_t threads = wanted > 1 ? std::min<int64_t>(wanted, pool.num_threads()) : 1;
  if (threads <= 1) {
    for (int64_t i = 0; i < items; ++i) body(i);
    return;
  }
  struct State {
    std::atomic<int64_t> next{0}, done{0};
  };
  auto state = std::make_shared<State>();
  auto work = [state, items, &body] {
    for (int64_t i; (i = state->next.fetch_add(1, std::memory_order_relaxed)) < items;) {
      body(i);
      state->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t t = 1; t < threads; ++t) pool.Schedule(decltype(work)(work));
  work();
  for (int64_t spins = 0; state->done.load(std::memory_order_acquire) < items; ++spins)
    if (spins > 4096) std::this_thread::yield();
}

}  // namespace lora_jax
