// The same work for several tensors: on one stream, or on the branches of a graph. What is another
// in each step is in a table at the start of the workspace.
#ifndef DEEPREDUCE_CUDA_SEVERAL_CUH
#define DEEPREDUCE_CUDA_SEVERAL_CUH

#include <vector>

#include "cuda/encode.cuh"

namespace deepreduce {
namespace cuda {

// Divides tensors among branches, which have workspaces of their own, one after another.
class Branches {
 public:
  explicit Branches(uint64_t count) : elements_(count), bytes_(count) {}
  // Sets the size of a tensor, and of the workspace for it.
  void set(uint64_t i, uint64_t elements, uint64_t bytes);
  // Makes at most `most` branches. Their workspaces begin after `table_bytes`.
  void divide(uint32_t most, uint64_t table_bytes);

  uint32_t count() const { return static_cast<uint32_t>(branches_.size()); }
  uint64_t workspace_bytes() const { return workspace_bytes_; }
  const std::vector<uint64_t>& members(uint32_t branch) const { return branches_[branch].members; }
  // Returns the device for a tensor of a branch.
  Device device(uint32_t branch, void* workspace, cudaStream_t stream,
                dr_cuda_result* result) const;

 private:
  struct Branch {
    std::vector<uint64_t> members;
    uint64_t elements, start, bytes;  // of its workspace
  };
  std::vector<uint64_t> elements_, bytes_;
  std::vector<Branch> branches_;
  uint64_t workspace_bytes_ = 0;
};

class Encodings {
 public:
  // Throws if the host can see that an argument is invalid.
  Encodings(const dr_codec* codecs, const dr_cuda_encoding* encodings, uint64_t count,
            uint32_t most_branches);
  const Branches& branches() const { return branches_; }
  // Returns the maximum size of a payload.
  uint64_t payload_capacity(uint64_t i) const { return payload_capacities_[i]; }
  // Starts the work of a branch. It reads the table when it runs.
  void start(uint32_t branch, void* workspace, cudaStream_t stream) const;

  // Copies the table of a step to the workspace.
  static void set_table(const dr_cuda_encoding* encodings, uint64_t count, void* workspace,
                        cudaStream_t stream);

 private:
  const dr_codec* codecs_;
  const dr_cuda_encoding* encodings_;
  std::vector<uint64_t> payload_capacities_;
  Branches branches_;
};

class Sums {
 public:
  // Throws if the host can see that an argument is invalid.
  Sums(const dr_codec& codec, const dr_cuda_sum* sums, uint64_t count, uint32_t most_branches);
  const Branches& branches() const { return branches_; }
  void start(uint32_t branch, void* workspace, cudaStream_t stream) const;

  static void set_table(const dr_codec& codec, const dr_cuda_sum* sums, uint64_t count,
                        void* workspace, cudaStream_t stream);

 private:
  const dr_codec& codec_;
  const dr_cuda_sum* sums_;
  const uint64_t count_;
  std::vector<uint64_t> first_;  // payload of each sum, in the table
  Branches branches_;
};

}  // namespace cuda
}  // namespace deepreduce
#endif
