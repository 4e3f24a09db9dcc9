// The C ABI of the CUDA core: device pointers, sizes, a stream, the caller's workspace and a
// status.
//
// Nothing here synchronizes, allocates, or reads device memory on the host. Results that only the
// device knows (a payload's length, corrupt bytes, NaN or Inf) are in a dr_cuda_result in device
// memory. The caller reads it when the stream has finished the call.
#ifndef DEEPREDUCE_CUDA_H
#define DEEPREDUCE_CUDA_H

#include "api/deepreduce.h"

#ifdef __cplusplus
extern "C" {
#endif

// a status in addition to dr_status: the CUDA runtime refused a launch or a copy
enum { DR_CUDA_ERROR = 5 };

// In device memory, 8-byte aligned. Records the first failure on the device.
typedef struct dr_cuda_result {
  int32_t status;          // enum dr_status
  int32_t code;            // which check failed; see dr_cuda_message
  uint64_t expected, got;  // the numbers of that message
  uint64_t payload;        // decoding: the position of the refused payload
  uint64_t payload_bytes;  // encoding: length of the payload
  uint32_t count;          // encoding: values in the payload
  int32_t non_finite;      // encoding: the gradient has NaN or Inf; decoding: a payload says so
} dr_cuda_result;

typedef struct dr_cuda_encoding {
  // (d,) of dtype, device memory; aligned to its elements, faster when aligned to 16 bytes
  const void* gradient;
  int32_t dtype;  // enum dr_dtype
  uint64_t d;
  float* residual;  // (d,) or null, as in dr_encoding; device memory
  float* velocity;  // (d,) or null
  dr_position position;
  uint8_t* payload;  // device memory, 8-byte aligned
  // size of the memory at payload; dr_cuda_encode returns a size that is always enough
  uint64_t payload_capacity;
  dr_cuda_result* result;  // device memory
  uint8_t* header;  // device memory for a copy of the payload's first DR_HEADER_BYTES, or null
} dr_cuda_encoding;

// Encodes `count` tensors of one device; codecs and encodings have one entry for each. With a null
// workspace, only sets *workspace_bytes and each payload_capacity to the required sizes; then the
// other memory is not read. Returns the failures that are known without the device; the others are
// in encoding->result. A codec without device support is DR_UNKNOWN_CODEC. cuda_stream is a
// cudaStream_t. Of `context`, only `message` is used. Tensors are encoded at the same time, so they
// must not share memory.
int dr_cuda_encode(dr_context* context, const dr_codec* codecs, dr_cuda_encoding* encodings,
                   uint64_t count, void* workspace, size_t* workspace_bytes, void* cuda_stream);

// Launches that were recorded for the current device. All arrays and the workspace that they use
// must exist as long as the graph. Two launches of a graph must not run at the same time.
typedef struct dr_cuda_graph dr_cuda_graph;
void dr_cuda_free(dr_cuda_graph* graph);

// Records what dr_cuda_encode does, in place of doing it. dr_cuda_launch_encodings then does it
// with the gradients and positions of its own `encodings`, whose other fields are the recorded
// ones. dr_cuda_repeats must be true of each codec: the permutations of RandomK are made on the
// host. The workspace can be larger than for dr_cuda_encode, because more tensors are encoded at
// the same time.
int dr_cuda_record_encodings(dr_context* context, const dr_codec* codecs,
                             dr_cuda_encoding* encodings, uint64_t count, void* workspace,
                             size_t* workspace_bytes, dr_cuda_graph** graph);
int dr_cuda_launch_encodings(dr_context* context, const dr_cuda_graph* graph,
                             const dr_cuda_encoding* encodings, void* cuda_stream);
int dr_cuda_repeats(const dr_codec* codec);

// The sum of the payloads of one tensor. Pointers to payloads and sizes are in host memory.
typedef struct dr_cuda_sum {
  const uint8_t* const* payloads;  // device memory of any alignment
  const uint64_t* sizes;
  // at least as large as `sizes`; of a graph: equal to the recorded ones
  const uint64_t* most_sizes;
  uint64_t payload_count;
  float* out;  // (d,) device memory
  uint64_t d;
  float scale;
  dr_cuda_result* result;  // device memory
} dr_cuda_sum;

// Adds, for each of `count` tensors of one device, scale * the dense tensor of each payload to out,
// in the given order. Payloads must be of `codec`, dense or non-finite. Others are recorded as
// DR_UNKNOWN_CODEC, so that dr_decode_sum can decode them. If a payload is refused, the payloads
// before it are in the sum and those after it are not. With a null workspace, only sets
// *workspace_bytes; then payloads, sizes, out and result are not read. The sums are made at the
// same time, so they must not share memory.
int dr_cuda_decode_sum(dr_context* context, const dr_codec* codec, const dr_cuda_sum* sums,
                       uint64_t count, void* workspace, size_t* workspace_bytes, void* cuda_stream);
// The same as graphs: the payloads, outputs and scales are those of each launch.
int dr_cuda_record_sums(dr_context* context, const dr_codec* codec, const dr_cuda_sum* sums,
                        uint64_t count, void* workspace, size_t* workspace_bytes,
                        dr_cuda_graph** graph);
int dr_cuda_launch_sums(dr_context* context, const dr_cuda_graph* graph, const dr_codec* codec,
                        const dr_cuda_sum* sums, void* cuda_stream);

// Returns whether encode and decode support the codec's stages.
int dr_cuda_supports(const dr_codec* codec);

// Reads a result that was copied to the host: returns its status and writes the message to
// context->message.
int dr_cuda_message(dr_context* context, const dr_cuda_result* result);

#ifdef __cplusplus
}
#endif
#endif
