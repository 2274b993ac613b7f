// The instructions of csrc/device/ptx.cuh, for the emulator.
#pragma once
#include "cuda_emulator.h"
#include "device/arithmetic.cuh"

namespace lora_jax {

inline uint32_t smem_u32(const void* p) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(p) - emu::machine.current->block->shared.data());
}
inline void mbar_init(uint64_t* bar, int count) { emu::barrier(bar) = emu::Barrier{count, count, 0, false}; }
inline void mbar_arrive(uint64_t* bar) {
  emu::Barrier& b = emu::barrier(bar);
  if (b.count == 0) emu::fail("a barrier was used before it was made");
  if (--b.pending < 0) emu::fail("more arrivals at a barrier than it expects");
  emu::settle(b);
}
inline void mbar_arrive_if(uint64_t* bar, bool wanted) {
  if (wanted) mbar_arrive(bar);
}
inline void mbar_arrive_seen(uint64_t* bar, bool wanted, uint32_t seen, uint32_t nothing) {
  mbar_arrive_if(bar + (seen & nothing), wanted);
}
inline void mbar_expect(uint64_t* bar, uint32_t bytes) {
  emu::barrier(bar).bytes += bytes;
  mbar_arrive(bar);
}
inline void mbar_wait(uint64_t* bar, uint32_t parity) {
  emu::Barrier& b = emu::barrier(bar);
  if (b.count == 0) emu::fail("a barrier was used before it was made");
  emu::wait_until([&] { return b.phase != static_cast<bool>(parity); });
}
inline void bulk_copy(uint32_t dst, const void* src, uint32_t bytes, uint64_t* bar) {
  if (dst % 16 || bytes % 16 || reinterpret_cast<uintptr_t>(src) % 16) emu::fail("a bulk copy off its boundary of 16");
  emu::copy_later([=](unsigned char* to) { std::memcpy(to, src, bytes); }, dst, bytes, bar);
}
inline void box_copy(uint32_t dst, const CUtensorMap* map, int row, int block, uint64_t* bar) {
  emu::tensor_copy(dst, map, {0, row, block}, bar);
}
inline void page_copy(uint32_t dst, const CUtensorMap* map, int place, int block, int head, int page, uint64_t* bar) {
  emu::tensor_copy(dst, map, {0, place, block, head, page}, bar);
}
inline void tile_copy(uint32_t dst, const CUtensorMap* map, int column, int row, int block, int matrix, uint64_t* bar) {
  emu::tensor_copy(dst, map, {column, row, block, matrix}, bar);
}
inline void tile_store(const CUtensorMap* map, int row, int block, int matrix, uint32_t src) {
  emu::tensor_store(map, {0, row, block, matrix}, src);
}
inline void stores_commit() { emu::machine.current->stores.emplace_back(); }
template <int PENDING>
inline void stores_wait() {
  emu::finish_groups(emu::machine.current->stores, PENDING);
}
inline void copy_16(uint32_t dst, const void* src, int bytes) {
  if (dst % 16 || reinterpret_cast<uintptr_t>(src) % 16) emu::fail("a copy off its boundary of 16");
  unsigned char* to = emu::at_shared(dst);
  emu::machine.current->groups.back().push_back([=] {
    std::memset(to, 0, 16);
    std::memcpy(to, src, bytes);
  });
}
inline void copy_piece(uint32_t dst, const void* src, int bytes, bool wanted) {
  if (dst % bytes || reinterpret_cast<uintptr_t>(src) % bytes) emu::fail("a copy off its boundary");
  unsigned char* to = emu::at_shared(dst);
  emu::machine.current->groups.back().push_back([=] {
    std::memset(to, 0, bytes);
    if (wanted) std::memcpy(to, src, bytes);
  });
}
inline void copy_4(uint32_t dst, const void* src) {
  if (dst % 4 || reinterpret_cast<uintptr_t>(src) % 4) emu::fail("a copy off its boundary of 4");
  unsigned char* to = emu::at_shared(dst);
  emu::machine.current->groups.back().push_back([=] { std::memcpy(to, src, 4); });
}
inline void copy_ahead(uint32_t dst, const void* src, int bytes) { copy_16(dst, src, bytes); }
inline void copies_commit() { emu::machine.current->groups.emplace_back(); }
template <int PENDING>
inline void copies_wait() {
  emu::finish_groups(emu::machine.current->groups, PENDING);
}
inline void copies_arrive(uint64_t* bar) {
  copies_commit();
  emu::finish_groups(emu::machine.current->groups, 0);
  mbar_arrive(bar);
}
inline void consumer_barrier(int threads) { emu::meet(emu::machine.current->block->consumers, threads); }
inline void named_barrier_wait(int barrier, int threads) { emu::meet(emu::machine.current->block->named[barrier], threads); }
inline void fence_barriers() {}
inline void fence_copies() {}
inline void fence_shared_copies() {}
inline void prefetch_map(const CUtensorMap*) {}
inline void acquire_map(const CUtensorMap*) {}
inline void prefetch_l1(const void*) {}
inline void prefetch_l2(const void*) {}
template <class T> inline T load_now(const T* p) {
  if (reinterpret_cast<uintptr_t>(p) % sizeof(T)) emu::fail("a load off its boundary");
  return *p;
}
template <class T> inline T load_own(const T* p) { return *p; }
inline uint32_t load_word(const uint32_t* p) {
  emu::yield();
  return *p;
}
inline uint4 load_words(const uint4* p) {
  emu::yield();
  return *p;
}
inline uint32_t acquire_word(const uint32_t* p) { return load_word(p); }
inline void release_count(uint32_t* p, uint32_t last) { *p = *p < last ? *p + 1 : 0, ++emu::machine.progress; }
inline void relaxed_count(uint32_t* p, uint32_t last) { release_count(p, last); }
inline void store_word(uint32_t* p, uint32_t v) { *p = v, ++emu::machine.progress; }
inline void let_next_begin() {}
inline void wait_for_previous() { emu::machine.waited = true; }
inline uint64_t load_acquire_sys(const uint64_t* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline void store_release_sys(uint64_t* p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
inline uint64_t poll_acquire_sys(const uint64_t* p) { return emu::let_others_in(), load_acquire_sys(p); }
inline void store_words_sys(uint4* p, uint4 v) { *p = v, ++emu::machine.progress; }
inline uint4 poll_words_sys(const uint4* p) { return emu::let_others_in(), *p; }
inline uint64_t poll_acquire(const uint64_t* p) { return emu::yield(), load_acquire_sys(p); }
inline void store_release(uint64_t* p, uint64_t v) { store_release_sys(p, v); }
inline int take_ticket_sys(int* p) { return __atomic_fetch_add(p, 1, __ATOMIC_ACQ_REL); }
inline uint64_t now_nanos() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}
inline void load_once(uint4& v, const void* p, bool wanted) {
  if (wanted && reinterpret_cast<uintptr_t>(p) % 16) emu::fail("a load of 16 bytes off its boundary");
  if (wanted) v = *static_cast<const uint4*>(p);
}
inline void load_last(uint4& v, const void* p, bool wanted) { load_once(v, p, wanted); }
inline void store_last(void* p, uint4 v, bool wanted) {
  if (wanted && reinterpret_cast<uintptr_t>(p) % 16) emu::fail("a store of 16 bytes off its boundary");
  if (wanted) *static_cast<uint4*>(p) = v;
}
inline uint4 lds128(uint32_t address) {
  if (address % 16) emu::fail("a load of 16 bytes off its boundary");
  uint4 v;
  std::memcpy(&v, emu::at_shared(address), 16);
  return v;
}
inline uint4 lds128_in_order(uint32_t addr) { return lds128(addr); }
inline uint32_t lds32(uint32_t address) {
  if (address % 4) emu::fail("a load of 4 bytes off its boundary");
  uint32_t v;
  std::memcpy(&v, emu::at_shared(address), 4);
  return v;
}
inline uint2 lds64(uint32_t address) {
  if (address % 8) emu::fail("a load of 8 bytes off its boundary");
  return {lds32(address), lds32(address + 4)};
}
inline void sts32(uint32_t address, uint32_t x) {
  if (address % 4) emu::fail("a store of 4 bytes off its boundary");
  std::memcpy(emu::at_shared(address), &x, 4);
}
inline void sts64(uint32_t address, uint32_t x, uint32_t y) {
  if (address % 8) emu::fail("a store of 8 bytes off its boundary");
  const uint32_t both[] = {x, y};
  std::memcpy(emu::at_shared(address), both, 8);
}
inline void sts128(uint32_t address, uint4 v) {
  if (address % 16) emu::fail("a store of 16 bytes off its boundary");
  std::memcpy(emu::at_shared(address), &v, 16);
}

inline void mma_bf16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  struct Fragments { uint32_t a[4], b[2]; };
  const auto* slots = emu::exchange("mma", Fragments{{a0, a1, a2, a3}, {b0, b1}});
  const int g = emu::lane() >> 2, q = emu::lane() & 3;
  float rows[2][16], columns[2][16];
  for (int k = 0; k < 16; ++k) {
    const int lane = k % 8 / 2, half = k / 8;
    const Fragments& of_rows = emu::shown<Fragments>(slots, g * 4 + lane);
    for (int e = 0; e < 2; ++e) {
      rows[e][k] = emulated_half(of_rows.a[e + half * 2], k & 1);
      columns[e][k] = emulated_half(emu::shown<Fragments>(slots, (q * 2 + e) * 4 + lane).b[half], k & 1);
    }
  }
  float sums[4] = {};
  for (int k = 0; k < 16; ++k)
    for (int i = 0; i < 4; ++i) sums[i] += rows[i >> 1][k] * columns[i & 1][k];
  for (int i = 0; i < 4; ++i) c[i] += sums[i];
}

