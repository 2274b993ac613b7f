// What paged attention works through: a unit is a few neighbouring tokens of one sequence and one
// chunk of positions. One CTA writes the list; every layer of a step reads the same one.
#pragma once
#include "cta_sort.cuh"
#include "ptx.cuh"

namespace lora_jax {

struct alignas(16) AttentionUnit {
  int token, num_tokens;  // neighbours of one sequence at consecutive positions
  int chunk;              // of positions, counted from the sequence's start
  int position;           // of the first token
};

struct AttentionUnitsArgs {
  const int* token_to_seq;  // [tokens]
  const int* positions;     // [tokens]
  const int* num_tokens;    // [1]
  int tokens, unit_tokens;  // at most so many tokens in a unit
  int chunk, window;        // positions; window 0: all
  AttentionUnit* units;     // [tokens * max_chunks] out
  int* num_units;           // [1] out
};

constexpr int kAttentionTokens = 8192;  // at most

// The chunks that a token at `position` sees.
struct ChunkRange {
  int first, last;
  __device__ __forceinline__ ChunkRange(int position, int window, int chunk)
      : first(window > 0 ? max(0, position - window + 1) / chunk : 0), last(position / chunk) {}
};

__global__ void __launch_bounds__(kScanThreads) attention_units_kernel(const AttentionUnitsArgs p) {
  __shared__ int warp_sums[kScanThreads / 32];
  __shared__ unsigned char starts[kAttentionTokens];  // of a unit's tokens
  const int live = min(*p.num_tokens, p.tokens), per = (live + kScanThreads - 1) / kScanThreads;
  const int begin = min(static_cast<int>(threadIdx.x) * per, live), end = min(begin + per, live);
  auto breaks = [&](int t) {
    return t == 0 || p.token_to_seq[t] != p.token_to_seq[t - 1] || p.positions[t] != p.positions[t - 1] + 1;
  };
  int run = -1;
  for (int t = begin; t < end; ++t)
    if (breaks(t)) run = t;
  run = cta_scan(run, warp_sums, -1, later);  // where the run began that reaches into this range
  for (int t = begin; t < end; ++t) {
    if (breaks(t)) run = t;
    starts[t] = (t - run) % p.unit_tokens == 0;
  }
  __syncthreads();
  auto each_unit = [&](auto f) {
    for (int t = begin; t < end; ++t) {
      if (!starts[t]) continue;
      int n = 1;
      while (t + n < live && !starts[t + n]) ++n;
      const int position = p.positions[t];
      const int first = ChunkRange(position, p.window, p.chunk).first;
      const int last = ChunkRange(position + n - 1, p.window, p.chunk).last;
      f(AttentionUnit{t, n, first, position}, last - first + 1);
    }
  };
  int count = 0, total;
  each_unit([&](AttentionUnit, int chunks) { count += chunks; });
  int at = cta_scan(count, warp_sums, 0, plus, &total);
  each_unit([&](AttentionUnit unit, int chunks) {
    for (int c = 0; c < chunks; ++c, ++unit.chunk) p.units[at++] = unit;
  });
  if (threadIdx.x == 0) *p.num_units = total;
}

}  // namespace lora_jax
