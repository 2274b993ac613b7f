// The transport's custom calls for XLA's CPU platform, over the emulated kernels; what
// csrc/peer/handlers.cu is for a GPU.
#include "peer/judge.cuh"

namespace lora_jax {

constexpr auto on_cpu_push = [](auto... args) { return PeerPush(nullptr, args...); };
constexpr auto on_cpu_wait_add = [](auto... args) { return PeerWaitAdd<false>(nullptr, args...); };
constexpr auto on_cpu_take = [](auto... args) { return PeerTake(nullptr, args...); };
constexpr auto on_cpu_judge = [](auto... args) { return PeerJudge(nullptr, args...); };
constexpr auto on_cpu_answer = [](auto... args) { return PeerRespond(nullptr, args...); };

// What is launched here has ended when the call has: a wait beside the base begins where it is to end.
inline ffi::Error on_cpu_push_aside(int32_t device, ffi::AnyBuffer x, S32 num_rows, S32 layer, S32 version, S32 to_server,
                                    S32 to_adapter, S32 to_expert, ffi::Result<ffi::AnyBuffer> out, int64_t number,
                                    int64_t site, int64_t) {
  return PeerPush(nullptr, device, x, num_rows, layer, version, to_server, to_adapter, to_expert, out, number, site);
}
inline ffi::Error on_cpu_wait_add_aside(int32_t device, S32 num_rows, S32 to_server, ffi::AnyBuffer keep, ffi::RemainingArgs args,
                                        ffi::Result<S32> status, ffi::RemainingRets rets, int64_t number, int64_t site) {
  PeerEnd end;
  if (!peer_ends.find(number, &end, device)) return no_end();
  launch_await(wait_args(end, keep.dimensions()[0], num_rows, to_server, site), nullptr);
  return PeerWaitAdd<true>(nullptr, device, num_rows, to_server, keep, args, status, rets, number, site);
}

}  // namespace lora_jax

XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_peer_push, lora_jax::on_cpu_push,
                              ffi::Ffi::Bind().LORA_JAX_PEER_PUSH_BINDING);
XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_peer_wait_add, lora_jax::on_cpu_wait_add,
                              ffi::Ffi::Bind().LORA_JAX_PEER_WAIT_ADD_BINDING);
XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_peer_push_aside, lora_jax::on_cpu_push_aside,
                              ffi::Ffi::Bind().LORA_JAX_PEER_PUSH_ASIDE_BINDING);
XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_peer_wait_add_aside, lora_jax::on_cpu_wait_add_aside,
                              ffi::Ffi::Bind().LORA_JAX_PEER_WAIT_ADD_BINDING);
XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_peer_take, lora_jax::on_cpu_take,
                              ffi::Ffi::Bind().LORA_JAX_PEER_TAKE_BINDING);
XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_peer_judge, lora_jax::on_cpu_judge,
                              ffi::Ffi::Bind().LORA_JAX_PEER_JUDGE_BINDING);
XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_peer_answer, lora_jax::on_cpu_answer,
                              ffi::Ffi::Bind().LORA_JAX_PEER_RESPOND_BINDING);
