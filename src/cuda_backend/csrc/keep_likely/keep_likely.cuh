// The smallest logit of each row that min_p, top_k and top_p keep; one CTA per row.
//
// Thresholds are found by three digits of 11, 11 and 10 bits of the logit's ordered image: a pass counts or
// weighs the logits by digit. Counts and weights are integers, so that no result depends on the order of sums.
// With top_k the passes after the second read only the remaining logits, from shared memory.
#pragma once
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

namespace lora_jax {

struct KeepLikelyArgs {
  const float* logits;  // [rows, vocab]
  const float* min_p;   // [rows]; 0: off
  const int* top_k;     // [rows]; 0: off
  const float* top_p;   // [rows]; 1: off
  float* least;         // [rows]; -infinity where everything is kept
  int rows, vocab;
};

constexpr int kKeepThreads = 1024, kKeepWarps = kKeepThreads / 32;
constexpr int kDigits = 2048;     // of 11 bits; two a thread
constexpr int kMostLeft = 4096;   // logits that shared memory holds
constexpr int kHalfBits = 13;     // a weight is at most 2^26 and is added in two halves

struct KeepShared {
  uint32_t upper[kDigits], lower[kDigits];  // sums of the halves of weights, by digit
  uint32_t left[kMostLeft];                 // images
  uint2 warp_sums[kKeepWarps];
  uint32_t warp_values[kKeepWarps];
  uint2 above;        // sums of what lies above the digit that was found
  uint32_t digit, at_digit;  // at_digit: lower sum of the digit and all above it
  int num_left;
};

// Unsigned integers in the order of the floats; both zeros are one.
__device__ __forceinline__ uint32_t ordered_image(float v) {
  const uint32_t bits = v == 0 ? 0 : static_cast<uint32_t>(__float_as_int(v));
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float value_of(uint32_t image) {
  return __int_as_float(static_cast<int>(image >> 31 ? image & 0x7fffffffu : ~image));
}
__device__ __forceinline__ float joined(uint2 halves) {
  return static_cast<float>(halves.x) * (1 << kHalfBits) + static_cast<float>(halves.y);
}
__device__ __forceinline__ uint2 operator+(uint2 a, uint2 b) { return make_uint2(a.x + b.x, a.y + b.y); }

// The largest value that a thread of the CTA has, in all threads.
__device__ __forceinline__ uint32_t cta_max(KeepShared& sm, uint32_t v) {
#pragma unroll
  for (int d = 16; d; d /= 2) v = max(v, __shfl_xor_sync(~0u, v, d));
  __syncthreads();
  if ((threadIdx.x & 31) == 0) sm.warp_values[threadIdx.x >> 5] = v;
  __syncthreads();
  v = sm.warp_values[threadIdx.x & 31];
#pragma unroll
  for (int d = 16; d; d /= 2) v = max(v, __shfl_xor_sync(~0u, v, d));
  return v;
}

__device__ __forceinline__ uint2 warp_scan_halves(uint2 v) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const uint2 other = make_uint2(__shfl_up_sync(~0u, v.x, d), __shfl_up_sync(~0u, v.y, d));
    if (static_cast<int>(threadIdx.x & 31) >= d) v = v + other;
  }
  return v;
}

// The logits of a row, or what is left of them.
struct KeepSource {
  const float* row;
  int vocab;
  const uint32_t* left;  // null: the whole row
  int num_left;

  // Calls `use` with the image of every logit above -infinity, once, by some thread.
  template <class Use>
  __device__ __forceinline__ void each(Use use) const {
    if (left) {
      for (int i = threadIdx.x; i < num_left; i += kKeepThreads) use(left[i]);
      return;
    }
    auto one = [&](float v) {
      if (v != -INFINITY) use(ordered_image(v));
    };
    if (vocab % 4) {
#pragma unroll 4
      for (int i = threadIdx.x; i < vocab; i += kKeepThreads) one(__ldg(row + i));
      return;
    }
#pragma unroll 4
    for (int i = threadIdx.x; i < vocab / 4; i += kKeepThreads) {
      const float4 v = __ldg(reinterpret_cast<const float4*>(row) + i);
      one(v.x), one(v.y), one(v.z), one(v.w);
    }
  }
};

