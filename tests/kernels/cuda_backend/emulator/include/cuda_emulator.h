// Runs CUDA kernels on a CPU: every thread of every CTA is a fiber, all on one OS thread.
//
// Warp operations and barriers wait for their peers, asynchronous copies arrive late and in any
// order (by a seed), so that a missing wait, a barrier that not all threads reach and two lanes in
// different operations are found out. What it cannot show: time, registers, memory order.
#pragma once
#include <bit>
#include <setjmp.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __grid_constant__
#define __constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(n) __attribute__((aligned(n)))

struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct alignas(8) uint2 { uint32_t x, y; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

struct __nv_bfloat16 { uint16_t bits; };
struct __nv_bfloat162 { __nv_bfloat16 x, y; };
inline float emulated_float(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float f;
  std::memcpy(&f, &wide, 4);
  return f;
}
inline __nv_bfloat16 __float2bfloat16(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return {static_cast<uint16_t>(bits >> 16 | 64)};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
inline float __uint_as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t __float_as_uint(float f) { return std::bit_cast<uint32_t>(f); }
inline float __bfloat162float(__nv_bfloat16 v) { return emulated_float(v.bits); }
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {__float2bfloat16(a), __float2bfloat16(b)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {emulated_float(v.x.bits), emulated_float(v.y.bits)}; }

template <class T> T min(T a, T b) { return b < a ? b : a; }
template <class T> T max(T a, T b) { return a < b ? b : a; }
template <class T> T __ldg(const T* p) { return *p; }
template <class T> T __ldcs(const T* p) { return *p; }
template <class T> T __ldcg(const T* p) { return *p; }
template <class T> T __ldcv(const T* p) { return *p; }
template <class T> void __stcs(T* p, T v) { *p = v; }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __clz(unsigned v) { return v ? __builtin_clz(v) : 32; }
inline int __ffs(unsigned v) { return __builtin_ffs(static_cast<int>(v)); }
inline int __float_as_int(float f) { int i; std::memcpy(&i, &f, 4); return i; }
inline float __int_as_float(int i) { float f; std::memcpy(&f, &i, 4); return f; }
inline void __threadfence() {}
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline float __fmaf_rn(float x, float y, float z) { return std::fmaf(x, y, z); }
inline float __fdividef(float x, float y) { return x / y; }
inline int atomicAdd(int* p, int v) { const int old = *p; *p += v; return old; }
inline uint32_t atomicAdd(uint32_t* p, uint32_t v) { return std::exchange(*p, *p + v); }
inline uint32_t atomicInc(uint32_t* p, uint32_t last) { return std::exchange(*p, *p < last ? *p + 1 : 0); }
inline int atomicExch(int* p, int v) { const int old = *p; *p = v; return old; }
inline unsigned long long atomicAdd(unsigned long long* p, unsigned long long v) { return std::exchange(*p, *p + v); }
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t both = static_cast<uint64_t>(y) << 32 | x;
  uint32_t r = 0;
  for (int i = 0; i < 4; ++i) r |= static_cast<uint32_t>(both >> ((selector >> 4 * i & 7) * 8) & 255) << 8 * i;
  return r;
}

namespace emu {

struct Dim { unsigned x, y, z; };
[[noreturn]] inline void fail(const char* why) {
  std::fprintf(stderr, "emulated kernel: %s\n", why);
  std::fflush(stderr);
  std::abort();
}

struct Rendezvous {  // of the threads of a warp, a CTA or a part of it
  int arrived = 0;
  uint64_t generation = 0;
};
struct Warp {
  Rendezvous all;
  struct Slot { const char* what; uint64_t values[4]; } slots[2][32];  // by parity of the generation
};
struct Barrier {  // mbarrier
  int count = 0, pending = 0;
  int64_t bytes = 0;
  bool phase = false;
};
struct Block {
  Dim index;
  unsigned threads;
  bool ended = false;  // one of its threads has
  std::vector<unsigned char> shared;
  std::map<int, std::vector<unsigned char>> fixed;  // static shared arrays, by line
  std::vector<Warp> warps;
  Rendezvous all, consumers, cluster;  // the last one in the first CTA of a cluster
  std::map<const uint64_t*, Barrier> barriers;
  std::map<int, Rendezvous> named;
};
constexpr size_t kStackBytes = 128 << 10;

using Stack = std::unique_ptr<char[]>;

struct Fiber {
  Stack stack;
  ucontext_t start;  // where it begins
  jmp_buf here;      // where it goes on: a switch by ucontext would be two system calls
  bool begun = false;
  Block* block;
  Dim thread;
  bool done = false;
  uint64_t cluster_turn = 0;  // of its last arrival at the cluster's barrier
  const void* condition = nullptr;  // what it waits for, on its own stack
  bool (*holds)(const void*) = nullptr;
  using Groups = std::vector<std::vector<std::function<void()>>>;
  Groups groups{1}, stores{1};  // cp.async and bulk groups, the last one open
};
struct Machine {
  Dim grid{1, 1, 1}, block_dim{1, 1, 1};
  Fiber* current = nullptr;
  jmp_buf scheduler;
  std::vector<std::function<void()>> copies;  // asynchronous ones on their way
  uint64_t progress = 0;
  uint32_t seed = 1;
  int sms = 1;
  std::vector<std::unique_ptr<Block>> blocks;  // that run side by side
  unsigned cluster_ctas = 1;
  bool waited = false;  // a thread of the kernel for the one before it
  uint32_t random() { return seed = seed * 1664525u + 1013904223u, seed >> 8; }
};
inline Machine machine;

inline void yield() {
  if (!_setjmp(machine.current->here)) _longjmp(machine.scheduler, 1);
}
inline void resume(Fiber& f) {
  machine.current = &f;
  if (_setjmp(machine.scheduler)) return;
  if (f.begun) _longjmp(f.here, 1);
  f.begun = true;
  setcontext(&f.start);
}
// The scheduler looks at the condition, so that a thread which waits costs no switch.
template <class Condition> void wait_until(Condition condition) {
  if (!condition()) {
    Fiber* f = machine.current;
    f->condition = &condition;
    f->holds = [](const void* c) { return (*static_cast<const Condition*>(c))(); };
    yield();
    f->condition = nullptr;
  }
  ++machine.progress;
}
inline void meet(Rendezvous& r, int threads) {
  const uint64_t mine = r.generation;
  if (++r.arrived == threads) {
    r.arrived = 0, ++r.generation, ++machine.progress;
  } else {
    wait_until([&] { return r.generation != mine; });
  }
}
inline int lane() { return machine.current->thread.x & 31; }
inline Warp& warp() { return machine.current->block->warps[machine.current->thread.x >> 5]; }

// Every lane shows its values; returns what all of them showed. `what` must agree.
template <class T> const Warp::Slot* exchange(const char* what, const T& value) {
  static_assert(sizeof(T) <= sizeof(uint64_t) * 4);
  Warp& w = warp();
  Warp::Slot* slots = w.slots[w.all.generation & 1];
  slots[lane()].what = what;
  std::memcpy(slots[lane()].values, &value, sizeof(T));
  meet(w.all, 32);
  if (std::strcmp(slots[(lane() + 1) & 31].what, what)) fail("lanes of a warp are in different operations");
  return slots;
}
template <class T> T shown(const Warp::Slot* slots, int lane) {
  T value;
  std::memcpy(&value, slots[lane].values, sizeof(T));
  return value;
}

inline void* dynamic_shared() { return machine.current->block->shared.data(); }
template <class T> T& static_shared(int line) {
  auto& bytes = machine.current->block->fixed[line];
  if (bytes.empty()) bytes.resize(sizeof(T), 0xff);
  if (bytes.size() != sizeof(T)) fail("shared arrays of two sizes on lines of the same number");
  return *reinterpret_cast<T*>(bytes.data());
}
inline unsigned char* at_shared(uint32_t address) { return machine.current->block->shared.data() + address; }

inline Barrier& barrier(uint64_t* bar) { return machine.current->block->barriers[bar]; }
inline void settle(Barrier& b) {
  if (b.pending == 0 && b.bytes == 0) b.phase = !b.phase, b.pending = b.count, ++machine.progress;
}
// A copy of the copy engine: `move` now or later, then `bytes` count towards the barrier.
inline void copy_later(std::function<void(unsigned char*)> move, uint32_t dst, int64_t bytes, uint64_t* bar) {
  Barrier* b = &barrier(bar);
  unsigned char* to = at_shared(dst);
  machine.copies.push_back([=] {
    move(to);
    b->bytes -= bytes;
    settle(*b);
  });
}
inline void run_a_copy() {
  const size_t i = machine.random() % machine.copies.size();
  const auto copy = std::move(machine.copies[i]);
  machine.copies.erase(machine.copies.begin() + i);
  ++machine.progress;
  copy();
}

inline std::function<void()>* entry;
inline void enter() {
  (*entry)();
  machine.current->done = true, ++machine.progress;
  yield();
}

// Runs the CTAs [first, last) side by side until all their threads have ended.
inline void run_blocks(unsigned first, unsigned last, unsigned threads, size_t shared) {
  std::vector<std::unique_ptr<Block>>& blocks = machine.blocks;
  std::vector<std::unique_ptr<Fiber>> fibers;
  static std::vector<Stack> stacks;  // of fibers before: their memory is there already
  blocks.clear();
  for (unsigned b = first; b < last; ++b) {
    blocks.push_back(std::make_unique<Block>());
    Block& block = *blocks.back();
    block.index = {b, 0, 0}, block.threads = threads;
    block.shared.assign(shared + 16, 0xff);  // NaN, and a bad barrier
    block.warps.resize(threads / 32);
    for (unsigned t = 0; t < threads; ++t) {
      fibers.push_back(std::make_unique<Fiber>());
      Fiber& f = *fibers.back();
      f.block = &block, f.thread = {t, 0, 0};
      f.stack = stacks.empty() ? Stack(new char[kStackBytes]) : std::move(stacks.back());
      if (!stacks.empty()) stacks.pop_back();
      getcontext(&f.start);
      f.start.uc_stack.ss_sp = f.stack.get(), f.start.uc_stack.ss_size = kStackBytes, f.start.uc_link = nullptr;
      makecontext(&f.start, reinterpret_cast<void (*)()>(enter), 0);
    }
  }
  size_t alive = fibers.size();
  uint64_t seen = ~0ull;
  for (int idle = 0; alive;) {
    for (auto& f : fibers) {
      if (f->done || (f->condition && !f->holds(f->condition))) continue;
      resume(*f);
      if (f->done) --alive, f->block->ended = true;
      if (!machine.copies.empty() && machine.random() % 16 == 0) run_a_copy();
    }
    idle = machine.progress == seen ? idle + 1 : 0, seen = machine.progress;
    if (idle && !machine.copies.empty()) run_a_copy();
    if (idle > 1000) fail("deadlock: every thread waits");
  }
  for (auto& f : fibers) {
    for (auto* groups : {&f->groups, &f->stores})
      for (auto& group : *groups)
        if (!group.empty()) fail("a thread ended with copies it had not waited for");
    stacks.push_back(std::move(f->stack));
  }
  if (!machine.copies.empty()) fail("a CTA ended with copies on their way");
}

// One kernel runs at a time, whatever the number of devices and threads; one that polls for what
// another kernel or the host does lets them in, in the order in which they came.
inline std::atomic<unsigned> next_turn{0}, turn{0};
inline void take_turn() {
  const unsigned mine = next_turn++;
  for (unsigned now; (now = turn) != mine;) turn.wait(now);
}
inline void end_turn() { ++turn, turn.notify_all(); }
inline void let_others_in() {
  ++machine.progress;
  Machine mine = std::move(machine);
  std::function<void()>* own_entry = entry;
  end_turn();
  usleep(20);
  take_turn();
  machine = std::move(mine), entry = own_entry;
}

constexpr unsigned kTogether = 4, kClustersTogether = 8;  // CTAs, clusters; a persistent grid is smaller

// `early`: it may begin while the kernel before it runs. What comes after waits for this kernel alone, so one of its
// threads has to wait for the other, even if it needs nothing of it.
template <class Kernel, class... Args>
void launch_with(unsigned cluster_ctas, bool early, Kernel kernel, unsigned grid, unsigned threads, size_t shared, const Args&... args) {
  if (threads % 32 || threads > 1024) fail("a CTA of no whole warps, or too large");
  if (shared > 232448) fail("more shared memory than a CTA of Hopper can have");
  take_turn();
  machine.grid.x = grid, machine.block_dim.x = threads, machine.cluster_ctas = cluster_ctas;
  machine.waited = false;
  const unsigned together = cluster_ctas > 1 ? kClustersTogether * cluster_ctas : kTogether;
  std::function<void()> body = [&] { kernel(args...); };
  entry = &body;
  for (unsigned b = 0; b < grid; b += together) run_blocks(b, min(grid, b + together), threads, shared);
  if (early && !machine.waited) fail("a kernel that began early ended without a wait for the one before");
  end_turn();
}
template <class Kernel, class... Args>
void launch(Kernel kernel, unsigned grid, unsigned threads, size_t shared, const Args&... args) {
  launch_with(1, false, kernel, grid, threads, shared, args...);
}

}  // namespace emu

#define threadIdx (emu::machine.current->thread)
#define blockIdx (emu::machine.current->block->index)
#define gridDim (emu::machine.grid)
#define blockDim (emu::machine.block_dim)

inline void __syncthreads() { emu::meet(emu::machine.current->block->all, emu::machine.current->block->threads); }
inline void __syncwarp() { emu::exchange("syncwarp", 0); }
inline void __nanosleep(unsigned) { emu::yield(); }
template <class T> T __shfl_sync(unsigned, T v, int from) { return emu::shown<T>(emu::exchange("shfl", v), from & 31); }
template <class T> T __shfl_xor_sync(unsigned, T v, int mask) {
  return emu::shown<T>(emu::exchange("shfl_xor", v), emu::lane() ^ mask);
}
inline int __any_sync(unsigned, int v) {
  const auto* slots = emu::exchange("any", v);
  bool any = false;
  for (int i = 0; i < 32; ++i) any = any || emu::shown<int>(slots, i);
  return any;
}
template <class T> T __shfl_up_sync(unsigned, T v, unsigned by) {
  const auto* slots = emu::exchange("shfl_up", v);
  return emu::lane() >= static_cast<int>(by) ? emu::shown<T>(slots, emu::lane() - by) : v;
}
inline unsigned __ballot_sync(unsigned, bool v) {
  const auto* slots = emu::exchange("ballot", v);
  unsigned all = 0;
  for (int i = 0; i < 32; ++i) all |= static_cast<unsigned>(emu::shown<bool>(slots, i)) << i;
  return all;
}
template <class T> unsigned __match_any_sync(unsigned, T v) {
  const auto* slots = emu::exchange("match_any", v);
  unsigned same = 0;
  for (int i = 0; i < 32; ++i) same |= static_cast<unsigned>(emu::shown<T>(slots, i) == v) << i;
  return same;
}

// ---------------------------------------------------------------- the runtime, as far as it is used
using cudaStream_t = void*;
enum cudaError_t { cudaSuccess, cudaErrorInvalidValue, cudaErrorNotSupported };
inline const char* cudaGetErrorString(cudaError_t) { return "an emulated error"; }
struct cudaFuncAttributes {};
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void*) { return cudaSuccess; }
using cudaEvent_t = void*;  // everything happens in order
constexpr unsigned cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2;
inline cudaError_t cudaDeviceGetStreamPriorityRange(int*, int*) { return cudaSuccess; }
inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t*, unsigned, int) { return cudaSuccess; }
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t*, unsigned) { return cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
constexpr int cudaMemcpyDeviceToDevice = 3;
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, int, cudaStream_t) {
  return std::memcpy(to, from, bytes), cudaSuccess;
}
constexpr int cudaFuncAttributeMaxDynamicSharedMemorySize = 0, cudaDevAttrMultiProcessorCount = 0;
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
template <class K> cudaError_t cudaFuncSetAttribute(K, int, int) { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, int, int) { return *value = emu::machine.sms, cudaSuccess; }

