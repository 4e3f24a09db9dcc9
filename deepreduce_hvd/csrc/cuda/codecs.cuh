// The contracts of the stages on the device and the tables that name them: csrc/codecs.h, where
// counts and lengths lie in device memory. A codec is one .cu file in index/ or value/ and one row
// in registry.cu.
//
// What is *host* below can be branched on by host code; everything else lies on the device and is
// read by kernels only. Host code passes device pointers to launches and computes offsets at most;
// while device.measuring() they point nowhere, and the same arrays are taken as ever.
#ifndef DEEPREDUCE_CUDA_CODECS_CUH
#define DEEPREDUCE_CUDA_CODECS_CUH

#include "codecs.h"
#include "cuda/device.cuh"
#include "support/bits.h"

namespace deepreduce {
namespace cuda {

// A section that an encoder writes. `data` is in workspace, 256-byte aligned and not initialised,
// with room for the codec's section_capacity and kSectionSlack more bytes, so that whole words may
// be written at the end. What lies beyond *bytes is ignored.
constexpr uint64_t kSectionSlack = 16;
struct SectionOut {
  uint8_t* data;
  uint64_t capacity;  // host: what section_capacity said
  uint64_t* bytes;    // out: one thread writes it
};

struct DeviceIndexEncoding {
  uint32_t d;  // host
  // host: *count is at most this; arrays of `count` elements have room for so many, at least one
  uint32_t capacity;
  const uint32_t* count;     // 0 is possible at any time (nothing selected, or a gradient with NaN)
  const uint32_t* indices;   // (count,) ascending, below d, unless the codec keeps any order
  const double* parameters;  // host: of the stage
  double value_bits;         // host: what one more value costs in the payload, for fpr="auto"
  uint64_t key;              // host: of Purpose::bloom_policy
  SectionOut section;
  // Out, for a codec that is not lossless: what the receiver will derive. Lossless codecs leave
  // these alone.
  uint32_t decoded_capacity;      // host: in, decoded_capacity(d, capacity, parameters)
  const uint32_t* decoded_count;  // in: count. A lossy codec points it to a word of its own
  const uint32_t* decoded;        // in: indices. (decoded_capacity,) ascending
  // host: the values stay those of `indices`, position by position (the naive policy)
  bool values_stay;
};

// A section that a decoder reads: a struct in device memory. Not active: the payload has no such
// section (a dense one has no indices, a refused or non-finite one has nothing); nothing must then
// be checked, refused or written.
struct DeviceSection {
  const uint8_t* data;  // of any alignment
  uint64_t bytes;
  uint32_t d, count;  // count <= d, and at most the `capacity` that the decoder is told
  uint32_t active;
};

// First thing in every kernel of a decoder: not active, or something was refused before (of what
// was refused, scratch may hold anything).
__device__ inline bool skipped(const DeviceSection* section, const dr_cuda_result* result) {
  return section->active == 0 || refused(result);
}
// In kernels with barriers: the same answer for all threads of the block, all must call it.
__device__ inline bool block_skipped(const DeviceSection* section, const dr_cuda_result* result) {
  return __syncthreads_or(threadIdx.x == 0 && skipped(section, result)) != 0;
}

// Whether the bits after the first `bits` bits of `data` are zero; refuses the section if not.
__device__ inline bool expect_zero_padding(const uint8_t* data, uint64_t bits,
                                           dr_cuda_result* result) {
  if (is_zero_padded(data, bits)) return true;
  refuse(result, Refused::padding, bits, data[bits / 8]);
  return false;
}

struct DeviceIndexCodec {
  int id;
  const char* name;
  bool any_order;  // as in IndexCodec
  // Host: the longest section of at most `capacity` of d indices. Also validates the parameters
  // (invalid_argument, as the CPU core does).
  uint64_t (*section_capacity)(uint32_t d, uint32_t capacity, const double* parameters);
  // Host: the most indices that are decoded; null for a lossless codec.
  uint32_t (*decoded_capacity)(uint32_t d, uint32_t capacity, const double* parameters);
  void (*encode)(Device&, DeviceIndexEncoding&);
  // Host: the most indices below d that a valid section of so many bytes can hold. What a payload's
  // header says beyond it is refused before decode.
  uint32_t (*most_count)(uint64_t bytes, uint32_t d);
  // Fills indices (capacity,): the section's `count`, all below d, distinct, ascending unless
  // any_order (then checked by who calls); refuses all that the CPU core refuses. most_bytes: host,
  // the section has at most so many. parameters: host, of the receiver's stage; scratch is provided
  // for sections of a stage like it, and of others what needs more may be refused as
  // DR_UNKNOWN_CODEC, which the host then decodes. Where it refuses, `indices` may be left as
  // anything.
  void (*decode)(Device&, const DeviceSection* section, uint32_t d, uint32_t capacity,
                 uint64_t most_bytes, const double* parameters, uint32_t* indices);
};

struct DeviceValueEncoding {
  uint32_t capacity;         // host
  const uint32_t* count;     // at most capacity
  const float* values;       // (capacity,) the first `count` are finite, the others anything
  const double* parameters;  // host
  uint64_t key;              // host: of Purpose::rounding
  SectionOut section;
  float* decoded;  // out, (capacity,): what values[i] decodes to, at its own position i
  // out, (capacity,) when the codec sorts: order[j] = position in `values` of the j-th value sent
  uint32_t* order;
};

struct DeviceValueCodec {
  int id;
  const char* name;
  bool sorts;
  // host: the CPU core's function of that name, shared with it through a header
  double (*bits_per_value)(const double* parameters);
  // host; validates the parameters
  uint64_t (*section_capacity)(uint32_t capacity, const double* parameters);
  void (*encode)(Device&, DeviceValueEncoding&);
  // host: the most values that a valid section of so many bytes can hold, UINT32_MAX if any
  uint32_t (*most_count)(uint64_t bytes);
  // Fills values (capacity,), in the order sent; refuses all that the CPU core refuses.
  void (*decode)(Device&, const DeviceSection* section, uint32_t capacity, uint64_t most_bytes,
                 float* values);
};

// Null when there is no such id, or the codec stays on the host.
const DeviceIndexCodec* find_device_index_codec(int id);
const DeviceValueCodec* find_device_value_codec(int id);

// The order mapping, as in csrc/container/order.h: order.cu.
uint64_t order_capacity(uint32_t capacity);
void write_order(Device&, const uint32_t* order, const uint32_t* count, uint32_t capacity,
                 SectionOut section);
void read_order(Device&, const DeviceSection* section, uint32_t capacity, uint32_t* order);

}  // namespace cuda
}  // namespace deepreduce
#endif
