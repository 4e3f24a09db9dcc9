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

// A payload to decode, in device memory.
struct Payload {
  const uint8_t* data;
  uint64_t size;
  uint32_t most, most_indices;  // maximum numbers of values and of indices for this size
};
// Throws if the payload is shorter than a header.
Payload described(const dr_codec&, uint64_t d, const uint8_t* data, uint64_t size);

// What is another in each step, in device memory.
struct SumInputs {
  float* out;
  float scale;
};

// inputs->out (d,) += inputs->scale * the dense tensor of payload number `position`. `payload` is
// in device memory. `most`: of the largest payload that can be there.
void decode_sum(Device&, const dr_codec&, uint64_t position, const Payload* payload,
                const Payload& most, const SumInputs* inputs, uint64_t d);

}  // namespace cuda
}  // namespace deepreduce
#endif
