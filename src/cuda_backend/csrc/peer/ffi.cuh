// The transport's custom calls: they unpack buffers and launch kernels; a number names an endpoint.
#pragma once
#include <algorithm>
#include <mutex>
#include <vector>

#include "peer/client.cuh"
#include "peer/server.cuh"
#include "xla/ffi/api/ffi.h"

namespace lora_jax {

namespace ffi = xla::ffi;
using S32 = ffi::Buffer<ffi::S32>;

struct PeerEnd {  // of a client or a server rank
  PeerState* state;
  PeerShapes shapes;
  int servers;  // a client's
  cudaStream_t side;       // a client's: pushes beside the base computation
  cudaEvent_t fork;        // where it begins
};

// Compiled programs know an end by number, so none is ever forgotten: a few hundred bytes each.
class PeerEnds {
 public:
  int64_t add(const PeerEnd& end) {
    std::lock_guard<std::mutex> hold(mutex_);
    ends_.push_back(end);
    return static_cast<int64_t>(ends_.size());
  }
  // Ends of which each device of a program takes its own; the group's number is negative.
  int64_t add_group(const int64_t* numbers, int64_t count) {
    std::lock_guard<std::mutex> hold(mutex_);
    groups_.emplace_back(numbers, numbers + count);
    return -static_cast<int64_t>(groups_.size());
  }
  bool find(int64_t number, PeerEnd* end, int32_t device = 0) {
    std::lock_guard<std::mutex> hold(mutex_);
    if (number < 0) {
      if (-number > static_cast<int64_t>(groups_.size())) return false;
      const std::vector<int64_t>& group = groups_[-number - 1];
      if (device < 0 || device >= static_cast<int32_t>(group.size())) return false;
      number = group[device];
    }
    if (number < 1 || number > static_cast<int64_t>(ends_.size())) return false;
    *end = ends_[number - 1];
    return true;
  }

