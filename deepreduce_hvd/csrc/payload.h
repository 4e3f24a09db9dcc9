// The container of docs/format.md: the only native file that knows byte offsets, the version and the caps.
#ifndef DEEPREDUCE_PAYLOAD_H
#define DEEPREDUCE_PAYLOAD_H

#include "base.h"

namespace deepreduce {

constexpr uint64_t kHeaderBytes = 40;
constexpr uint64_t kMaxElements = (uint64_t{1} << 31) - 1;

enum Flags : uint8_t { kNonFinite = 1 };
enum Order : uint8_t { kAscending = 0, kPermutation = 1, kIndicesInValueOrder = 2 };

struct Payload {
  uint8_t flags = 0, index_id = 0, value_id = 0, dtype = 0, order = kAscending;
  uint32_t d = 0, count = 0;
  uint64_t index_bytes = 0, value_bytes = 0, order_bytes = 0;
  const uint8_t *index = nullptr, *values = nullptr, *order_map = nullptr;
  uint64_t total_bytes() const { return kHeaderBytes + index_bytes + value_bytes + order_bytes; }
};

// Writes header, sections and checksum to `out` (total_bytes() of it).
void write_payload(const Payload& payload, uint8_t* out);

// What the start of a payload says, before anything in it is checked: enough to cut it from what follows.
struct PayloadStart {
  uint64_t total_bytes;
  bool non_finite;
};
PayloadStart read_start(const uint8_t* data, uint64_t size);

// Checks everything that needs no decoding. The sections point into `data`.
Payload read_payload(const uint8_t* data, uint64_t size);

}  // namespace deepreduce
#endif
