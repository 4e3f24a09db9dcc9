// The failures that kernels report. Each row: name, status, text. The text is printed with
// (expected, got) as unsigned long long, in that order.
#ifndef DEEPREDUCE_CUDA_FAILURES_H
#define DEEPREDUCE_CUDA_FAILURES_H

#include "cuda/deepreduce_cuda.h"

// clang-format off
#define DR_CUDA_FAILURES(row)                                                                                                                          \
  row(payload_magic, DR_CORRUPT_PAYLOAD, "payload magic: expected %llx, got %llx as a number of 4 bytes")                                              \
  row(payload_version, DR_CORRUPT_PAYLOAD, "payload version: expected %llu, got %llu")                                                                 \
  row(payload_length, DR_CORRUPT_PAYLOAD, "payload length: expected %llu bytes from the header, got %llu")                                             \
  row(payload_checksum, DR_CORRUPT_PAYLOAD, "payload checksum: expected %016llx, got %016llx")                                                         \
  row(payload_flags, DR_CORRUPT_PAYLOAD, "payload flags: expected at most %llu, got %llu")                                                             \
  row(payload_dtype, DR_CORRUPT_PAYLOAD, "payload dtype: expected at most %llu, got %llu")                                                             \
  row(payload_order, DR_CORRUPT_PAYLOAD, "payload order: expected at most %llu, got %llu")                                                             \
  row(payload_reserved, DR_CORRUPT_PAYLOAD, "payload reserved bytes: expected %llu, got %llu")                                                         \
  row(payload_elements, DR_CORRUPT_PAYLOAD, "payload d: expected at most %llu, got %llu")                                                              \
  row(payload_count, DR_CORRUPT_PAYLOAD, "payload count: expected at most d = %llu, got %llu")                                                         \
  row(non_finite_values, DR_CORRUPT_PAYLOAD, "non-finite payload: expected %llu values, got %llu")                                                      \
  row(non_finite_bytes, DR_CORRUPT_PAYLOAD, "non-finite payload: expected %llu bytes without sections, got %llu")                                       \
  row(non_finite_index, DR_CORRUPT_PAYLOAD, "non-finite payload: expected the index codec %llu, got %llu")                                              \
  row(non_finite_value, DR_CORRUPT_PAYLOAD, "non-finite payload: expected the value codec %llu, got %llu")                                              \
  row(all_count, DR_CORRUPT_PAYLOAD, "payload without indices: expected count = d = %llu, got %llu")                                                   \
  row(all_index_bytes, DR_CORRUPT_PAYLOAD, "payload without indices: expected an index section of %llu bytes, got %llu")                               \
  row(all_order, DR_CORRUPT_PAYLOAD, "payload without indices: expected an order of at most %llu, got %llu")                                            \
  row(wrong_elements, DR_INVALID_ARGUMENT, "payload: expected d = %llu elements, got %llu")                                                            \
  row(value_id, DR_UNKNOWN_CODEC, "value codec: expected the id %llu of this codec, got %llu")                                                         \
  row(index_id, DR_UNKNOWN_CODEC, "index codec: expected the id %llu of this codec, got %llu")                                                         \
  row(order_of_unsorted, DR_CORRUPT_PAYLOAD, "payload order: expected %llu for values in the order of their indices, got %llu")                        \
  row(order_of_sorted, DR_CORRUPT_PAYLOAD, "payload order: expected at least %llu for values that are sent sorted, got %llu")                          \
  row(order_of_indices, DR_CORRUPT_PAYLOAD, "payload order: expected at most %llu for ascending indices, got %llu")                                    \
  row(count_of_bytes, DR_CORRUPT_PAYLOAD, "payload count: expected at most %llu values in sections of these lengths, got %llu")                        \
  row(section_too_long, DR_INVALID_ARGUMENT, "section: expected at most %llu bytes, got %llu; compress more or split the tensor")                      \
  row(index_section_bytes, DR_CORRUPT_PAYLOAD, "index section: expected %llu bytes, got %llu")                                                         \
  row(value_section_bytes, DR_CORRUPT_PAYLOAD, "value section: expected %llu bytes, got %llu")                                                         \
  row(order_section_bytes, DR_CORRUPT_PAYLOAD, "order section: expected %llu bytes, got %llu")                                                         \
  row(index_beyond_d, DR_CORRUPT_PAYLOAD, "index section: expected an index below d = %llu, got %llu")                                                 \
  row(index_twice, DR_CORRUPT_PAYLOAD, "index section: expected %llu distinct indices, got %llu twice")                                                \
  row(indices_not_ascending, DR_CORRUPT_PAYLOAD, "index section: expected ascending indices, got %llu followed by %llu")                               \
  row(set_bits, DR_CORRUPT_PAYLOAD, "index section: expected %llu set bits below d, got %llu or one at d or above")                                    \
  row(not_finite_half, DR_CORRUPT_PAYLOAD, "value section: expected finite %llu-bit values, got NaN or Inf (%llx)")                                    \
  row(not_a_permutation, DR_CORRUPT_PAYLOAD, "order section: expected a permutation of %llu positions, got %llu twice or beyond them")                 \
  row(padding, DR_CORRUPT_PAYLOAD, "section: expected zero padding and the end of %llu bits, got a last byte of %llu")                                 \
  row(rice_parameter, DR_CORRUPT_PAYLOAD, "index section: expected a Rice parameter of at most %llu, got %llu")                                        \
  row(block_end, DR_CORRUPT_PAYLOAD, "index section: expected consecutive blocks within %llu bytes, got one that ends at %llu")                        \
  row(block_start, DR_CORRUPT_PAYLOAD, "index section: expected a block to start at %llu, got %llu")                                                   \
  row(unary_bytes, DR_CORRUPT_PAYLOAD, "index section: expected at most %llu bytes of unary codes, got %llu")                                          \
  row(unary_codes, DR_CORRUPT_PAYLOAD, "index section: expected %llu unary codes that end in the last byte of a block, got %llu or other bytes")       \
  row(bloom_policy, DR_CORRUPT_PAYLOAD, "index section: expected a Bloom policy of 0 to %llu, got %llu")                                               \
  row(bloom_hashes, DR_CORRUPT_PAYLOAD, "index section: expected a Bloom filter of 1 to %llu hashes, got %llu")                                        \
  row(bloom_no_bits, DR_CORRUPT_PAYLOAD, "index section: expected a Bloom filter of at least %llu bit, got %llu")                                      \
  row(bloom_positives, DR_CORRUPT_PAYLOAD, "index section: expected a Bloom filter with %llu positives, got %llu")                                     \
  row(bloom_many_positives, DR_CORRUPT_PAYLOAD, "index section: expected a Bloom filter with at most %llu positives, got %llu")                        \
  row(bloom_alone, DR_CORRUPT_PAYLOAD, "index section: expected at most %llu positives that are alone in a conflict set, got %llu")                    \
  row(bloom_other_policy, DR_UNKNOWN_CODEC, "index section: expected the Bloom policy %llu of this codec, got %llu")                                   \
  row(bloom_bits_for_host, DR_UNKNOWN_CODEC, "index section: expected a Bloom filter of at most %llu bits for conflict sets, got %llu")                \
  row(bloom_left_to_host, DR_UNKNOWN_CODEC, "index section: expected conflict sets of at most %llu members, got %llu")                                 \
  row(bloom_filter_bits, DR_INVALID_ARGUMENT, "Bloom filter: expected at most %llu bits, got %llu; use a larger fpr or split the tensor")              \
  row(bloom_most_positives, DR_INVALID_ARGUMENT, "Bloom filter: expected at most %llu positives, got %llu; use policy p0 or split the tensor")         \
  row(bloom_room, DR_INVALID_ARGUMENT, "Bloom filter: expected at most %llu positives at this fpr, got %llu; use another policy or split the tensor")  \
  row(bloom_set_members, DR_INVALID_ARGUMENT, "Bloom filter: expected conflict sets of at most %llu members at this fpr, got %llu; use policy p0")    \
  row(qsgd_head, DR_CORRUPT_PAYLOAD, "value section: expected 1 to 8 bits in buckets of a multiple of 8 up to %llu, got bits + 256 * bucket = %llu")   \
  row(norm, DR_CORRUPT_PAYLOAD, "value section: expected finite norms of at least %llu, got the float32 with bits %llx")                                \
  row(lloyd_bits, DR_CORRUPT_PAYLOAD, "value section: expected 1 to %llu bits per value, got %llu")                                                    \
  row(lloyd_level, DR_CORRUPT_PAYLOAD, "value section: expected ascending finite levels of at least %llu, got the float32 with bits %llx")              \
  row(positives, DR_CORRUPT_PAYLOAD, "value section: expected at most %llu positive values, got %llu")                                                 \
  row(degree, DR_CORRUPT_PAYLOAD, "value section: expected a degree of 1 to %llu, got %llu")                                                           \
  row(field_width, DR_CORRUPT_PAYLOAD, "value section: expected fields of at most %llu bits, got %llu")                                                \
  row(segments, DR_CORRUPT_PAYLOAD, "value section: expected 1 to 1024 segments, at most one for each of %llu values, got %llu")                        \
  row(exponent, DR_CORRUPT_PAYLOAD, "value section: expected an exponent of -152 to %llu, 0 for a sign without values, got the int16 of bits %llx")    \
  row(segment_length, DR_CORRUPT_PAYLOAD, "value section: expected segments that fill %llu values, got one of %llu")                                   \
  row(high_coefficient, DR_CORRUPT_PAYLOAD, "value section: expected coefficients of 0 above degree %llu, got one of degree %llu")                     \
  row(curve_not_finite, DR_CORRUPT_PAYLOAD, "value section: expected finite coefficients of curve %llu, got the float32 of bits %llx")                 \
  row(curve_without_values, DR_CORRUPT_PAYLOAD, "value section: expected coefficients of 0 for sign %llu without values, got the bits %llx")
// clang-format on

namespace deepreduce {
namespace cuda {

enum class Refused : int32_t {
  nothing,
#define DR_NAME(name, status, text) name,
  DR_CUDA_FAILURES(DR_NAME)
#undef DR_NAME
};

}  // namespace cuda
}  // namespace deepreduce
#endif