inline void ldmatrix_any(uint32_t (&r)[4], uint32_t address, bool transposed) {
  if (address % 16) emu::fail("ldmatrix off its boundary of 16");
  const auto* slots = emu::exchange(transposed ? "ldmatrix.trans" : "ldmatrix", address);
  const int g = emu::lane() >> 2, q = emu::lane() & 3;
  for (int m = 0; m < 4; ++m) {
    uint16_t pair[2];
    for (int e = 0; e < 2; ++e) {
      const int row = transposed ? q * 2 + e : g, column = transposed ? g : q * 2 + e;
      std::memcpy(&pair[e], emu::at_shared(emu::shown<uint32_t>(slots, m * 8 + row)) + column * 2, 2);
    }
    r[m] = pair[0] | static_cast<uint32_t>(pair[1]) << 16;
  }
}
inline uint32_t transposed(uint32_t pair) {
  const auto* slots = emu::exchange("movmatrix", pair);
  const int g = emu::lane() >> 2, q = emu::lane() & 3;
  uint32_t r = 0;
  for (int e = 0; e < 2; ++e)
    r |= (emu::shown<uint32_t>(slots, (q * 2 + e) * 4 + g / 2) >> g % 2 * 16 & 0xffff) << e * 16;
  return r;
}
inline void ldmatrix(uint32_t (&r)[4], uint32_t address) { ldmatrix_any(r, address, false); }
inline void ldmatrix_trans(uint32_t (&r)[4], uint32_t address) { ldmatrix_any(r, address, true); }

inline int uniform(int v) {
  const auto* slots = emu::exchange("uniform", v);
  for (int i = 0; i < 32; ++i)
    if (emu::shown<int>(slots, i) != v) emu::fail("lanes have other numbers");
  return v;
}
inline int thread_anew() { return threadIdx.x; }
template <int COUNT>
inline void fewer_registers() {}
template <int COUNT>
inline void more_registers() {}

}  // namespace lora_jax