struct dim3 {
  unsigned x;
  explicit dim3(unsigned x) : x(x) {}
};
struct cudaLaunchAttribute {
  int id;
  struct {
    int programmaticStreamSerializationAllowed;
    struct { unsigned x, y, z; } clusterDim;
  } val;
};
constexpr int cudaLaunchAttributeProgrammaticStreamSerialization = 0, cudaLaunchAttributeClusterDimension = 1;
constexpr int cudaFuncAttributeNonPortableClusterSizeAllowed = 1;
struct cudaLaunchConfig_t {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};
template <class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* c, void (*kernel)(Args...), const Args&... args) {
  unsigned cluster_ctas = 1;
  bool early = false;
  for (unsigned i = 0; i < c->numAttrs; ++i) {
    const auto& [id, val] = c->attrs[i];
    if (id == cudaLaunchAttributeClusterDimension) cluster_ctas = val.clusterDim.x;
    if (id == cudaLaunchAttributeProgrammaticStreamSerialization) early = val.programmaticStreamSerializationAllowed;
  }
  emu::launch_with(cluster_ctas, early, kernel, c->grid.x, c->block.x, c->shared, args...);
  return cudaSuccess;
}

// ---------------------------------------------------------------- tensor maps
using cuuint64_t = uint64_t;
using cuuint32_t = uint32_t;
enum CUresult { CUDA_SUCCESS, CUDA_ERROR_INVALID_VALUE };
enum { CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_128B };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B };
struct CUtensorMap {
  const unsigned char* base;
  int rank;
  uint64_t dims[5], strides[5];  // strides[i]: bytes of a step in dimension i
  uint32_t box[5];
  bool swizzled;
};

