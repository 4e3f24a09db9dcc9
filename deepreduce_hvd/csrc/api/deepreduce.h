// The C ABI of the native core: raw pointers, sizes, the caller's allocator and a status.
//
// Nothing here throws, keeps global state or allocates memory itself: scratch memory and the result
// come from the callbacks in dr_context. Every call may run on any thread, concurrently.
#ifndef DEEPREDUCE_H
#define DEEPREDUCE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DR_ABI_VERSION 1

enum dr_status {
  DR_OK = 0,
  DR_CORRUPT_PAYLOAD = 1,   // the bytes are not a valid payload of this format
  DR_INVALID_ARGUMENT = 2,  // an argument is out of range or not supported
  DR_UNKNOWN_CODEC = 3,     // a codec id that this build does not have
  DR_OUT_OF_MEMORY = 4,     // the caller's allocator returned null
};

enum dr_dtype { DR_FLOAT32 = 0, DR_FLOAT16 = 1, DR_BFLOAT16 = 2, DR_FLOAT64 = 3 };

// The callbacks return null if there is no memory. They must not throw: some are called by zlib.
typedef struct dr_context {
  // scratch memory, 64-byte aligned; the caller frees all of it after the call
  void* (*allocate)(void* user, size_t bytes);
  // memory of the result; requested at most once per call
  void* (*output)(void* user, size_t bytes);
  void* user;
  int32_t simd;       // -1: the best of this processor; 0 scalar, 1 AVX2, 2 AVX-512
  char message[512];  // error message, zero-terminated, if the status is not DR_OK
} dr_context;

#define DR_STAGE_PARAMETERS 4
typedef struct dr_stage {
  int32_t id;  // that of a codec is in docs/format.md
  double parameters[DR_STAGE_PARAMETERS];
} dr_stage;

typedef struct dr_codec {
  dr_stage sparsifier, index, value, memory;
} dr_codec;

// A codec as a list of numbers: of each stage, in the order above, the id and the parameters.
#define DR_CODEC_FIELDS (4 * (1 + DR_STAGE_PARAMETERS))

// Reads a codec from its numbers. Fails with DR_INVALID_ARGUMENT unless there are DR_CODEC_FIELDS.
int dr_read_codec(dr_context* context, const double* fields, uint64_t field_count, dr_codec* codec);

// Keys of the counter-based random generator. Equal keys give equal bytes on every rank, machine
// and device.
typedef struct dr_position {
  uint64_t seed, step, tensor;
  // used only for choices that should differ between ranks (rounding), never for the selection
  uint64_t rank;
} dr_position;

typedef struct dr_encoding {
  const void* gradient;  // (d,) of dtype
  int32_t dtype;         // enum dr_dtype
  uint64_t d;
  // (d,) or null: in: added to the gradient; out: what the payload does not contain
  float* residual;
  float* velocity;  // (d,) or null: the momentum buffer of MomentumCorrection
  // in: expected magnitude of the k-th largest element, 0 if unknown; out: its magnitude. Never
  // changes the payload.
  float threshold;
  dr_position position;
  int32_t finite;  // in: nonzero if the gradient is known to have neither NaN nor Inf
  uint32_t count;  // out: number of values in the payload
} dr_encoding;

// Encodes one tensor. The payload is written to context->output.
int dr_encode(dr_context* context, const dr_codec* codec, dr_encoding* encoding);

// Error feedback and selection without coding. The output is (count,) uint32 ascending indices
// followed by (count,) float32 values, 8 * count bytes. They are removed from the memory. `given`:
// (given_count,) ascending distinct indices to take instead of the sparsifier's choice, or null. A
// gradient with NaN or Inf sets *non_finite, selects nothing and leaves the memory unchanged.
int dr_select(dr_context* context, const dr_codec* codec, dr_encoding* encoding,
              const uint32_t* given, uint64_t given_count, int32_t* non_finite);

typedef struct dr_sparse_encoding {
  const uint32_t* indices;  // (count,) ascending, distinct, below d
  float* values;            // (count,); with write_back: out: the error of the payload
  uint64_t count, d;
  // enum dr_dtype, for the header and for payloads that contain all elements
  int32_t dtype;
  int32_t write_back;
  dr_position position;
  // Outputs, in scratch memory: ascending indices of elements that were not given but that the
  // payload decodes to nonzero values (a lossy index codec adds them), and the error of the payload
  // there, the negatives of these values.
  const uint32_t* added_indices;
  const float* added_values;
  uint64_t added_count;
} dr_sparse_encoding;

// Encodes a tensor of d elements that is 0 except where given, with the codec's index and value
// stages. Its sparsifier and memory are not used. Time and scratch memory are proportional to
// count, unless the index codec or a payload of all elements needs d. NaN or Inf among the values
// makes a non-finite payload and leaves the values unchanged.
int dr_encode_sparse(dr_context* context, const dr_codec* codec, dr_sparse_encoding* encoding);

// Adds scale * the dense tensor of each payload to out (d,), in the given order. *largest, if not
// null, becomes the largest magnitude after any addition to any element, where NaN counts as the
// largest. So if it is neither Inf nor NaN, no addition overflowed.
int dr_decode_sum(dr_context* context, const uint8_t* const* payloads, const uint64_t* sizes,
                  uint64_t payload_count, float* out, uint64_t d, float scale, float* largest);

