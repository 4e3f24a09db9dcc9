// The functions behind the C ABI. They throw failures that are known on the host.
#ifndef DEEPREDUCE_CUDA_ENCODE_CUH
#define DEEPREDUCE_CUDA_ENCODE_CUH

#include <vector>

#include "cuda/codecs.cuh"
#include "cuda/deepreduce_cuda.h"

namespace deepreduce {
namespace cuda {

struct Stages {
  const DeviceIndexCodec* index;
  const DeviceValueCodec* value;
};

// Throws unknown_codec if a stage has no CUDA kernels.
Stages stages_of(const dr_codec& codec);

// Throws if the host can see that an argument is invalid.
void check(const dr_codec& codec, const dr_cuda_encoding& encoding);
// Throws unless the memory has `needed` bytes, and is aligned.
void check_room(const dr_cuda_encoding& encoding, uint64_t needed);

// What is another in each step, in device memory: a graph, which is recorded once, reads it there.
struct Inputs {
  const void* gradient;
  uint64_t policy_key, rounding_key;  // of Purpose::bloom_policy and Purpose::rounding
};
Inputs inputs_of(const dr_cuda_encoding&);

struct Encoding : dr_cuda_encoding {
  const Inputs* inputs;  // in device memory; `gradient` is not read
};

void encode(Device&, const dr_codec&, const Encoding&);

// The encodings of several tensors. They are divided among `branches`, which have workspaces of
// their own, one after another.
class Encodings {
 public:
  // Throws if the host can see that an argument is invalid.
  Encodings(const dr_codec* codecs, const dr_cuda_encoding* encodings, uint64_t count,
            uint32_t branches);
  uint64_t workspace_bytes() const { return workspace_bytes_; }
  // Returns the maximum size of a payload.
  uint64_t payload_capacity(uint64_t i) const { return payload_capacities_[i]; }
  uint32_t branches() const { return static_cast<uint32_t>(branches_.size()); }
  // Copies the inputs of a step to the workspace, of all branches.
  static void set_inputs(const dr_cuda_encoding* encodings, uint64_t count, void* workspace,
                         cudaStream_t stream);
  // Starts the work of a branch. It reads the inputs when it runs.
  void encode(uint32_t branch, void* workspace, cudaStream_t stream) const;

 private:
  struct Branch {
    std::vector<uint64_t> members;
    uint64_t elements, start, bytes;  // of its workspace
  };
  std::vector<uint64_t> payload_capacities_;
  const dr_codec* codecs_;
  const dr_cuda_encoding* encodings_;
  std::vector<Branch> branches_;
  uint64_t workspace_bytes_ = 0;
};

// out (d,) += scale * the dense tensor of payload number `position`.
void decode_sum(Device&, const dr_codec&, uint64_t position, const uint8_t* payload, uint64_t size,
                float* out, uint64_t d, float scale);

}  // namespace cuda
}  // namespace deepreduce
#endif
