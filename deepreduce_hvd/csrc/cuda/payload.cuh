// The container of docs/format.md on the device.
#ifndef DEEPREDUCE_CUDA_PAYLOAD_CUH
#define DEEPREDUCE_CUDA_PAYLOAD_CUH

#include "container/payload.h"
#include "cuda/codecs.cuh"
#include "cuda/select.cuh"

namespace deepreduce {
namespace cuda {

// Results of the device while it encodes, in device memory.
struct Plan {
  uint32_t all;                   // all elements are selected, so there is no index section
  uint32_t index_count;           // indices for the index codec; 0 if all are selected
  uint32_t dense;                 // compression would not save bytes: the tensor itself is sent
  uint32_t count;                 // values in the payload
  uint64_t lengths[3];            // of the sections
  uint64_t total;                 // bytes of the payload; 0 after a failure
  uint64_t header[kHeaderWords];  // the words before the checksum
  uint64_t checksum;
};

// The sections from their codecs. `bytes` is null if there is none.
struct Parts {
  SectionOut index, value, order;
  int index_id, value_id;
  uint8_t order_kind, order_kind_of_all;  // if not all, or if all elements are selected
};

// Decides what is sent: `count` values of a selection, or of the result of a lossy index codec.
void make_plan(Device&, const Parts&, uint32_t d, int dtype, const uint32_t* count, Plan* plan);

// Writes header, sections or the dense tensor, and checksum to `payload`, and the outcome to the
// result.
void assemble(Device&, const Parts&, const Accumulated&, uint32_t d, int dtype, Plan* plan,
              uint8_t* payload);

// Subtracts the decoded values of the payload from the memory: `values` at `indices` (null: all
// elements). A dense payload decodes to the tensor itself.
void remember_rest(Device&, const dr_codec&, const Encoding&, const Plan* plan,
                   const uint32_t* indices, const float* values, uint32_t capacity);

// Returns element i of a dense tensor as the payload stores it.
__device__ inline float as_carried(float value, int dtype) {
  return dtype == DR_FLOAT16    ? float16_to_float(float_to_float16(value))
         : dtype == DR_BFLOAT16 ? bfloat16_to_float(float_to_bfloat16(value))
                                : value;
}

}  // namespace cuda
}  // namespace deepreduce
#endif