inline CUresult cuTensorMapEncodeTiled(CUtensorMap* map, int, uint32_t rank, void* base, const cuuint64_t* dims,
                                       const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t*, int,
                                       CUtensorMapSwizzle swizzle, int, int) {
  map->base = static_cast<const unsigned char*>(base), map->rank = static_cast<int>(rank), map->swizzled = swizzle != CU_TENSOR_MAP_SWIZZLE_NONE;
  for (uint32_t i = 0; i < rank; ++i) {
    if (box[i] > 256 || box[i] == 0 || dims[i] == 0) return CUDA_ERROR_INVALID_VALUE;
    if (i && strides[i - 1] % 16) return CUDA_ERROR_INVALID_VALUE;
    map->dims[i] = dims[i], map->strides[i] = i ? strides[i - 1] : 2, map->box[i] = box[i];
  }
  return map->swizzled && box[0] * 2 > 128 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;  // the swizzle's width
}

namespace emu {

// Runs the groups that must be done when `pending` may still be open: as late as they may come.
inline void finish_groups(Fiber::Groups& groups, int pending) {
  while (static_cast<int>(groups.size()) > pending + 1) {
    for (auto& copy : groups.front()) copy();
    groups.erase(groups.begin());
  }
}

// Calls f(place in the box in bytes, element or null outside the tensor) for a box whose first row is
// at `shared`; 16-byte pieces are swizzled within 128 bytes by the row's place in 1024.
template <class F>
void each_element(const CUtensorMap& m, const std::vector<int>& at, uint32_t shared, F f) {
  int64_t rows = 1;
  for (int i = 1; i < m.rank; ++i) rows *= m.box[i];
  for (int64_t r = 0; r < rows; ++r) {
    int64_t left = r, offset = 0;
    bool inside = true;
    for (int i = 1; i < m.rank; ++i) {
      const int64_t place = at[i] + left % m.box[i];
      left /= m.box[i], offset += place * static_cast<int64_t>(m.strides[i]);
      inside = inside && place >= 0 && place < static_cast<int64_t>(m.dims[i]);
    }
    for (uint32_t e = 0; e < m.box[0]; ++e) {
      const int64_t column = at[0] + e;
      const uint32_t linear = static_cast<uint32_t>(r) * (m.swizzled ? 128 : m.box[0] * 2) + e * 2;
      const uint32_t row = m.swizzled ? (shared + linear) >> 7 & 7 : 0;
      const bool there = inside && column < static_cast<int64_t>(m.dims[0]);
      f(linear ^ row << 4, there ? const_cast<unsigned char*>(m.base) + offset + column * 2 : nullptr);
    }
  }
}
inline int64_t box_bytes(const CUtensorMap& m) {
  int64_t elements = 1;
  for (int i = 0; i < m.rank; ++i) elements *= m.box[i];
  return elements * 2;
}
// Elements outside the tensor become zero.
inline void tensor_copy(uint32_t dst, const CUtensorMap* map, std::vector<int> at, uint64_t* bar) {
  if (dst % 128) fail("a swizzled box begins off its boundary");
  auto move = [=, m = *map](unsigned char* to) {
    each_element(m, at, dst, [&](uint32_t place, const unsigned char* from) {
      const unsigned char none[2] = {0, 0};
      std::memcpy(to + place, from ? from : none, 2);
    });
  };
  copy_later(move, dst, box_bytes(*map), bar);
}
// Elements outside the tensor are dropped.
inline void tensor_store(const CUtensorMap* map, std::vector<int> at, uint32_t src) {
  if (src % 128) fail("a swizzled box begins off its boundary");
  const unsigned char* from = at_shared(src);
  machine.current->stores.back().push_back([=, m = *map] {
    each_element(m, at, src, [&](uint32_t place, unsigned char* to) {
      if (to) std::memcpy(to, from + place, 2);
    });
  });
}

}  // namespace emu
