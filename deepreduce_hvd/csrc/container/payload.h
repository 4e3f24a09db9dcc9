// The container of docs/format.md: header, sections and checksum.
#ifndef DEEPREDUCE_PAYLOAD_H
#define DEEPREDUCE_PAYLOAD_H

#include "base.h"
#include "container/header.h"
#include "support/random.h"

namespace deepreduce {

// Returns the term of one 64-bit word in the checksum, a multilinear hash. A change in one word
// always changes the sum, and the words can be added in any order.
DR_HOST_DEVICE inline uint64_t checksum_term(uint64_t word, uint64_t word_index) {
  return (word + 1) * (mix64(word_index) | 1);
}

// Bytes per element of an uncompressed payload; no payload's sections are larger than that.
DR_HOST_DEVICE inline uint64_t dense_element_bytes(int dtype) {
  return dtype == DR_FLOAT16 || dtype == DR_BFLOAT16 ? 2 : 4;
}

// A header with its sections.
struct Payload : Header {
  const uint8_t *index = nullptr, *values = nullptr, *order_map = nullptr;
};

// Raises an error if a section is longer than a header can say.
void expect_section_lengths(const Payload& payload);

// Writes header, sections and checksum to `out`, total_bytes() in all. The lengths of the sections
// are checked before.
void write_payload(Simd simd, const Payload& payload, uint8_t* out);

// Returns the fields of a header; raises an error only if there are not kHeaderBytes bytes.
Header read_header(const uint8_t* data, uint64_t size);

// What splits concatenated payloads, from a header of which only magic, version and length are
// checked.
struct PayloadStart {
  uint64_t total_bytes;
  bool non_finite;
};
PayloadStart read_start(const uint8_t* data, uint64_t size);

// Checks everything that needs no decoding. The sections point into `data`.
Payload read_payload(Simd simd, const uint8_t* data, uint64_t size);

}  // namespace deepreduce
#endif
