// The functions behind the C ABI. They throw failures that are known on the host.
#ifndef DEEPREDUCE_CUDA_ENCODE_CUH
#define DEEPREDUCE_CUDA_ENCODE_CUH

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

// out (d,) += scale * the dense tensor of payload number `position`.
void decode_sum(Device&, const dr_codec&, uint64_t position, const uint8_t* payload, uint64_t size,
                float* out, uint64_t d, float scale);

}  // namespace cuda
}  // namespace deepreduce
#endif
