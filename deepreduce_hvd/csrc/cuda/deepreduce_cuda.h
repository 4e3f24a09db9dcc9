// The C ABI of the CUDA twins: device pointers, sizes, a stream, the caller's workspace and a
// status.
//
// Nothing here synchronises, allocates, or reads device memory on the host. What becomes known on
// the device (a payload's length, corrupt bytes, NaN or Inf) lies in a dr_cuda_result in device
// memory, which the caller reads once the stream has come that far.
#ifndef DEEPREDUCE_CUDA_H
#define DEEPREDUCE_CUDA_H

#include "deepreduce.h"

#ifdef __cplusplus
extern "C" {
#endif

// a status besides those of dr_status: the CUDA runtime refused a launch or a copy
enum { DR_CUDA_ERROR = 5 };

// In device memory, 8-byte aligned. The first failure on the device is the one recorded.
typedef struct dr_cuda_result {
  int32_t status;          // enum dr_status
  int32_t code;            // which check failed; dr_cuda_message puts it into words
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
  // bytes there; dr_cuda_payload_capacity says how many are always enough
  uint64_t payload_capacity;
  dr_cuda_result* result;  // device memory
} dr_cuda_encoding;

// The longest payload that this codec makes of d elements of this dtype: 40 bytes and what dense
// elements take.
uint64_t dr_cuda_payload_capacity(uint64_t d, int32_t dtype);

// Encodes one tensor. With a null workspace only *workspace_bytes is set, to what the call needs;
// pointers other than codec are then not followed. Returns what could be told without the device;
// the rest comes in encoding->result. A codec that stays on the host is DR_UNKNOWN_CODEC.
// cuda_stream is a cudaStream_t. Of `context` only `message` is used.
int dr_cuda_encode(dr_context* context, const dr_codec* codec, const dr_cuda_encoding* encoding,
                   void* workspace, size_t* workspace_bytes, void* cuda_stream);

// out (d,) += scale * the dense tensor of each payload, in the order given. `payloads`, host
// memory, holds device pointers of any alignment; `sizes` is host memory. Payloads are of `codec`,
// dense or non-finite; others are recorded as DR_UNKNOWN_CODEC, for dr_decode_sum to decode. When
// a payload is refused, those before it are in the sum and those after it are not.
int dr_cuda_decode_sum(dr_context* context, const dr_codec* codec, const uint8_t* const* payloads,
                       const uint64_t* sizes, uint64_t payload_count, float* out, uint64_t d,
                       float scale, dr_cuda_result* result, void* workspace,
                       size_t* workspace_bytes, void* cuda_stream);

// Whether encode and decode know the codec's stages.
int dr_cuda_supports(const dr_codec* codec);

// What a result copied to the host means: returns its status, and puts the message into
// context->message.
int dr_cuda_message(dr_context* context, const dr_cuda_result* result);

#ifdef __cplusplus
}
#endif
#endif
