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
// Throws unless the memory is sufficient for every possible payload.
void check_room(const dr_cuda_encoding& encoding);

void encode(Device&, const dr_codec&, const dr_cuda_encoding&);

// The encodings of several tensors. They are divided among `branches`, which have workspaces of
// their own, one after another.
class Encodings {
 public:
  // Throws if the host can see that an argument is invalid.
  Encodings(const dr_codec* codecs, const dr_cuda_encoding* encodings, uint64_t count,
            uint32_t branches);
  uint64_t workspace_bytes() const { return workspace_bytes_; }
  uint32_t branches() const { return static_cast<uint32_t>(branches_.size()); }
  // Starts the work of a branch. `workspace`: of all branches.
  void encode(uint32_t branch, void* workspace, cudaStream_t stream) const;

 private:
  struct Branch {
    std::vector<uint64_t> members;
    uint64_t elements, start, bytes;  // of its workspace
  };
  const dr_codec* codecs_;
  const dr_cuda_encoding* encodings_;
  std::vector<Branch> branches_;
  uint64_t workspace_bytes_ = 0;
};

// Whether encoding draws no random numbers.
bool repeats(const dr_codec&);

// out (d,) += scale * the dense tensor of payload number `position`.
void decode_sum(Device&, const dr_codec&, uint64_t position, const uint8_t* payload, uint64_t size,
                float* out, uint64_t d, float scale);

}  // namespace cuda
}  // namespace deepreduce
#endif
