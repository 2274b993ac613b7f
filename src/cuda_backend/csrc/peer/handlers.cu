// XLA FFI entry points of the transport between GPUs. All of them only enqueue work of a fixed shape
// whose sequence numbers are in device memory, so XLA may put them into CUDA graphs.
#include "peer/judge.cuh"

#define LORA_JAX_ON_STREAM ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>()

XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_peer_push, lora_jax::PeerPush,
                              LORA_JAX_ON_STREAM.LORA_JAX_PEER_PUSH_BINDING, {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_peer_wait_add, lora_jax::PeerWaitAdd<false>,
                              LORA_JAX_ON_STREAM.LORA_JAX_PEER_WAIT_ADD_BINDING,
                              {ffi::Traits::kCmdBufferCompatible});
// From a stream of their own, so not into a graph.
XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_peer_push_aside, lora_jax::PeerPushAside,
                              LORA_JAX_ON_STREAM.LORA_JAX_PEER_PUSH_ASIDE_BINDING);
XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_peer_wait_add_aside, lora_jax::PeerWaitAdd<true>,
                              LORA_JAX_ON_STREAM.LORA_JAX_PEER_WAIT_ADD_BINDING);
XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_peer_take, lora_jax::PeerTake,
                              LORA_JAX_ON_STREAM.LORA_JAX_PEER_TAKE_BINDING, {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_peer_judge, lora_jax::PeerJudge,
                              LORA_JAX_ON_STREAM.LORA_JAX_PEER_JUDGE_BINDING, {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_peer_answer, lora_jax::PeerRespond,
                              LORA_JAX_ON_STREAM.LORA_JAX_PEER_RESPOND_BINDING, {ffi::Traits::kCmdBufferCompatible});
