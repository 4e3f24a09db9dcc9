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
// workspace, only sets *workspace_bytes to the required size; then payload, result and header are
// not read. Returns the failures that are known without the device; the others are in
// encoding->result. A codec without device support is DR_UNKNOWN_CODEC. cuda_stream is a
// cudaStream_t. Of `context`, only `message` is used.
int dr_cuda_encode(dr_context* context, const dr_codec* codecs, dr_cuda_encoding* encodings,
                   uint64_t count, void* workspace, size_t* workspace_bytes, void* cuda_stream);

// Records the same work of the current device as a graph in place of doing it. dr_cuda_launch then
// does it, as often as it is called, with the gradients and positions of its own `encodings`; their
// other fields must be the recorded ones, and all arrays and the workspace must still exist. Two
// launches must not run at the same time. dr_cuda_repeats must be true of each codec. With a null
// workspace, only sets *workspace_bytes. It is larger than for dr_cuda_encode, because several
// tensors are encoded at the same time.
typedef struct dr_cuda_graph dr_cuda_graph;
int dr_cuda_record(dr_context* context, const dr_codec* codecs, dr_cuda_encoding* encodings,
                   uint64_t count, void* workspace, size_t* workspace_bytes, dr_cuda_graph** graph);
int dr_cuda_launch(dr_context* context, const dr_cuda_graph* graph,
                   const dr_cuda_encoding* encodings, void* cuda_stream);
void dr_cuda_free(dr_cuda_graph* graph);
// Returns whether a graph may encode with this codec. RandomK's permutations are made on the host.
int dr_cuda_repeats(const dr_codec* codec);

// Adds scale * the dense tensor of each payload to out (d,), in the given order. `payloads`, in
// host memory, has device pointers of any alignment; `sizes` is in host memory. Payloads must be of
// `codec`, dense or non-finite. Others are recorded as DR_UNKNOWN_CODEC, so that dr_decode_sum can
// decode them. If a payload is refused, the payloads before it are in the sum and those after it
// are not.
int dr_cuda_decode_sum(dr_context* context, const dr_codec* codec, const uint8_t* const* payloads,
                       const uint64_t* sizes, uint64_t payload_count, float* out, uint64_t d,
                       float scale, dr_cuda_result* result, void* workspace,
                       size_t* workspace_bytes, void* cuda_stream);

// Returns whether encode and decode support the codec's stages.
int dr_cuda_supports(const dr_codec* codec);

// Reads a result that was copied to the host: returns its status and writes the message to
// context->message.
int dr_cuda_message(dr_context* context, const dr_cuda_result* result);

#ifdef __cplusplus
}
#endif
#endif
