// The k best experts of each token by its router's logits, and their weights: a warp a token.
#pragma once
#include "device/warp_sums.cuh"

namespace lora_jax {

struct ChooseExpertsArgs {
  const float* logits;  // [tokens, experts]
  float* weights;       // [tokens, k]
  int* ids;             // [tokens, k], best first, the lower id first on a tie
  int tokens, experts, k;
  bool softmax_first;  // weights are shares of all experts' exponentials, else of the chosen ones'
  bool normed;         // then divided by their sum
  float scale;
};

constexpr int kChoiceWarps = 4;
constexpr int kMostExperts = 512, kMostChosen = 32;

// PER: logits that a lane holds, of experts i * 32 + lane.
template <int PER>
__global__ void __launch_bounds__(kChoiceWarps * 32) choose_experts_kernel(const ChooseExpertsArgs p) {
  const int lane = threadIdx.x & 31, token = static_cast<int>(blockIdx.x) * kChoiceWarps + (threadIdx.x >> 5);
  if (token >= p.tokens) return;
  float left[PER], highest = 0, total = 0, weight = 0;
  int id = 0;
#pragma unroll
  for (int i = 0; i < PER; ++i) {
    const int expert = i * 32 + lane;
    left[i] = expert < p.experts ? __ldg(p.logits + static_cast<int64_t>(token) * p.experts + expert) : -INFINITY;
  }
  for (int choice = 0; choice < p.k; ++choice) {
    float best = -INFINITY;
    int at = p.experts;  // stays where no logit is a number, and names no expert
#pragma unroll
    for (int i = 0; i < PER; ++i)
      if (left[i] > best) best = left[i], at = i * 32 + lane;
#pragma unroll
    for (int d = 16; d; d /= 2) {
      const float other = __shfl_xor_sync(~0u, best, d);
      const int place = __shfl_xor_sync(~0u, at, d);
      if (other > best || (other == best && place < at)) best = other, at = place;
    }
    if (choice == 0) {
      highest = best;
#pragma unroll
      for (int i = 0; i < PER; ++i) total += expf(left[i] - highest);
    }
    if (lane == choice) weight = expf(best - highest), id = at;
#pragma unroll
    for (int i = 0; i < PER; ++i)
      if (at == i * 32 + lane) left[i] = -INFINITY;
  }
  weight /= p.softmax_first ? warp_sum(total) : warp_sum(weight);
  if (p.normed) weight /= warp_sum(weight);
  if (lane >= p.k) return;
  p.weights[static_cast<int64_t>(token) * p.k + lane] = weight * p.scale;
  p.ids[static_cast<int64_t>(token) * p.k + lane] = id;
}

template <int PER>
cudaError_t launch_choice(const ChooseExpertsArgs& p, cudaStream_t stream) {
  const auto kernel = choose_experts_kernel<PER>;
  kernel<<<(p.tokens + kChoiceWarps - 1) / kChoiceWarps, kChoiceWarps * 32, 0, stream>>>(p);
  return cudaGetLastError();
}

// Up to kMostExperts and kMostChosen.
inline cudaError_t launch_choose_experts(const ChooseExpertsArgs& p, cudaStream_t stream) {
  if (p.experts <= 64) return launch_choice<2>(p, stream);
  if (p.experts <= 128) return launch_choice<4>(p, stream);
  return p.experts <= 256 ? launch_choice<8>(p, stream) : launch_choice<16>(p, stream);
}

}  // namespace lora_jax
