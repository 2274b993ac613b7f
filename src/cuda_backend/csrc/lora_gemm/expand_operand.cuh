// How the multiplying warps get the h of an expand unit. Up to kHeldRows rows: with the unit's ticket, or from
// memory if h was not ready then. More rows: from the shared memory that a row warp has filled.
#pragma once
#include "lora_gemm/units.cuh"

namespace lora_jax {

// What one lane multiplies weights by: h of 16 rank rows a step, of rows n0 + 8 * j + (lane / 4).
template <int STEPS, int J>
using Factors = uint32_t[STEPS][J][2];

// Takes h from the ticket; returns false where some of it was missing.
template <int STEPS>
__device__ __forceinline__ bool held_h(const Ticket<STEPS * 16>& t, Factors<STEPS, 1>& h) {
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  const uint32_t* from = t.h + (g < t.unit.num_rows ? g : 0) * t.kWords + q;
  bool missing = false;
#pragma unroll
  for (int s = 0; s < STEPS; ++s) {
    h[s][0][0] = s * 2 < t.unit.groups ? from[s * 8] : 0u;
    h[s][0][1] = s * 2 + 1 < t.unit.groups ? from[s * 8 + 4] : 0u;
    missing = missing || h[s][0][0] == kMissing || h[s][0][1] == kMissing;
  }
  return !__any_sync(~0u, missing);
}

// Waits until the h of the unit's last row is there: so much less is asked for than by those who want
// all of it that the many who wait do not keep memory from those who write.
__device__ __forceinline__ void wait_for_last_row(const PairArgs& p, const Unit& u) {
  const int64_t row = static_cast<int64_t>(u.module) * p.num_rows + u.place + u.num_rows - 1;
  const auto* words = reinterpret_cast<const uint32_t*>(p.h + row * p.h_stride);
  bool missing;
  do {
    __nanosleep(64);
    missing = false;
    for (int i = threadIdx.x & 31; i < u.groups * 4; i += 32) missing = missing || load_word(words + i) == kMissing;
  } while (__any_sync(~0u, missing));
}

// By a row warp: brings the h of a unit of more rows while the one before it is multiplied, waiting for it where
// it is still to come.
template <class S>
__device__ __forceinline__ void bring_h(const PairArgs& p, S& sm, const Unit& u, uint32_t& phase) {
  using Held = typename S::Held;
  constexpr int kLoads = 8;  // at once
  const int lane = threadIdx.x & 31;
  const __nv_bfloat16* from = p.h + (static_cast<int64_t>(u.module) * p.num_rows + u.place) * p.h_stride;
  if (p.shrink) mbar_wait(&sm.cleared, 0);
  mbar_wait(&sm.h_empty, phase ^ 1);
  while (true) {
    bool missing = false;
#pragma unroll 1
    for (int first = lane; first < u.num_rows * Held::kChunks; first += 32 * kLoads) {
      uint4 v[kLoads];
      auto each = [&](auto f) {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          const int at = first + i * 32, n = at / Held::kChunks, chunk = at % Held::kChunks;
          if (n < u.num_rows && chunk < u.groups) f(v[i], n, chunk);
        }
      };
      each([&](uint4& v, int n, int chunk) {
        v = load_words(reinterpret_cast<const uint4*>(from + n * p.h_stride) + chunk);
      });
      each([&](uint4& v, int n, int chunk) {
        missing = missing || v.x == kMissing || v.y == kMissing || v.z == kMissing || v.w == kMissing;
        sm.held.chunks[Held::at(n, chunk)] = v;
      });
    }
    if (!__any_sync(~0u, p.shrink && missing)) break;
    wait_for_last_row(p, u);
  }
  __syncwarp();
  if (lane == 0) mbar_arrive(&sm.h_full);
  phase ^= 1;
}

// Takes what that has brought, of rows n0 + 8 * j + (lane / 4).
template <int STEPS, int J, class S>
__device__ __forceinline__ void take_h(S& sm, const Unit& u, int n0, uint32_t& phase, Factors<STEPS, J>& h) {
  using Held = typename S::Held;
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  mbar_wait(&sm.h_full, phase);
  phase ^= 1;
#pragma unroll
  for (int j = 0; j < J; ++j) {
    const int n = n0 + j * 8 + g < u.num_rows ? n0 + j * 8 + g : 0;
    auto word = [&](int chunk) {
      return chunk < u.groups ? reinterpret_cast<const uint32_t*>(&sm.held.chunks[Held::at(n, chunk)])[q] : 0u;
    };
#pragma unroll
    for (int s = 0; s < STEPS; ++s) h[s][j][0] = word(s * 2), h[s][j][1] = word(s * 2 + 1);
  }
  __syncwarp();
  if (lane == 0) mbar_arrive(&sm.h_empty);
}

// Loads h, which other CTAs are writing, until all of it is there. Rows and ranks past the end are
// not used.
template <int STEPS, int J>
__device__ __forceinline__ void load_h(const PairArgs& p, const Unit& u, int n0, Factors<STEPS, J>& h) {
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  while (true) {
    bool missing = false;
#pragma unroll
    for (int j = 0; j < J; ++j) {
      const int n = n0 + j * 8 + g < u.num_rows ? n0 + j * 8 + g : 0;
      const int64_t row = static_cast<int64_t>(u.module) * p.num_rows + u.place + n;
      const auto* from = reinterpret_cast<const uint32_t*>(p.h + row * p.h_stride) + q;
#pragma unroll
      for (int s = 0; s < STEPS; ++s) {
        h[s][j][0] = s * 2 < u.groups ? load_word(from + s * 8) : 0u;
        h[s][j][1] = s * 2 + 1 < u.groups ? load_word(from + s * 8 + 4) : 0u;
        missing = missing || h[s][j][0] == kMissing || h[s][j][1] == kMissing;
      }
    }
    if (!__any_sync(~0u, p.shrink && missing)) return;
    wait_for_last_row(p, u);
  }
}

// Fills h, from wherever it is. `phase`: of what a row warp brings.
template <int STEPS, int J, class S, class Ticket>
__device__ __forceinline__ void get_h(const PairArgs& p, S& sm, const Ticket& t, int n0, uint32_t& phase,
                                      Factors<STEPS, J>& h) {
  if constexpr (J == 1) {
    if (t.unit.num_rows <= kHeldRows && held_h(t, h)) return;
  }
  if constexpr (S::kBringsH) {
    if (J > 1 || t.unit.num_rows > kHeldRows) return take_h<STEPS, J>(sm, t.unit, n0, phase, h);
  }
  if (p.shrink) mbar_wait(&sm.cleared, 0);
  load_h<STEPS, J>(p, t.unit, n0, h);
}

}  // namespace lora_jax
