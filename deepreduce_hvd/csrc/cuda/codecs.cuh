// The interfaces of the stages on the device, and the tables of the stages. They correspond to
// csrc/codecs.h, but counts and lengths are in device memory. A codec is one .cu file in index/ or
// value/ and one row in stages.def with DR_HOST_AND_DEVICE.
//
// Fields marked *host* below are host values, so host code can branch on them. Everything else is
// in device memory and is read only by kernels. Host code only passes device pointers to launches
// and computes offsets. While device.measuring() is true, these pointers point nowhere, and host
// code allocates the same arrays as usual.
#ifndef DEEPREDUCE_CUDA_CODECS_CUH
#define DEEPREDUCE_CUDA_CODECS_CUH

#include "codecs.h"
#include "cuda/launch.cuh"
#include "support/bits.h"

namespace deepreduce {
namespace cuda {

// A section that an encoder writes. `data` is in the workspace, 256-byte aligned and not
// initialized. It has room for the section_capacity of the codec plus kSectionSlack bytes, so that
// whole words can be written at the end. Bytes beyond *bytes are ignored.
constexpr uint64_t kSectionSlack = 16;
struct SectionOut {
  uint8_t* data;
  uint64_t capacity;  // host: the result of section_capacity
  uint64_t* bytes;    // out: one thread writes it
};

struct DeviceIndexEncoding {
  uint32_t d;  // host
  // host: *count is at most this; arrays of `count` elements have room for max(capacity, 1)
  uint32_t capacity;
  const uint32_t* count;     // may always be 0 (nothing selected, or a gradient with NaN)
  const uint32_t* indices;   // (count,) below d; ascending, unless the codec accepts any order
  const double* parameters;  // host: parameters of the stage
  double value_bits;         // host: bits per additional value in the payload, for fpr="auto"
  const uint64_t* key;       // of Purpose::bloom_policy
  SectionOut section;
  // Out, for a lossy codec: the indices that the receiver will derive. Lossless codecs do not
  // change these fields.
  uint32_t decoded_capacity;      // host: in, decoded_capacity(d, capacity, parameters)
  const uint32_t* decoded_count;  // in: count. A lossy codec points it to another word
  const uint32_t* decoded;        // in: indices. (decoded_capacity,) ascending
  // host, true: the values of `indices` are sent in place of those at `decoded` (the naive policy)
  bool values_stay;
};

// A section that a decoder reads: a struct in device memory. It is not active if the payload has no
// such section: a dense payload has no indices, and a refused or non-finite payload has no
// sections. Nothing may then be checked, refused or written.
struct DeviceSection {
  const uint8_t* data;  // any alignment
  uint64_t bytes;
  uint32_t d, count;  // count <= d, and at most the `capacity` that is passed to the decoder
  uint32_t active;
};

// Every kernel of a decoder calls this first. Returns true if the section is not active or a
// failure was recorded before. After a failure, scratch memory may contain anything.
__device__ inline bool skipped(const DeviceSection* section, const dr_cuda_result* result) {
  return section->active == 0 || refused(result);
}
// For kernels with barriers: returns the same answer for all threads of the block. All must call
// it.
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
  // Host: returns the maximum length of a section of at most `capacity` of d indices. Also
  // validates the parameters (throws invalid_argument, like the CPU core).
  uint64_t (*section_capacity)(uint32_t d, uint32_t capacity, const double* parameters);
  // Host: returns the maximum number of decoded indices. Null for a lossless codec.
  uint32_t (*decoded_capacity)(uint32_t d, uint32_t capacity, const double* parameters);
  void (*encode)(Device&, DeviceIndexEncoding&);
  // Host: returns the maximum number of indices below d in a valid section of `bytes` bytes. A
  // larger count in the header of a payload is refused before decode.
  uint32_t (*most_count)(uint64_t bytes, uint32_t d);
  // Fills indices (capacity,) with the `count` indices of the section. They are below d, distinct,
  // and ascending. With any_order they may have another order; the caller then checks them. Refuses
  // everything that the CPU core refuses. most_bytes: host, the maximum size of the section.
  // parameters: host, of the stage of the receiver. Scratch memory is sufficient for sections of a
  // stage with these parameters. Sections of other stages that need more may be refused as
  // DR_UNKNOWN_CODEC, and the host then decodes them. After a failure, `indices` may contain
  // anything.
  void (*decode)(Device&, const DeviceSection* section, uint32_t d, uint32_t capacity,
                 uint64_t most_bytes, const double* parameters, uint32_t* indices);
};

struct DeviceValueEncoding {
  uint32_t capacity;         // host
  const uint32_t* count;     // at most capacity
  const float* values;       // (capacity,) the first `count` are finite, the others have any value
  const double* parameters;  // host
  const uint64_t* key;       // of Purpose::rounding
  SectionOut section;
  float* decoded;  // out, (capacity,): decoded[i] is the decoded value of values[i]
  // out, (capacity,), if the codec sorts: order[j] = position in `values` of the j-th value sent
  uint32_t* order;
};

struct DeviceValueCodec {
  int id;
  const char* name;
  bool sorts;
  // host: the function with this name of the CPU core, shared through a header
  double (*bits_per_value)(const double* parameters);
  // host: also validates the parameters
  uint64_t (*section_capacity)(uint32_t capacity, const double* parameters);
  void (*encode)(Device&, DeviceValueEncoding&);
  // host: the maximum number of values in a valid section of `bytes` bytes, UINT32_MAX if unlimited
  uint32_t (*most_count)(uint64_t bytes);
  // Fills values (capacity,), in the order sent. Refuses everything that the CPU core refuses.
  void (*decode)(Device&, const DeviceSection* section, uint32_t capacity, uint64_t most_bytes,
                 float* values);
};

// Returns null if the id is unknown or the codec has no CUDA kernels.
const DeviceIndexCodec* find_device_index_codec(int id);
const DeviceValueCodec* find_device_value_codec(int id);

// The order mapping in order.cu, as in csrc/container/order.h.
uint64_t order_capacity(uint32_t capacity);
void write_order(Device&, const uint32_t* order, const uint32_t* count, uint32_t capacity,
                 SectionOut section);
void read_order(Device&, const DeviceSection* section, uint32_t capacity, uint32_t* order);

}  // namespace cuda
}  // namespace deepreduce
#endif
