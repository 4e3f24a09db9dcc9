#include "cuda/select.cuh"

#include "api/arguments.h"
#include "support/random.h"

namespace deepreduce {
namespace cuda {
namespace {

__device__ void take_all(Accumulated sum, uint32_t d, uint32_t* count, float* values,
                         const dr_cuda_result* result) {
  if (result->non_finite != 0) return;
  for (uint32_t i = grid_index(); i < d; i += grid_stride()) values[i] = sum.at(i);
  if (grid_index() == 0) *count = d;
}

__device__ void gather_values(Accumulated sum, const uint32_t* indices, const uint32_t* count,
                              float* values) {
  for (uint32_t i = grid_index(); i < *count; i += grid_stride())
    values[i] = sum.at(indices == nullptr ? i : indices[i]);
}

DeviceSelection select_all(Device& device, const dr_codec& codec, const Encoding& encoding) {
  const uint32_t d = static_cast<uint32_t>(encoding.d);
  accumulate(device, codec, encoding, Candidates{});
  uint32_t* count = device.zeros<uint32_t>(1);
  float* values = device.array<float>(d);
  launch_elementwise<take_all>(device, blocks_for(d, 4), accumulated(encoding), d, count, values,
                               device.result());
  return {d, count, nullptr, values};
}

}  // namespace

void gather(Device& device, const Accumulated& sum, const uint32_t* indices, const uint32_t* count,
            uint32_t capacity, float* values) {
  launch_elementwise<gather_values>(device, blocks_for(capacity), sum, indices, count, values);
}

DeviceSelection select(Device& device, const dr_codec& codec, const Encoding& encoding) {
  find_non_finite(device, encoding);
  const dr_stage& sparsifier = codec.sparsifier;
  if (encoding.d == 0) return select_all(device, codec, encoding);
  switch (sparsifier.id) {
    case kTopK:
      return select_largest(device, codec, encoding, kept_count(sparsifier, encoding.d));
    case kRandomK:
      return select_random(device, codec, encoding, kept_count(sparsifier, encoding.d));
    case kThreshold:
      return select_above(device, codec, encoding, static_cast<float>(sparsifier.parameters[0]));
    case kChunkTopK:
      return select_largest_of_chunks(device, codec, encoding,
                                      static_cast<uint32_t>(sparsifier.parameters[0]));
    default:
      return select_all(device, codec, encoding);
  }
}

}  // namespace cuda
}  // namespace deepreduce
