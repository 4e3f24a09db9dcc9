// The header of a payload (docs/format.md), on the host and on devices: its byte offsets, and the
// checks that need no section. Only this file knows the offsets.
#ifndef DEEPREDUCE_HEADER_H
#define DEEPREDUCE_HEADER_H

#include <cstdint>
#include <cstring>

#include "api/deepreduce.h"
#include "support/host_device.h"

namespace deepreduce {

constexpr uint64_t kHeaderBytes = DR_HEADER_BYTES;
constexpr uint64_t kMaxElements = (uint64_t{1} << 31) - 1;
constexpr uint32_t kMagic = 'D' | 'R' << 8 | 'H' << 16 | 'V' << 24;  // the bytes "DRHV"
constexpr uint8_t kVersion = 1;
constexpr uint64_t kChecksumOffset = 32;
constexpr uint64_t kHeaderWords = kChecksumOffset / 8;  // 64-bit words before the checksum

enum Flags : uint8_t { kNonFinite = 1 };
enum Order : uint8_t { kAscending = 0, kPermutation = 1, kIndicesInValueOrder = 2 };

// The fields of a header.
struct Header {
  uint32_t magic = kMagic;
  uint8_t version = kVersion, flags = 0, index_id = 0, value_id = 0, dtype = 0, order = kAscending;
  uint16_t reserved = 0;
  uint32_t d = 0, count = 0;
  uint64_t index_bytes = 0, value_bytes = 0, order_bytes = 0;  // at most UINT32_MAX in a payload
  uint64_t checksum = 0;

  DR_HOST_DEVICE uint64_t total_bytes() const {
    return kHeaderBytes + index_bytes + value_bytes + order_bytes;
  }
  DR_HOST_DEVICE bool non_finite() const { return (flags & kNonFinite) != 0; }
};

// Returns the header in the first kHeaderBytes bytes of `data`, without any check.
DR_HOST_DEVICE inline Header load_header(const uint8_t* data) {
  uint32_t lengths[3];
  Header header;
  memcpy(&header.magic, data, 4);
  header.version = data[4];
  header.flags = data[5];
  header.index_id = data[6];
  header.value_id = data[7];
  header.dtype = data[8];
  header.order = data[9];
  memcpy(&header.reserved, data + 10, 2);
  memcpy(&header.d, data + 12, 4);
  memcpy(&header.count, data + 16, 4);
  memcpy(lengths, data + 20, 12);
  memcpy(&header.checksum, data + kChecksumOffset, 8);
  header.index_bytes = lengths[0];
  header.value_bytes = lengths[1];
  header.order_bytes = lengths[2];
  return header;
}

// Writes a header to `words`, up to its checksum.
DR_HOST_DEVICE inline void store_header(const Header& header, uint64_t words[kHeaderWords]) {
  words[0] = header.magic | uint64_t{header.version} << 32 | uint64_t{header.flags} << 40 |
             uint64_t{header.index_id} << 48 | uint64_t{header.value_id} << 56;
  words[1] = header.dtype | uint64_t{header.order} << 8 | uint64_t{header.reserved} << 16 |
             uint64_t{header.d} << 32;
  words[2] = header.count | header.index_bytes << 32;
  words[3] = header.value_bytes | header.order_bytes << 32;
}

// What check_header finds, in the order of its checks.
#define DR_HEADER_FAULTS(row)                                                                      \
  row(payload_magic) row(payload_version) row(payload_length) row(payload_checksum)                \
      row(payload_flags) row(payload_dtype) row(payload_order) row(payload_reserved)               \
          row(order_section_bytes) row(payload_elements) row(payload_count) row(non_finite_values) \
              row(non_finite_bytes) row(non_finite_index) row(non_finite_value) row(all_count)     \
                  row(all_index_bytes) row(all_order)

enum class HeaderFault : int32_t {
  nothing,
#define DR_NAME(name) name,
  DR_HEADER_FAULTS(DR_NAME)
#undef DR_NAME
};

struct HeaderRefusal {
  HeaderFault fault;
  uint64_t expected, got;
};

// Returns the first fault of a header, with what was expected and what was there.
//
// size: bytes of the payload
// checksum: checksum of these bytes
DR_HOST_DEVICE inline HeaderRefusal check_header(const Header& header, uint64_t size,
                                                 uint64_t checksum) {
  using F = HeaderFault;
  const bool all = header.index_id == 0;
  if (header.magic != kMagic) return {F::payload_magic, kMagic, header.magic};
  if (header.version != kVersion) return {F::payload_version, kVersion, header.version};
  if (header.total_bytes() != size) return {F::payload_length, header.total_bytes(), size};
  if (header.checksum != checksum) return {F::payload_checksum, header.checksum, checksum};
  if (header.flags > kNonFinite) return {F::payload_flags, kNonFinite, header.flags};
  if (header.dtype > DR_FLOAT64) return {F::payload_dtype, DR_FLOAT64, header.dtype};
  if (header.order > kIndicesInValueOrder)
    return {F::payload_order, kIndicesInValueOrder, header.order};
  if (header.reserved != 0) return {F::payload_reserved, 0, header.reserved};
  if (header.order_bytes != 0 && header.order != kPermutation)
    return {F::order_section_bytes, 0, header.order_bytes};
  if (header.d > kMaxElements) return {F::payload_elements, kMaxElements, header.d};
  if (header.count > header.d) return {F::payload_count, header.d, header.count};
  if (header.non_finite()) {
    if (header.count != 0) return {F::non_finite_values, 0, header.count};
    if (size != kHeaderBytes) return {F::non_finite_bytes, kHeaderBytes, size};
    if (!all) return {F::non_finite_index, 0, header.index_id};
    if (header.value_id != 0) return {F::non_finite_value, 0, header.value_id};
  }
  if (!header.non_finite() && all && header.count != header.d)
    return {F::all_count, header.d, header.count};
  if (all && header.index_bytes != 0) return {F::all_index_bytes, 0, header.index_bytes};
  if (all && header.order == kIndicesInValueOrder)
    return {F::all_order, kPermutation, header.order};
  return {F::nothing, 0, 0};
}

}  // namespace deepreduce
#endif
