// Decides which received messages a rank of the LoRA Server answers, and finds their adapters' slots.
#pragma once
#include "peer/ffi.cuh"

namespace lora_jax {

// What is said of a message behind what receiving says of it: in its line, and of all that a program has
// looked at so far in the first line.
enum PeerJudged : int { kVerdict = 5, kAnswers, kFound };
enum PeerFound : int { kAllWell, kNothing, kLeft };

struct JudgeArgs {
  const int* before;  // the lines of the look before
  int* lines;         // [most, kInfoWords]: those of receiving, in and out
  int most, most_rows;
  int* rows;  // [most_rows] in: their adapters; out: their slots, -1 where nothing is to be added
  const int *experts, *messages;  // [most_rows]
  int* verdicts;                  // [most] out
  // The rank's table, by place, which is an adapter's number modulo the places; and of each layer of the
  // plan its number in the model, -1 where it is another rank's.
  const int *numbers, *slots, *num_ready, *version, *layers;
  int places, first_expert, num_experts;
  int slots_per_layer;  // the slots of all layers are one table; 0: each is its own
};

// The slot of a row of a message of a layer; kNobody: this rank does not have it (yet).
__device__ __forceinline__ int slot_of(const JudgeArgs& p, int row, int layer) {
  const int adapter = p.rows[row], expert = p.experts[row] - p.first_expert;
  if (adapter < 0 || expert < 0 || expert >= p.num_experts) return kNobody;
  const int place = adapter % p.places;
  if (p.numbers[place] != adapter || p.num_ready[place] <= layer) return kNobody;
  return layer * p.slots_per_layer + p.slots[place];
}

// One CTA. A message is answered if that goes for all of its rows; nothing is refused here: the host,
// which may know a newer table, answers or refuses what is left.
__global__ void __launch_bounds__(kPeerThreads) judge_kernel(const JudgeArgs p) {
  __shared__ int layers[kMostTogether];
  __shared__ int well[kMostTogether];
  const int message = threadIdx.x;
  int* line = p.lines + message * kInfoWords;
  const bool came = message < p.most && line[kClient] != kNobody;
  if (message < p.most) {
    layers[message] = came ? p.layers[line[kLayer]] : -1;
    well[message] = layers[message] >= 0 && line[kVersion] <= *p.version;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < p.most_rows; i += blockDim.x) {
    const int m = p.messages[i];
    const int slot = m >= 0 && layers[m] >= 0 ? slot_of(p, i, layers[m]) : kNobody;
    if (m >= 0 && slot < 0) well[m] = 0;
    p.rows[i] = slot;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < p.most_rows; i += blockDim.x) {
    const int m = p.messages[i];
    if (m >= 0 && !well[m]) p.rows[i] = kNobody;
  }
  if (threadIdx.x >= 32) return;
  const unsigned answers = __ballot_sync(0xffffffffu, came && well[message % kMostTogether]);
  const unsigned all = __ballot_sync(0xffffffffu, came);
  if (message < p.most) line[kVerdict] = p.verdicts[message] = came && well[message] ? kAnswer : kLeave;
  if (message) return;
  line[kAnswers] = p.before[kAnswers] + __popc(answers);
  line[kFound] = answers != all ? kLeft : all ? kAllWell : kNothing;
}

inline ffi::Error PeerJudge(cudaStream_t stream, S32 before, S32 info, S32 adapters, S32 experts, S32 messages,
                            S32 numbers, S32 slots, S32 num_ready, S32 version, S32 layers, ffi::Result<S32> lines,
                            ffi::Result<S32> row_to_slot, ffi::Result<S32> verdicts, int64_t first_expert,
                            int64_t num_experts, int64_t slots_per_layer) {
  const int most = static_cast<int>(info.dimensions()[0]);
  if (most > kMostTogether) return ffi::Error::InvalidArgument("judge: too many messages at once");
  cudaError_t e = keep_in_place(lines->untyped_data(), info.untyped_data(), info.size_bytes(), stream);
  if (e == cudaSuccess) e = keep_in_place(row_to_slot->untyped_data(), adapters.untyped_data(), adapters.size_bytes(), stream);
  if (e != cudaSuccess) return peer_status(e);
  JudgeArgs args{before.typed_data(), lines->typed_data(), most, static_cast<int>(adapters.dimensions()[0])};
  args.rows = row_to_slot->typed_data(), args.verdicts = verdicts->typed_data();
  args.experts = experts.typed_data(), args.messages = messages.typed_data();
  args.numbers = numbers.typed_data(), args.slots = slots.typed_data(), args.num_ready = num_ready.typed_data();
  args.version = version.typed_data(), args.layers = layers.typed_data();
  args.places = static_cast<int>(numbers.dimensions()[0]), args.slots_per_layer = static_cast<int>(slots_per_layer);
  args.first_expert = static_cast<int>(first_expert), args.num_experts = static_cast<int>(num_experts);
  judge_kernel<<<1, kPeerThreads, 0, stream>>>(args);
  return peer_status(cudaGetLastError());
}

#define LORA_JAX_PEER_JUDGE_BINDING                                                                      \
  Arg<S32>().Arg<S32>().Arg<S32>().Arg<S32>().Arg<S32>().Arg<S32>().Arg<S32>().Arg<S32>().Arg<S32>()      \
      .Arg<S32>().Ret<S32>().Ret<S32>().Ret<S32>()                                                        \
      .Attr<int64_t>("first_expert").Attr<int64_t>("num_experts").Attr<int64_t>("slots_per_layer")

}  // namespace lora_jax