 private:
  std::mutex mutex_;
  std::vector<PeerEnd> ends_;
  std::vector<std::vector<int64_t>> groups_;
};
inline PeerEnds peer_ends;

inline ffi::Error peer_status(cudaError_t e) {
  return e == cudaSuccess ? ffi::Error::Success() : ffi::Error::Internal(cudaGetErrorString(e));
}
inline ffi::Error no_end() { return ffi::Error::InvalidArgument("transport: no such end in this process"); }
inline cudaError_t keep_in_place(void* out, const void* in, size_t bytes, cudaStream_t stream) {
  return out == in ? cudaSuccess : cudaMemcpyAsync(out, in, bytes, cudaMemcpyDeviceToDevice, stream);
}

// Lets one stream go on where another one is; both of one device, neither being captured.
inline cudaError_t follow(cudaStream_t behind, cudaStream_t ahead, cudaEvent_t event) {
  const cudaError_t e = cudaEventRecord(event, ahead);
  return e == cudaSuccess ? cudaStreamWaitEvent(behind, event, 0) : e;
}

inline PushArgs push_args(const PeerEnd& end, const void* x, int64_t rows, S32 num_rows, S32 layer, S32 version,
                          S32 to_server, S32 to_adapter, S32 to_expert, int64_t site) {
  PushArgs args{end.state, end.shapes};
  args.rows = {num_rows.typed_data(), layer.typed_data(), version.typed_data(), to_server.typed_data(),
               to_adapter.typed_data(), to_expert.typed_data(), static_cast<int>(rows), end.servers};
  args.x = static_cast<const unsigned char*>(x), args.site = static_cast<int>(site);
  return args;
}
inline WaitArgs wait_args(const PeerEnd& end, int64_t rows, S32 num_rows, S32 to_server, int64_t site) {
  WaitArgs args{end.state, end.shapes};
  args.rows.num_rows = num_rows.typed_data(), args.rows.to_server = to_server.typed_data();
  args.rows.rows = static_cast<int>(rows), args.rows.servers = end.servers, args.site = static_cast<int>(site);
  return args;
}

inline ffi::Error PeerPush(cudaStream_t stream, int32_t device, ffi::AnyBuffer x, S32 num_rows, S32 layer, S32 version,
                           S32 to_server, S32 to_adapter, S32 to_expert, ffi::Result<ffi::AnyBuffer> out, int64_t number,
                           int64_t site) {
  PeerEnd end;
  if (!peer_ends.find(number, &end, device)) return no_end();
  const cudaError_t e = keep_in_place(out->untyped_data(), x.untyped_data(), x.size_bytes(), stream);
  const PushArgs args = push_args(end, out->untyped_data(), x.dimensions()[0], num_rows, layer, version, to_server,
                                  to_adapter, to_expert, site);
  return peer_status(e == cudaSuccess ? launch_push(args, stream) : e);
}

// From a stream of its own, while the base computes; behind it goes the wait for the answers. What is
// read stays alive by being an operand of wait_add, which goes on when all answers are there. But for
// the layer, if it does not last: then the rows leave in the stream.
inline ffi::Error PeerPushAside(cudaStream_t stream, int32_t device, ffi::AnyBuffer x, S32 num_rows, S32 layer, S32 version,
                                S32 to_server, S32 to_adapter, S32 to_expert, ffi::Result<ffi::AnyBuffer> out,
                                int64_t number, int64_t site, int64_t lasting) {
  PeerEnd end;
  if (!peer_ends.find(number, &end, device)) return no_end();
  const PushArgs args = push_args(end, out->untyped_data(), x.dimensions()[0], num_rows, layer, version, to_server,
                                  to_adapter, to_expert, site);
  cudaError_t e = keep_in_place(out->untyped_data(), x.untyped_data(), x.size_bytes(), stream);
  if (!lasting && e == cudaSuccess) e = launch_push(args, stream);
  if (e == cudaSuccess) e = follow(end.side, stream, end.fork);
  if (lasting && e == cudaSuccess) e = launch_push_aside(args, end.side);
  const WaitArgs wait = wait_args(end, x.dimensions()[0], num_rows, to_server, site);
  return peer_status(e == cudaSuccess ? launch_await(wait, end.side) : e);
}

// With BESIDE a push aside has begun to wait already.
template <bool BESIDE>
ffi::Error PeerWaitAdd(cudaStream_t stream, int32_t device, S32 num_rows, S32 to_server, ffi::AnyBuffer keep,
                       ffi::RemainingArgs args, ffi::Result<S32> status, ffi::RemainingRets rets, int64_t number,
                       int64_t site) {
  PeerEnd end;
  if (!peer_ends.find(number, &end, device)) return no_end();
  WaitArgs wait = wait_args(end, keep.dimensions()[0], num_rows, to_server, site);
  wait.status = status->typed_data(), wait.beside = BESIDE;
  bool wide_y = true;
  for (size_t i = 0; i < rets.size(); ++i) {  // what comes behind the ys is only kept
    auto y = args.get<ffi::AnyBuffer>(i);
    auto out = rets.get<ffi::AnyBuffer>(i);
    if (!y || !out) return ffi::Error::Internal("wait_add: not a buffer");
    wide_y = y->element_type() == ffi::F32;
    const cudaError_t e = keep_in_place((*out)->untyped_data(), y->untyped_data(), y->size_bytes(), stream);
    if (e != cudaSuccess) return peer_status(e);
    wait.ys[i] = static_cast<unsigned char*>((*out)->untyped_data());
  }
  return peer_status(launch_wait_add(wait, wide_y, stream));
}

// x is [rows that are taken at most, d_in] of the site.
inline ffi::Error PeerTake(cudaStream_t stream, S32 after, S32 limit_us, ffi::Result<S32> info, ffi::Result<S32> adapters,
                           ffi::Result<S32> experts, ffi::Result<S32> messages, ffi::Result<ffi::AnyBuffer> x,
                           int64_t number, int64_t site) {
  (void)after;  // only says what comes before
  PeerEnd end;
  if (!peer_ends.find(number, &end)) return no_end();
  const int most = static_cast<int>(info->dimensions()[0]);
  if (most > kMostTogether) return ffi::Error::InvalidArgument("take: too many messages at once");
  ReceiveArgs args{end.state, end.shapes, info->typed_data(), most, static_cast<int>(adapters->dimensions()[0])};
  args.adapters = adapters->typed_data(), args.experts = experts->typed_data(), args.messages = messages->typed_data();
  args.limit_us = limit_us.typed_data(), args.site = static_cast<int>(site);
  args.x = static_cast<unsigned char*>(x->untyped_data());
  return peer_status(launch_receive(args, stream));
}

inline ffi::Error PeerRespond(cudaStream_t stream, S32 info, S32 verdicts, ffi::RemainingArgs deltas, ffi::Result<S32> out,
                              int64_t number, int64_t site) {
  PeerEnd end;
  if (!peer_ends.find(number, &end)) return no_end();
  RespondArgs args{end.state, end.shapes, nullptr, verdicts.typed_data()};
  args.site = static_cast<int>(site);
  for (size_t i = 0; i < deltas.size(); ++i) {
    auto delta = deltas.get<ffi::AnyBuffer>(i);
    if (!delta) return ffi::Error::Internal("respond: not a buffer");
    args.deltas[i] = static_cast<const unsigned char*>(delta->untyped_data());
  }
  const cudaError_t e = keep_in_place(out->untyped_data(), info.untyped_data(), info.size_bytes(), stream);
  return peer_status(e == cudaSuccess ? launch_respond(args, stream) : e);
}

#define LORA_JAX_PEER_PUSH_BINDING                                                                        \
  Ctx<ffi::DeviceOrdinal>().Arg<ffi::AnyBuffer>().Arg<S32>().Arg<S32>().Arg<S32>().Arg<S32>().Arg<S32>().Arg<S32>()                  \
      .Ret<ffi::AnyBuffer>().Attr<int64_t>("end").Attr<int64_t>("site")
#define LORA_JAX_PEER_PUSH_ASIDE_BINDING LORA_JAX_PEER_PUSH_BINDING.Attr<int64_t>("lasting")
#define LORA_JAX_PEER_WAIT_ADD_BINDING                                                                    \
  Ctx<ffi::DeviceOrdinal>().Arg<S32>().Arg<S32>().Arg<ffi::AnyBuffer>().RemainingArgs().Ret<S32>().RemainingRets()                   \
      .Attr<int64_t>("end").Attr<int64_t>("site")
#define LORA_JAX_PEER_TAKE_BINDING                                                                        \
  Arg<S32>().Arg<S32>().Ret<S32>().Ret<S32>().Ret<S32>().Ret<S32>().Ret<ffi::AnyBuffer>()                  \
      .Attr<int64_t>("end").Attr<int64_t>("site")
#define LORA_JAX_PEER_RESPOND_BINDING \
  Arg<S32>().Arg<S32>().RemainingArgs().Ret<S32>().Attr<int64_t>("end").Attr<int64_t>("site")

}  // namespace lora_jax

