// Launches that may run side by side in a CUDA graph, out of one stream.
#pragma once
#include <cuda_runtime_api.h>

#include <vector>

namespace lora_jax {

// While the stream is captured, what is launched after `next` does not wait for what was launched
// before it, back to where this began; what is launched after `join` waits for all of it. On a
// stream that is not captured everything is in order, as ever.
class Branches {
 public:
  explicit Branches(cudaStream_t stream) : stream_(stream), begin_(dependencies()) {}
  cudaError_t next() { return capturing_ ? (remember(), depend(begin_, cudaStreamSetCaptureDependencies)) : cudaSuccess; }
  cudaError_t join() { return capturing_ ? depend(ends_, cudaStreamAddCaptureDependencies) : cudaSuccess; }

 private:
  using Nodes = std::vector<cudaGraphNode_t>;

  // What the next launch waits for.
  Nodes dependencies() {
    cudaStreamCaptureStatus status;
    const cudaGraphNode_t* nodes = nullptr;
    size_t count = 0;
#if CUDART_VERSION >= 13000
    const cudaGraphEdgeData* edges = nullptr;
    const cudaError_t e = cudaStreamGetCaptureInfo(stream_, &status, nullptr, nullptr, &nodes, &edges, &count);
#else
    const cudaError_t e = cudaStreamGetCaptureInfo(stream_, &status, nullptr, nullptr, &nodes, &count);
#endif
    capturing_ = e == cudaSuccess && status == cudaStreamCaptureStatusActive;
    return capturing_ ? Nodes(nodes, nodes + count) : Nodes();
  }
  void remember() {
    for (cudaGraphNode_t node : dependencies()) ends_.push_back(node);
  }
  cudaError_t depend(Nodes& nodes, unsigned how) {
#if CUDART_VERSION >= 13000
    return cudaStreamUpdateCaptureDependencies(stream_, nodes.data(), nullptr, nodes.size(), how);
#else
    return cudaStreamUpdateCaptureDependencies(stream_, nodes.data(), nodes.size(), how);
#endif
  }

  cudaStream_t stream_;
  bool capturing_ = false;
  Nodes begin_, ends_;
};

}  // namespace lora_jax