// Finds one digit of the largest threshold t for which the weights of images >= t come to what is wanted.
// `prefix`: the digits before; `above`: sums of images past them. `wanted` maps all weights' sum to what is wanted.
template <class Weight, class Wanted>
__device__ __forceinline__ void find_digit(KeepShared& sm, const KeepSource& source, int shift, int bits,
                                           uint32_t prefix, uint2 above, Weight weight, Wanted wanted) {
  __syncthreads();
  for (int i = threadIdx.x; i < kDigits; i += kKeepThreads) sm.upper[i] = sm.lower[i] = 0;
  __syncthreads();
  source.each([&](uint32_t image) {
    if (static_cast<uint32_t>(static_cast<uint64_t>(image) >> (shift + bits)) != prefix) return;
    const uint32_t w = weight(image), digit = image >> shift & ((1u << bits) - 1);
    if (w >> kHalfBits) atomicAdd(&sm.upper[digit], w >> kHalfBits);
    if (w & ((1u << kHalfBits) - 1)) atomicAdd(&sm.lower[digit], w & ((1u << kHalfBits) - 1));
  });
  __syncthreads();
  const int high = kDigits - 1 - 2 * static_cast<int>(threadIdx.x), lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const uint2 first = make_uint2(sm.upper[high], sm.lower[high]);
  const uint2 second = make_uint2(sm.upper[high - 1], sm.lower[high - 1]);
  const uint2 scanned = warp_scan_halves(first + second);
  if (lane == 31) sm.warp_sums[warp] = scanned;
  __syncthreads();
  const uint2 of_warps = warp_scan_halves(sm.warp_sums[lane]);
  const uint2 all = above + make_uint2(__shfl_sync(~0u, of_warps.x, 31), __shfl_sync(~0u, of_warps.y, 31));
  const int before = max(warp - 1, 0);
  uint2 past = make_uint2(__shfl_sync(~0u, of_warps.x, before), __shfl_sync(~0u, of_warps.y, before));
  if (warp == 0) past = make_uint2(0, 0);
  const uint2 to_second = above + past + scanned;
  const uint2 to_none = make_uint2(to_second.x - first.x - second.x, to_second.y - first.y - second.y);
  const uint2 to_first = to_none + first;
  const float least = wanted(joined(all));
  const bool found = joined(to_first) >= least, found_next = joined(to_second) >= least;
  const bool found_before = threadIdx.x > 0 && joined(to_none) >= least;
  if (found && !found_before) {
    sm.digit = high, sm.above = to_none, sm.at_digit = to_first.y;
  } else if ((found_next && !found) || (threadIdx.x == kKeepThreads - 1 && !found_next)) {
    sm.digit = high - 1, sm.above = to_first, sm.at_digit = to_second.y;
  }
  __syncthreads();
}

// Keeps, of a row, the logits whose first digit is at least this one: there are few of them.
__device__ __forceinline__ void gather_left(KeepShared& sm, KeepSource& source, uint32_t digit) {
  if (threadIdx.x == 0) sm.num_left = 0;
  __syncthreads();
  source.each([&](uint32_t image) {
    if (image >> 21 >= digit) sm.left[atomicAdd(&sm.num_left, 1)] = image;
  });
  __syncthreads();
  source.left = sm.left, source.num_left = sm.num_left;
}

__global__ void __launch_bounds__(kKeepThreads) keep_likely_kernel(const KeepLikelyArgs p) {
  extern __shared__ __align__(16) unsigned char keep_raw[];
  auto& sm = *reinterpret_cast<KeepShared*>(keep_raw);
  const int row = blockIdx.x, top_k = p.top_k[row];
  const float min_p = p.min_p[row], top_p = p.top_p[row];
  KeepSource source{p.logits + static_cast<int64_t>(row) * p.vocab, p.vocab, nullptr, 0};
  uint32_t least = 0;
  if (top_k > 0) {
    const float wanted = static_cast<float>(top_k);
    auto one = [](uint32_t) { return 1u; };
    auto count = [&](float) { return wanted; };
    find_digit(sm, source, 21, 11, 0, make_uint2(0, 0), one, count);
    uint32_t prefix = sm.digit;
    uint2 above = sm.above;
    if (sm.at_digit <= kMostLeft) gather_left(sm, source, prefix);
    find_digit(sm, source, 10, 11, prefix, above, one, count);
    prefix = prefix << 11 | sm.digit, above = sm.above;
    find_digit(sm, source, 0, 10, prefix, above, one, count);
    least = prefix << 10 | sm.digit;
  }
  if (min_p > 0 || top_p < 1) {
    uint32_t most = 0;
    source.each([&](uint32_t image) { most = max(most, image); });
    const float highest = value_of(cta_max(sm, most));
    if (min_p > 0) {
      uint32_t lowest = 0;  // of those kept, as its complement
      source.each([&](uint32_t image) {
        if (expf(value_of(image) - highest) >= min_p) lowest = max(lowest, ~image);
      });
      least = max(least, ~cta_max(sm, lowest));
    }
    if (top_p < 1) {
      float wanted = 0;
      auto share = [&](uint32_t image) {
        return image < least ? 0u : static_cast<uint32_t>(rintf(expf(value_of(image) - highest) * (1 << 26)));
      };
      auto of_all = [&](float all) { return wanted = top_p * all; };
      auto known = [&](float) { return wanted; };
      find_digit(sm, source, 21, 11, 0, make_uint2(0, 0), share, of_all);
      uint32_t prefix = sm.digit;
      uint2 above = sm.above;
      find_digit(sm, source, 10, 11, prefix, above, share, known);
      prefix = prefix << 11 | sm.digit, above = sm.above;
      find_digit(sm, source, 0, 10, prefix, above, share, known);
      least = max(least, prefix << 10 | sm.digit);
    }
  }
  if (threadIdx.x == 0) p.least[row] = least <= ordered_image(-INFINITY) ? -INFINITY : value_of(least);
}

inline cudaError_t launch_keep_likely(const KeepLikelyArgs& p, cudaStream_t stream) {
  keep_likely_kernel<<<p.rows, kKeepThreads, sizeof(KeepShared), stream>>>(p);
  return cudaGetLastError();
}

}  // namespace lora_jax