// Outputs the sum of the payloads as (count,) uint32 ascending distinct indices followed by
// (count,) float32 values, 8 * count bytes. Fails with DR_INVALID_ARGUMENT if a payload is
// non-finite: such a sum has no sparse form.
int dr_decode_sparse(dr_context* context, const uint8_t* const* payloads, const uint64_t* sizes,
                     uint64_t payload_count, uint64_t d, float scale);

// Divides a sparse tensor into its k elements of largest magnitude (of equal ones, those of the
// smaller indices) and the rest. The output is (count,) uint32 indices followed by (count,) float32
// values, 8 * count bytes: first the k largest, then the rest, each in the given order. NaN counts
// as the largest.
int dr_keep_largest(dr_context* context, const uint32_t* indices, const float* values,
                    uint64_t count, uint64_t k);

// Returns values to a memory that dr_select or dr_encode took from it but that did not reach the
// sum: values[i] to element indices[i] - start of the residual (d,). Zeros change nothing.
int dr_put_back(dr_context* context, const dr_stage* memory, const uint32_t* indices,
                const float* values, uint64_t count, uint64_t start, float* residual, uint64_t d);

// Adds scale * values[i] to the element indices[i] - start of out (d,). *largest, if not null, is
// as for dr_decode_sum.
int dr_add_sparse(dr_context* context, const uint32_t* indices, const float* values, uint64_t count,
                  uint64_t start, float scale, float* out, uint64_t d, float* largest);

// The header of a payload, after all checks that need no decoding.
typedef struct dr_header {
  int32_t version, flags, index_id, value_id, dtype, order;
  uint64_t d, count, index_bytes, value_bytes, order_bytes, total_bytes;
} dr_header;
int dr_inspect(dr_context* context, const uint8_t* payload, uint64_t size, dr_header* header);

#define DR_HEADER_BYTES 40
// Reads the fields of a header alone, without any check of them. Fails with DR_CORRUPT_PAYLOAD if
// there are fewer than DR_HEADER_BYTES bytes.
int dr_read_header(dr_context* context, const uint8_t* start, uint64_t size, dr_header* header);

// Sets the index and value stages of a codec that decodes payloads with this header. A stage that
// the payload does not have, as in a dense one, becomes RawIndex or RawValue. Parameters,
// sparsifier and memory, which decoding does not need, are 0.
void dr_decoding_codec(const dr_header* header, dr_codec* codec);

// Default limit for the number of elements of a payload, if the receiver does not give the number
// it expects: 2^24 (64 MiB of float32), or 4096 per payload byte if that is more. Without a limit,
// a header of 40 bytes could request 8 GiB.
uint64_t dr_default_max_elements(uint64_t payload_bytes);

// A message between ranks: a payload, or the notice that a rank sends in place of a payload when it
// cannot encode.
typedef struct dr_message {
  uint64_t bytes;       // size of the whole message
  int32_t non_finite;   // whether it is a payload of a gradient with NaN or Inf
  const uint8_t* text;  // text of a notice, not zero-terminated; null for a payload
  uint64_t text_bytes;
} dr_message;

// Reads the first of the concatenated messages that a gather returns.
int dr_read_message(dr_context* context, const uint8_t* messages, uint64_t size,
                    dr_message* message);

// Writes a notice to context->output.
int dr_write_notice(dr_context* context, const char* text, uint64_t text_bytes);

// Writes the notice of messages of `size` bytes that are too large to send: `senders` ranks may
// send as much to one rank, which can receive `most` bytes. rank: global number of the rank that
// sends.
int dr_write_size_notice(dr_context* context, uint64_t size, uint64_t senders, uint64_t most,
                         uint64_t rank);

// The probe that compress gives to Horovod's reduction: four numbers, exact in float32. They are 1,
// a hash of the rank, from 0 to 2, and the low and the high 16 bits of a mark of configuration,
// step and loss scale (0 for none), each divided by 65536.
#define DR_PROBE_LENGTH 4
void dr_make_probe(uint64_t rank, uint32_t fingerprint, uint64_t step, double loss_scale,
                   double* probe);

// Reads from the reduced probe the factor that Horovod's reduction applies to each rank's gradient
// (1 / size under an average). ranks: the global ranks that exchange. Fails with
// DR_INVALID_ARGUMENT if the reduction is not a sum or average over these ranks, or if another rank
// has a different configuration, step or loss scale. If one of up to 4096 ranks is missing, it
// always fails.
int dr_scale(dr_context* context, const double* reduced_probe, const uint64_t* ranks,
             uint64_t rank_count, uint32_t fingerprint, uint64_t step, double loss_scale,
             double* scale);

// A row of the table of built-in stages.
typedef struct dr_stage_row {
  const char* kind;   // "sparsifier", "index", "value" or "memory"
  const char* name;   // name of its class
  const char* file;   // stem of its Python file
  int32_t on_device;  // whether it has CUDA kernels
  dr_stage stage;     // its id and default parameters
} dr_stage_row;

// Returns row `number` of the table, ordered by kind and id; null past the last one.
const dr_stage_row* dr_stage_table(uint32_t number);

// Returns the best SIMD level of this processor and build: 0 scalar, 1 AVX2, 2 AVX-512.
int dr_simd_level(void);

#ifdef __cplusplus
}
#endif
#endif
