// The container of docs/format.md: its byte offsets, version and limits. Only this file,
// payload.cc and their equivalents in csrc/cuda know the offsets.
#ifndef DEEPREDUCE_PAYLOAD_H
#define DEEPREDUCE_PAYLOAD_H

#include "base.h"
#include "support/random.h"

namespace deepreduce {

constexpr uint64_t kHeaderBytes = DR_HEADER_BYTES;
constexpr uint64_t kMaxElements = (uint64_t{1} << 31) - 1;
constexpr uint8_t kMagic[4] = {'D', 'R', 'H', 'V'};
constexpr uint8_t kVersion = 1;
constexpr uint64_t kChecksumOffset = 32;

// Returns the term of one 64-bit word in the checksum, a multilinear hash. A change in one word
// always changes the sum, and the words can be added in any order.
DR_HOST_DEVICE inline uint64_t checksum_term(uint64_t word, uint64_t word_index) {
  return (word + 1) * (mix64(word_index) | 1);
}

// Bytes per element of an uncompressed payload; no payload's sections are larger than that.
DR_HOST_DEVICE inline uint64_t dense_element_bytes(int dtype) {
  return dtype == DR_FLOAT16 || dtype == DR_BFLOAT16 ? 2 : 4;
}

enum Flags : uint8_t { kNonFinite = 1 };
enum Order : uint8_t { kAscending = 0, kPermutation = 1, kIndicesInValueOrder = 2 };

struct Payload {
  uint8_t version = kVersion, flags = 0, index_id = 0, value_id = 0, dtype = 0, order = kAscending;
  uint32_t d = 0, count = 0;
  uint64_t index_bytes = 0, value_bytes = 0, order_bytes = 0;
  const uint8_t *index = nullptr, *values = nullptr, *order_map = nullptr;
  uint64_t total_bytes() const { return kHeaderBytes + index_bytes + value_bytes + order_bytes; }
};

// Writes header, sections and checksum to `out`, total_bytes() in all.
void write_payload(const Payload& payload, uint8_t* out);

// Reads the fields of a header, without any check of them; the sections stay null.
Payload read_header(const uint8_t* data, uint64_t size);

// The start of a payload, before any check: enough to split concatenated payloads.
struct PayloadStart {
  uint64_t total_bytes;
  bool non_finite;
};
PayloadStart read_start(const uint8_t* data, uint64_t size);

// Checks everything that needs no decoding. The sections point into `data`.
Payload read_payload(const uint8_t* data, uint64_t size);

}  // namespace deepreduce
#endif
