// Values that the host writes while a step computes what comes before them: the step waits until the
// host has posted their number, and copies them. Values that do not come in time are not copied, and
// the header says so. The header is that of the board on a GPU (lora_jax/ops/host_board.py).
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using S32 = ffi::Buffer<ffi::S32>;

namespace lora_jax {

using Nanos = std::chrono::nanoseconds;
using Clock = std::chrono::steady_clock;

constexpr int64_t kHeaderWords = 8;   // the number of the newest values, then those of late ones
constexpr uint64_t kLatePlaces = 7;   // number n is told at place n % 7
constexpr uint64_t kAny = ~uint64_t(0);  // as the newest number: no step is to wait any more
constexpr int32_t kNothing = -1;      // each value that nobody asked for, or that came late

std::atomic<int64_t> patience{20'000'000'000};  // ns

// Sleeps until `newest` is not `seen` any more, or for `most`; it may return earlier.
//
// No lock is held meanwhile, neither Python's nor one that a thread which posts would take.
inline void sleep_while(uint64_t* newest, uint64_t seen, Nanos most) {
#ifdef __linux__
  timespec left{time_t(most.count() / 1'000'000'000), long(most.count() % 1'000'000'000)};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(newest), FUTEX_WAIT_PRIVATE, uint32_t(seen), &left,
          nullptr, 0);  // the lower half of the number, on any CPU of these kernels
#else
  std::this_thread::sleep_for(std::min<Nanos>(most, std::chrono::microseconds(50)));
#endif
}

inline void post(uint64_t* newest, uint64_t number) {
  __atomic_store_n(newest, number, __ATOMIC_RELEASE);
#ifdef __linux__
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(newest), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr,
          nullptr, 0);
#endif
}

// Returns whether the values of a number are there; false after `patience`.
inline bool await_number(uint64_t* newest, uint64_t want) {
  const auto is_there = [&](uint64_t number) { return number == want || number == kAny; };
  const Clock::time_point end = Clock::now() + Nanos(patience.load(std::memory_order_relaxed));
  for (;;) {
    const uint64_t seen = __atomic_load_n(newest, __ATOMIC_ACQUIRE);
    if (is_there(seen)) return true;
    const Nanos left = std::chrono::duration_cast<Nanos>(end - Clock::now());
    if (left <= Nanos::zero()) return false;
    sleep_while(newest, seen, left);
  }
}

// What has to be computed before the wait is an argument too; it is not read.
static ffi::Error ReadBoard(ffi::Buffer<ffi::U32> where, S32 number, ffi::AnyBuffer,
                            ffi::Result<S32> values) {
  if (where.element_count() != 2 || number.element_count() != 1)
    return ffi::Error::InvalidArgument("read_board: an address of two words and one number");
  const uint32_t* half = where.typed_data();
  auto* header = reinterpret_cast<uint64_t*>(uint64_t(half[1]) << 32 | half[0]);
  const uint64_t want = uint32_t(number.typed_data()[0]);
  int32_t* out = values->typed_data();
  if (want && await_number(header, want)) {
    std::memcpy(out, header + kHeaderWords, values->size_bytes());
    return ffi::Error::Success();
  }
  if (want) __atomic_store_n(header + 1 + want % kLatePlaces, want, __ATOMIC_RELEASE);
  std::fill_n(out, values->element_count(), kNothing);
  return ffi::Error::Success();
}

}  // namespace lora_jax

extern "C" void lora_jax_board_post(uint64_t* header, uint64_t number) {
  lora_jax::post(header, number);
}

extern "C" void lora_jax_board_set_patience(double seconds) {
  lora_jax::patience = int64_t(seconds * 1e9);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    lora_jax_read_board, lora_jax::ReadBoard,
    ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::U32>>().Arg<S32>().Arg<ffi::AnyBuffer>().Ret<S32>());