// What Python calls through ctypes, with the device's context current; 0 is success where an error
// code comes back. This file is included once in a library.
extern "C" {

using namespace lora_jax;

// A number for an end whose state, all zero but for what the host put there, lies at `state`; 0 if
// it has more sites or outputs than fit.
int64_t lora_jax_cuda_peer_new(const int64_t* numbers, int64_t servers, uint64_t state) {
  PeerEnd end{reinterpret_cast<PeerState*>(state), {}, static_cast<int>(servers)};
  if (!read_shapes(numbers, &end.shapes)) return 0;
  int least = 0, greatest = 0;  // before the base computation takes all SMs
  const bool made = cudaDeviceGetStreamPriorityRange(&least, &greatest) == cudaSuccess &&
                    cudaStreamCreateWithPriority(&end.side, cudaStreamNonBlocking, greatest) == cudaSuccess &&
                    cudaEventCreateWithFlags(&end.fork, cudaEventDisableTiming) == cudaSuccess;
  return made ? peer_ends.add(end) : 0;
}

// A number for ends of which each device's calls take their own.
int64_t lora_jax_cuda_peer_group(const int64_t* numbers, int64_t count) { return peer_ends.add_group(numbers, count); }

// Where things lie, for the host to write and read: see cuda_backend/peer_endpoints.py.
void lora_jax_cuda_peer_layout(int64_t* out) {
  const size_t found[] = {sizeof(PeerState),         offsetof(PeerState, control), offsetof(PeerState, stopped),
                          offsetof(PeerState, links), offsetof(PeerState, counts),  sizeof(PeerLink),
                          sizeof(PeerControl),        kMostServers,                 kCounts,
                          kLengths};
  for (size_t value : found) *out++ = static_cast<int64_t>(value);
}

// Loads every kernel on the current device: later, beside one that spins, that might wait for it.
int32_t lora_jax_cuda_peer_load() {
  const void* kernels[] = {reinterpret_cast<const void*>(push_kernel<kPeerThreads>),
                           reinterpret_cast<const void*>(push_kernel<kAsideThreads>),
                           reinterpret_cast<const void*>(await_kernel),
                           reinterpret_cast<const void*>(wait_add_kernel<float, float>),
                           reinterpret_cast<const void*>(wait_add_kernel<float, uint16_t>),
                           reinterpret_cast<const void*>(wait_add_kernel<uint16_t, float>),
                           reinterpret_cast<const void*>(wait_add_kernel<uint16_t, uint16_t>),
                           reinterpret_cast<const void*>(receive_kernel),
                           reinterpret_cast<const void*>(respond_kernel)};
  for (const void* kernel : kernels) {
    cudaFuncAttributes attributes;
    if (const cudaError_t e = cudaFuncGetAttributes(&attributes, kernel); e != cudaSuccess) return e;
  }
  return 0;
}

int32_t lora_jax_cuda_peer_receive(int64_t number, uint64_t nanos, int32_t* info, cudaStream_t stream) {
  PeerEnd end;
  if (!peer_ends.find(number, &end)) return cudaErrorInvalidValue;
  ReceiveArgs args{end.state, end.shapes, info, 1, static_cast<int>(end.shapes.max_rows)};
  args.limit = nanos, args.site = kAnySite;
  return launch_receive(args, stream);
}

int32_t lora_jax_cuda_peer_respond(int64_t number, uint64_t link, const int32_t* verdict, const uint64_t* deltas,
                                   int64_t site, cudaStream_t stream) {
  PeerEnd end;
  if (!peer_ends.find(number, &end)) return cudaErrorInvalidValue;
  RespondArgs args{end.state, end.shapes, reinterpret_cast<PeerLink*>(link), verdict};
  args.site = static_cast<int>(site);
  for (int64_t k = 0; k < end.shapes.sites[site].num_outs; ++k)
    args.deltas[k] = reinterpret_cast<const unsigned char*>(deltas[k]);
  return launch_respond(args, stream);
}

}
