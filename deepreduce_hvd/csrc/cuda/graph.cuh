// CUDA graphs: launches that are recorded once, and started again by a single call. A bucket of
// many small tensors needs thousands of launches, each of which takes the host longer than the
// device.
#ifndef DEEPREDUCE_CUDA_GRAPH_CUH
#define DEEPREDUCE_CUDA_GRAPH_CUH

#include <cstdint>
#include <functional>

#include "cuda/device.cuh"

namespace deepreduce {
namespace cuda {

// A graph of the current device, ready to be launched. The work of different branches may run at
// the same time.
class Graph {
 public:
  // Records work(branch, stream), called for each branch; it does not run. The calls must do
  // nothing but launches, copies and fills on this stream. Throws a failure of the CUDA runtime.
  Graph(uint32_t branches, const std::function<void(uint32_t, cudaStream_t)>& work);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void launch(cudaStream_t stream) const;

 private:
  cudaGraphExec_t instance_ = nullptr;
};

}  // namespace cuda
}  // namespace deepreduce
#endif
