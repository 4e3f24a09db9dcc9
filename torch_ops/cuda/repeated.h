// Calls of the core that each step makes again. Launching their kernels takes the host longer than
// running them takes the device. So the launches of a call are recorded as a CUDA graph when an
// equal one comes, and later ones start it by a single call.
#ifndef DEEPREDUCE_TORCH_CUDA_REPEATED_H
#define DEEPREDUCE_TORCH_CUDA_REPEATED_H

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "../arguments.h"
#include "cuda/deepreduce_cuda.h"

namespace deepreduce_torch {

// Allocates at least one byte: a null pointer would be a size query.
inline at::Tensor device_bytes(uint64_t bytes, at::Device device) {
  DR_EXPECT(bytes < uint64_t{1} << 62, "memory: expected less than 2^62 bytes, got ", bytes);
  return at::empty({static_cast<int64_t>(std::max<uint64_t>(bytes, 1))},
                   at::TensorOptions(at::kByte).device(device));
}

// What a graph depends on: everything that may not change between two launches.
class Key {
 public:
  void add(uint64_t number) { numbers_.push_back(number); }
  void add(const void* address) {
    add(static_cast<uint64_t>(reinterpret_cast<uintptr_t>(address)));
  }
  void add(at::ArrayRef<double> numbers) {
    for (const double number : numbers) {
      uint64_t bits;
      std::memcpy(&bits, &number, sizeof(bits));
      add(bits);
    }
  }
  bool operator==(const Key& other) const { return numbers_ == other.numbers_; }

 private:
  std::vector<uint64_t> numbers_;
};

// The calls of one bucket. A Call has the functions
//   int start(dr_context*, void* workspace, size_t* workspace_bytes, void* stream)
//   int record(dr_context*, void* workspace, size_t* workspace_bytes, dr_cuda_graph**)
//   int launch(dr_context*, const dr_cuda_graph*, void* stream), of a graph that an equal call
//     recorded
//   void allocate(at::Device), for its results, after a null workspace has given the sizes
template <class Call>
class Repeated {
 public:
  // Does the work of a call. Returns the call that has the memory of the results: this one, or the
  // recorded one. The next call may write to the same memory.
  const Call& run(Call& call, const Key& key, bool repeats, at::Device device, void* stream) {
    if (!recorded_.has_value() || !(recorded_->key == key)) {
      const bool again = repeats && last_ == key;
      last_ = key;
      if (!again || !may_record_ || !record(call, key, device)) {
        start(call, device, stream);
        return call;
      }
    }
    dr_context context{};
    const int status = call.launch(&context, recorded_->graph.get(), stream);
    DR_CHECK_STATUS(status, context.message);
    return recorded_->call;
  }

 private:
  struct Free {
    void operator()(dr_cuda_graph* graph) const { dr_cuda_free(graph); }
  };
  struct Recorded {
    Key key;
    Call call;
    at::Tensor workspace;
    std::unique_ptr<dr_cuda_graph, Free> graph;
  };

  static void start(Call& call, at::Device device, void* stream) {
    dr_context context{};
    size_t bytes = 0;
    int status = call.start(&context, nullptr, &bytes, stream);
    DR_CHECK_STATUS(status, context.message);
    call.allocate(device);
    const at::Tensor workspace = device_bytes(bytes, device);
    status = call.start(&context, workspace.mutable_data_ptr(), &bytes, stream);
    DR_CHECK_STATUS(status, context.message);
  }

  // Returns whether the call was recorded. If a driver cannot do that, it is not tried again.
  bool record(const Call& call, const Key& key, at::Device device) {
    recorded_.reset();
    Recorded made{key, call, at::Tensor(), nullptr};
    dr_context context{};
    size_t bytes = 0;
    dr_cuda_graph* graph = nullptr;
    const int status = made.call.record(&context, nullptr, &bytes, &graph);
    DR_CHECK_STATUS(status, context.message);
    made.call.allocate(device);
    made.workspace = device_bytes(bytes, device);
    if (made.call.record(&context, made.workspace.mutable_data_ptr(), &bytes, &graph) != DR_OK)
      return may_record_ = false;
    made.graph.reset(graph);
    recorded_ = std::move(made);
    return true;
  }

  std::optional<Recorded> recorded_;
  Key last_;
  bool may_record_ = true;
};

}  // namespace deepreduce_torch
#endif
