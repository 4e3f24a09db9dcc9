// The work behind the C ABI, with failures that the host can tell thrown.
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

// Throws unknown_codec for what the device does not have.
Stages stages_of(const dr_codec& codec);

// Throws what the host can tell of the arguments.
void check(const dr_codec& codec, const dr_cuda_encoding& encoding);
// Throws unless the payload has room wherever it ends up.
void check_room(const dr_cuda_encoding& encoding);

void encode(Device&, const dr_codec&, const dr_cuda_encoding&);

// out (d,) += scale * the dense tensor of payload number `position`.
void decode_sum(Device&, const dr_codec&, uint64_t position, const uint8_t* payload, uint64_t size,
                float* out, uint64_t d, float scale);

}  // namespace cuda
}  // namespace deepreduce
#endif
