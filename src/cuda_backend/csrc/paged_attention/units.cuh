// Work list of paged attention. A unit is a few neighbouring tokens of one sequence and some chunks of
// positions. One CTA writes the list; every layer of a step reads the same list.
//
// A token's result is the sum of its chunks, put together in their order. A few tokens over a long
// context are cut into units of one chunk, whose parts combine_kernel puts together; the many tokens
// of a prompt fill the GPU by themselves, and one unit goes through all chunks without parts in
// memory. The arithmetic is the same, so which of the two happens changes no bit. If there are rows of
// parts for all tokens, all are cut.
//
// A list begins with the longest units, so that CTAs which take turns have about as much to do each.
#pragma once
#include "device/cta_sort.cuh"
#include "device/ptx.cuh"

namespace lora_jax {

struct alignas(16) AttentionUnit {
  int token, num_tokens;  // neighbours of one sequence at consecutive positions
  int chunk, num_chunks;  // of positions, counted from the sequence's start
  int position, sequence;  // of the first token
  int part;  // row of the first token's parts; -1: this unit gives the result
  int unused;
};

struct AttentionUnitsArgs {
  const int* token_to_seq;  // [tokens]
  const int* positions;     // [tokens]
  const int* num_tokens;    // [1]
  int tokens, unit_tokens;  // at most so many tokens in a unit
  int many_tokens;          // in a unit of many neighbours; 0: the same, and one list
  int chunk, window;        // positions; window 0: all
  int part_rows;            // tokens that may be cut
  AttentionUnit* units;     // [tokens + part_rows * max_chunks] out
  int2* part_tokens;        // [part_rows] out: the token and the position of a row of parts, or -1
  int* num_units;           // [2] out: those of few neighbours, and behind them those of many
};

constexpr int kAttentionTokens = 8192;  // at most
constexpr int kManyTokens = 64;         // neighbours: not cut, and a list of their own

// The chunks that a token at `position` sees.
struct ChunkRange {
  int first, last;
  __device__ __forceinline__ ChunkRange(int position, int window, int chunk)
      : first(window > 0 ? max(0, position - window + 1) / chunk : 0), last(position / chunk) {}
};

// Where a unit stands among the lengths in the list, 16 steps a power of two, the longest first.
constexpr int kLengthSteps = 16, kLengths = 20 * kLengthSteps;
__device__ __forceinline__ int place_of_length(const AttentionUnitsArgs& p, const AttentionUnit& u) {
  const int end = min(u.position + u.num_tokens, (u.chunk + u.num_chunks) * p.chunk);
  const int begin = max(u.chunk * p.chunk, p.window > 0 ? u.position - p.window + 1 : 0);
  const int exponent_and_steps = __float_as_int(static_cast<float>(max(end - begin, 1))) >> 19;
  return max(kLengths - 1 - (exponent_and_steps - (127 << 4)), 0);
}

// What is known of a token, in a byte.
constexpr int kUnitStart = 1, kRunStart = 2, kManyNeighbours = 4;

// A unit that starts at token t, uncut.
__device__ __forceinline__ AttentionUnit whole_unit(const AttentionUnitsArgs& p, const unsigned char* marks, int t,
                                                    int live) {
  int n = 1;
  while (t + n < live && !(marks[t + n] & kUnitStart)) ++n;
  const int position = p.positions[t];
  const int first = ChunkRange(position, p.window, p.chunk).first;
  const int last = ChunkRange(position + n - 1, p.window, p.chunk).last;
  return AttentionUnit{t, n, first, last - first + 1, position, p.token_to_seq[t], -1, 0};
}

// Whether the run that starts at token t has many.
__device__ __forceinline__ bool starts_many(const unsigned char* marks, int t, int live) {
  if (t + kManyTokens > live) return false;
  for (int n = 1; n < kManyTokens; ++n)
    if (marks[t + n] & kRunStart) return false;
  return true;
}

__global__ void __launch_bounds__(kScanThreads) attention_units_kernel(const AttentionUnitsArgs p) {
  __shared__ int warp_sums[kScanThreads / 32];
  __shared__ unsigned char marks[kAttentionTokens];
  __shared__ int lengths[2 * kLengths];  // of both lists
  const int live = min(*p.num_tokens, p.tokens), per = (live + kScanThreads - 1) / kScanThreads;
  const int begin = min(static_cast<int>(threadIdx.x) * per, live), end = min(begin + per, live);
  auto breaks = [&](int t) {
    return t == 0 || p.token_to_seq[t] != p.token_to_seq[t - 1] || p.positions[t] != p.positions[t - 1] + 1;
  };
  int run = -1;
  for (int t = begin; t < end; ++t) {
    marks[t] = breaks(t) ? kRunStart : 0;
    if (marks[t]) run = t;
  }
  run = cta_scan(run, warp_sums, -1, later);  // where the run began that reaches into this range
  bool many = run >= 0 && starts_many(marks, run, live);
  __syncthreads();
  for (int t = begin; t < end; ++t) {
    if (marks[t] & kRunStart) run = t, many = starts_many(marks, t, live);
    const int most = many && p.many_tokens ? p.many_tokens : p.unit_tokens;
    // Others look at the bit of runs meanwhile: it stays.
    marks[t] |= ((t - run) % most == 0) * kUnitStart | many * kManyNeighbours;
  }
  __syncthreads();
  auto each_unit = [&](auto f) {
    for (int t = begin; t < end; ++t)
      if (marks[t] & kUnitStart) f(whole_unit(p, marks, t, live));
  };
  auto may_cut = [&](const AttentionUnit& u) {
    return u.num_chunks > 1 && (p.part_rows >= p.tokens || !(marks[u.token] & kManyNeighbours));
  };
  int rows = 0;
  each_unit([&](const AttentionUnit& u) { rows += may_cut(u) ? u.num_tokens : 0; });
  const int first_row = cta_scan(rows, warp_sums, 0, plus);
  auto each_cut = [&](auto f) {  // with the row of its parts, if it is to be cut
    int row = first_row;
    each_unit([&](const AttentionUnit& u) {
      const bool wish = may_cut(u);
      f(u, wish && row + u.num_tokens <= p.part_rows ? row : -1);
      row += wish ? u.num_tokens : 0;
    });
  };
  // Calls f(unit) for each of the list.
  auto each_listed = [&](auto f) {
    each_cut([&](AttentionUnit u, int row) {
      if (row < 0) return f(u);
      u.part = row;
      int left = u.num_chunks;
      for (u.num_chunks = 1; left > 0; --left, ++u.chunk) f(u);
    });
  };
  auto place = [&](const AttentionUnit& u) {
    const bool many = p.many_tokens && (marks[u.token] & kManyNeighbours);
    return lengths + place_of_length(p, u) + (many ? kLengths : 0);
  };
  for (int i = threadIdx.x; i < 2 * kLengths; i += kScanThreads) lengths[i] = 0;
  for (int row = threadIdx.x; row < p.part_rows; row += kScanThreads) p.part_tokens[row] = make_int2(-1, -1);
  __syncthreads();
  each_listed([&](const AttentionUnit& u) { atomicAdd(place(u), 1); });
  each_cut([&](const AttentionUnit& u, int row) {
    for (int i = 0; row >= 0 && i < u.num_tokens; ++i) p.part_tokens[row + i] = make_int2(u.token + i, u.position + i);
  });
  __syncthreads();
  int total;
  const bool has_length = threadIdx.x < 2 * kLengths;
  const int before = cta_scan(has_length ? lengths[threadIdx.x] : 0, warp_sums, 0, plus, &total);
  if (has_length) lengths[threadIdx.x] = before;
  if (threadIdx.x == kLengths) p.num_units[0] = before, p.num_units[1] = total - before;
  __syncthreads();
  each_listed([&](const AttentionUnit& u) { p.units[atomicAdd(place(u), 1)] = u; });
}

}  // namespace lora_jax
