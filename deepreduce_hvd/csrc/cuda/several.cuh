// The same work for several tensors: on one stream, or on the branches of a graph. What differs
// from step to step is in a table at the start of the workspace.
#ifndef DEEPREDUCE_CUDA_SEVERAL_CUH
#define DEEPREDUCE_CUDA_SEVERAL_CUH

#include <vector>

#include "cuda/encode.cuh"
#include "cuda/launch.cuh"

namespace deepreduce {
namespace cuda {

// The work for several tensors; a subclass says what is done for each. Launches of tensors of
// similar size become one, so two tensors of a call must not write to the same memory.
class Several {
 public:
  Several(const Several&) = delete;
  Several& operator=(const Several&) = delete;

  uint32_t branches() const { return static_cast<uint32_t>(branches_.size()); }
  uint64_t workspace_bytes() const { return workspace_bytes_; }

  // Prepares the merged launches for a workspace. Returns the arguments of their kernels, which
  // must be in the workspace, from arguments_start(), when the work runs. Call it before start.
  std::vector<uint8_t> merge(void* workspace);
  uint64_t arguments_start() const { return arguments_start_; }
  // Starts the work of a branch. It reads the table when it runs.
  void start(uint32_t branch, void* workspace, cudaStream_t stream) const;

 protected:
  // `most_branches`: the maximum number of branches for tensors whose launches are not merged.
  Several(uint64_t count, uint32_t most_branches) : most_branches_(most_branches), sizes_(count) {}
  virtual ~Several() = default;

  // Does the work for a tensor.
  virtual void work(uint64_t i, const void* table, Device&) const = 0;
  virtual dr_cuda_result* result_of(uint64_t i) const = 0;

  // Measures the work for a tensor. Returns the maximum size of its payload, if it makes one.
  uint64_t measure(uint64_t i, uint64_t elements);
  // Divides the tensors among branches, once all are measured.
  void divide(uint64_t table_bytes);

 private:
  struct Size {
    uint64_t elements;
    uint64_t bytes, merged_bytes;  // of the workspace, without and with merged launches
    KeptLaunches launches;         // their addresses are invalid
  };
  // A kernel that is started once for all tensors of a batch.
  struct Merged {
    StartForEach start;
    Grid grid;
    const void* arguments;
  };
  // One tensor, or several whose launches are merged.
  struct Batch {
    std::vector<uint64_t> members;
    bool merges;
    uint64_t bytes;  // of the workspace
    std::vector<Merged> launches;
  };
  // Its batches use the same part of the workspace, one after another.
  struct Branch {
    std::vector<Batch> batches;
    uint64_t elements, start, bytes;
  };

  void add_merged_branches(std::vector<bool>& divided);
  void add_branches(const std::vector<bool>& divided);
  uint64_t arguments_bytes(const Batch&) const;
  void merge(Batch&, void* workspace, uint64_t start, std::vector<uint8_t>& arguments) const;

  const uint32_t most_branches_;
  std::vector<Size> sizes_;
  std::vector<Branch> branches_;
  uint64_t arguments_start_ = 0, workspace_bytes_ = 0;
};

class Encodings : public Several {
 public:
  // Throws if the host can see that an argument is invalid.
  Encodings(const dr_codec* codecs, const dr_cuda_encoding* encodings, uint64_t count,
            uint32_t most_branches);
  // Returns the maximum size of a payload.
  uint64_t payload_capacity(uint64_t i) const { return payload_capacities_[i]; }
  // Throws unless there is memory for all payloads.
  void check_rooms() const;

  // Copies the table of a step to the workspace.
  static void set_table(const dr_cuda_encoding* encodings, uint64_t count, void* workspace,
                        cudaStream_t stream);

 private:
  void work(uint64_t i, const void* table, Device&) const override;
  dr_cuda_result* result_of(uint64_t i) const override { return encodings_[i].result; }

  const dr_codec* codecs_;
  const dr_cuda_encoding* encodings_;
  std::vector<uint64_t> payload_capacities_;
};

class Sums : public Several {
 public:
  // Throws if the host can see that an argument is invalid.
  Sums(const dr_codec& codec, const dr_cuda_sum* sums, uint64_t count, uint32_t most_branches);

  static void set_table(const dr_codec& codec, const dr_cuda_sum* sums, uint64_t count,
                        void* workspace, cudaStream_t stream);

 private:
  void work(uint64_t i, const void* table, Device&) const override;
  dr_cuda_result* result_of(uint64_t i) const override { return sums_[i].result; }

  const dr_codec& codec_;
  const dr_cuda_sum* sums_;
  const uint64_t count_;
  std::vector<uint64_t> first_;  // payload of each sum, in the table
};

// Copies bytes of the host to the device. They can be freed when it returns.
void copy_from_host(void* to, const std::vector<uint8_t>& from, cudaStream_t stream);

}  // namespace cuda
}  // namespace deepreduce
#endif
