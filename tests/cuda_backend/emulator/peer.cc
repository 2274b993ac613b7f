// The transport's custom calls for XLA's CPU platform, over the emulated kernels; what
// csrc/peer_handlers.cu is for a GPU.
#include "peer_judge.cuh"

namespace lora_jax {

constexpr auto on_cpu_push = [](auto... args) { return PeerPush<false>(nullptr, args...); };
constexpr auto on_cpu_push_aside = [](auto... args) { return PeerPush<true>(nullptr, args...); };
constexpr auto on_cpu_wait_add = [](auto... args) { return PeerWaitAdd<false>(nullptr, args...); };
constexpr auto on_cpu_wait_add_aside = [](auto... args) { return PeerWaitAdd<true>(nullptr, args...); };
constexpr auto on_cpu_take = [](auto... args) { return PeerTake(nullptr, args...); };
constexpr auto on_cpu_judge = [](auto... args) { return PeerJudge(nullptr, args...); };
constexpr auto on_cpu_answer = [](auto... args) { return PeerRespond(nullptr, args...); };

}  // namespace lora_jax

XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_peer_push, lora_jax::on_cpu_push,
                              ffi::Ffi::Bind().LORA_JAX_PEER_PUSH_BINDING);
XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_peer_wait_add, lora_jax::on_cpu_wait_add,
                              ffi::Ffi::Bind().LORA_JAX_PEER_WAIT_ADD_BINDING);
XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_peer_push_aside, lora_jax::on_cpu_push_aside,
                              ffi::Ffi::Bind().LORA_JAX_PEER_PUSH_BINDING);
XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_peer_wait_add_aside, lora_jax::on_cpu_wait_add_aside,
                              ffi::Ffi::Bind().LORA_JAX_PEER_WAIT_ADD_BINDING);
XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_peer_take, lora_jax::on_cpu_take,
                              ffi::Ffi::Bind().LORA_JAX_PEER_TAKE_BINDING);
XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_peer_judge, lora_jax::on_cpu_judge,
                              ffi::Ffi::Bind().LORA_JAX_PEER_JUDGE_BINDING);
XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_peer_answer, lora_jax::on_cpu_answer,
                              ffi::Ffi::Bind().LORA_JAX_PEER_RESPOND_BINDING);
