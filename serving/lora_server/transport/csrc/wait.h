// Bounded waiting on a counter in memory that another process steps.
#pragma once
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace transport {

// A peer that shares the core runs only once this side yields, and on a free core a yield costs
// less than a microsecond: spinning 20 us took 91 us a layer on two busy cores, 2 us takes 51.
constexpr uint64_t kSpinNanos = 2'000, kYieldNanos = 1'000'000;
constexpr long kSleepNanos = 1'000'000;

// How long a side yields before it sleeps, for how long at a time, and how long it spins before.
// Without spinning the first look decides: 64 pauses take 3 us, as long as a message's work.
struct Patience {
  uint64_t yield_nanos = kYieldNanos;
  long sleep_nanos = kSleepNanos;
  uint64_t spin_nanos = kSpinNanos;
};

inline uint64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return uint64_t(t.tv_sec) * 1'000'000'000ull + uint64_t(t.tv_nsec);
}

// A number that one side steps and the other sleeps on; `sleepers` saves the stepper a system call.
struct Counter {
  alignas(64) std::atomic<uint64_t> value;
  alignas(64) std::atomic<uint32_t> sleepers;
};
static_assert(sizeof(Counter) == 128 && std::atomic<uint64_t>::is_always_lock_free);

// The kernel compares 32 bits: the low half, which comes first.
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

inline void wake(Counter& counter) {
  if (counter.sleepers.load())
    syscall(SYS_futex, &counter.value, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

inline void sleep_while(Counter& counter, uint64_t seen, long nanos) {
  timespec limit{0, nanos};
  counter.sleepers.fetch_add(1);
  if (counter.value.load() == seen)
    syscall(SYS_futex, &counter.value, FUTEX_WAIT, uint32_t(seen), &limit, nullptr, 0);
  counter.sleepers.fetch_sub(1);
}

inline uint64_t look(Counter& counter) { return counter.value.load(); }

// A word of memory that one process steps, and on which many sleep, each by its own bit; each says
// in a counter of its own that it sleeps. One that steps the word too wakes others for nothing.
// Read-only for them it would cost more: a futex looks for a page that may be written first.
struct Ring {
  std::atomic<uint64_t>* word;
  uint32_t bit;
  Counter* own;
};
inline uint32_t ring_bit(uint64_t epoch) { return 1u << (epoch % 32); }
inline uint64_t look(Ring& ring) { return ring.word->load(); }
inline void sleep_while(Ring& ring, uint64_t seen, long nanos) {
  uint64_t until = now() + uint64_t(nanos);
  timespec limit{time_t(until / 1'000'000'000), long(until % 1'000'000'000)};
  ring.own->sleepers.fetch_add(1);
  if (ring.word->load() == seen)
    syscall(SYS_futex, ring.word, FUTEX_WAIT_BITSET, uint32_t(seen), &limit, nullptr, ring.bit);
  ring.own->sleepers.fetch_sub(1);
}
inline void wake_bits(std::atomic<uint64_t>& word, uint32_t bits) {
  syscall(SYS_futex, &word, FUTEX_WAKE_BITSET, INT32_MAX, nullptr, nullptr, bits);
}

// Calls ready() until it is true (returns true), or stop() is, or it is `deadline`. Spins, yields,
// then sleeps on `place`, a Counter or a Ring.
template <class Place, class Ready, class Stop>
bool wait_until(Place& place, uint64_t deadline, const Ready& ready, const Stop& stop,
                Patience patience = {}) {
  uint64_t start = 0;
  for (unsigned polls = 1;; ++polls) {
    uint64_t seen = look(place);
    if (ready()) return true;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
    if (polls & 63 && start == 0 && patience.spin_nanos) continue;
    uint64_t time = now();
    if (stop() || time >= deadline) return false;
    if (start == 0) start = time;
    if (time - start >= patience.yield_nanos) {
      sleep_while(place, seen, patience.sleep_nanos);
    } else if (time - start >= patience.spin_nanos) {
      sched_yield();
    }
  }
}

}  // namespace transport
