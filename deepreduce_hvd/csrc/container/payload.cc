#include "container/payload.h"

namespace deepreduce {
namespace {

uint64_t checksum(const uint8_t* data, uint64_t size) {
  uint64_t sum = 0, word_index = 0;
  const auto add = [&](uint64_t word) { sum += checksum_term(word, word_index++); };
  uint64_t at = 0;
  for (; at + 8 <= size; at += 8) {
    uint64_t word;
    std::memcpy(&word, data + at, 8);
    add(at == kChecksumOffset ? 0 : word);
  }
  if (at < size) {
    uint64_t word = 0;
    std::memcpy(&word, data + at, size - at);
    add(word);
  }
  return sum;
}

uint32_t section_length(uint64_t bytes, const char* section) {
  if (bytes > UINT32_MAX)
    invalid_argument(
        "%s section: expected at most 4294967295 bytes, got %llu; compress more or split the tensor",
        section, static_cast<unsigned long long>(bytes));
  return static_cast<uint32_t>(bytes);
}

void check_size(uint64_t size) {
  if (size < kHeaderBytes)
    corrupt_payload("payload: expected at least %llu bytes, got %llu",
                    static_cast<unsigned long long>(kHeaderBytes),
                    static_cast<unsigned long long>(size));
}

void check_magic(const uint8_t* data, uint64_t size) {
  check_size(size);
  if (std::memcmp(data, kMagic, 4) != 0)
    corrupt_payload("payload magic: expected 44 52 48 56, got %02x %02x %02x %02x", data[0],
                    data[1], data[2], data[3]);
}

}  // namespace

void write_payload(const Payload& payload, uint8_t* out) {
  const uint32_t lengths[3] = {section_length(payload.index_bytes, "index"),
                               section_length(payload.value_bytes, "value"),
                               section_length(payload.order_bytes, "order")};
  std::memset(out, 0, kHeaderBytes);
  std::memcpy(out, kMagic, 4);
  out[4] = payload.version;
  out[5] = payload.flags;
  out[6] = payload.index_id;
  out[7] = payload.value_id;
  out[8] = payload.dtype;
  out[9] = payload.order;
  std::memcpy(out + 12, &payload.d, 4);
  std::memcpy(out + 16, &payload.count, 4);
  std::memcpy(out + 20, lengths, 12);
  uint8_t* at = out + kHeaderBytes;
  const auto put = [&at](const uint8_t* bytes, uint64_t size) {
    if (size != 0) std::memcpy(at, bytes, size);
    at += size;
  };
  put(payload.index, payload.index_bytes);
  put(payload.values, payload.value_bytes);
  put(payload.order_map, payload.order_bytes);
  const uint64_t sum = checksum(out, payload.total_bytes());
  std::memcpy(out + kChecksumOffset, &sum, 8);
}

Payload read_header(const uint8_t* data, uint64_t size) {
  check_size(size);
  Payload payload;
  payload.version = data[4];
  payload.flags = data[5];
  payload.index_id = data[6];
  payload.value_id = data[7];
  payload.dtype = data[8];
  payload.order = data[9];
  std::memcpy(&payload.d, data + 12, 4);
  std::memcpy(&payload.count, data + 16, 4);
  uint32_t lengths[3];
  std::memcpy(lengths, data + 20, 12);
  payload.index_bytes = lengths[0];
  payload.value_bytes = lengths[1];
  payload.order_bytes = lengths[2];
  return payload;
}

PayloadStart read_start(const uint8_t* data, uint64_t size) {
  check_magic(data, size);
  const Payload header = read_header(data, size);
  const uint64_t total = header.total_bytes();
  if (total > size)
    corrupt_payload("payload length: expected %llu bytes from the header, got %llu",
                    static_cast<unsigned long long>(total), static_cast<unsigned long long>(size));
  return {total, (header.flags & kNonFinite) != 0};
}

Payload read_payload(const uint8_t* data, uint64_t size) {
  check_magic(data, size);
  Payload payload = read_header(data, size);
  if (payload.version != kVersion)
    corrupt_payload("payload version: expected %u, got %u", kVersion, payload.version);
  if (payload.total_bytes() != size)
    corrupt_payload("payload length: expected %llu bytes from the header, got %llu",
                    static_cast<unsigned long long>(payload.total_bytes()),
                    static_cast<unsigned long long>(size));
  uint64_t expected;
  std::memcpy(&expected, data + kChecksumOffset, 8);
  const uint64_t got = checksum(data, size);
  if (expected != got)
    corrupt_payload("payload checksum: expected %016llx, got %016llx",
                    static_cast<unsigned long long>(expected),
                    static_cast<unsigned long long>(got));
  if ((payload.flags & ~kNonFinite) != 0)
    corrupt_payload("payload flags: expected 0 or 1, got %u", payload.flags);
  if (payload.dtype > DR_FLOAT64)
    corrupt_payload("payload dtype: expected 0 to 3, got %u", payload.dtype);
  if (payload.order > kIndicesInValueOrder)
    corrupt_payload("payload order: expected 0 to 2, got %u", payload.order);
  if (data[10] != 0 || data[11] != 0)
    corrupt_payload("payload reserved bytes: expected 0 0, got %u %u", data[10], data[11]);
  if (payload.order_bytes != 0 && payload.order != kPermutation)
    corrupt_payload("order section: expected 0 bytes for order %u, got %llu", payload.order,
                    static_cast<unsigned long long>(payload.order_bytes));
  if (payload.d > kMaxElements)
    corrupt_payload("payload d: expected at most 2147483647, got %u", payload.d);
  if (payload.count > payload.d)
    corrupt_payload("payload count: expected at most d = %u, got %u", payload.d, payload.count);
  if ((payload.flags & kNonFinite) != 0 && (payload.count != 0 || size != kHeaderBytes ||
                                            payload.index_id != 0 || payload.value_id != 0))
    corrupt_payload(
        "non-finite payload: expected no values and no sections, got count %u and %llu bytes",
        payload.count, static_cast<unsigned long long>(size));
  if ((payload.flags & kNonFinite) == 0 && payload.index_id == 0 && payload.count != payload.d)
    corrupt_payload("payload without indices: expected count = d = %u, got %u", payload.d,
                    payload.count);
  if (payload.index_id == 0 && (payload.index_bytes != 0 || payload.order == kIndicesInValueOrder))
    corrupt_payload("payload without indices: expected an empty index section, got %llu bytes",
                    static_cast<unsigned long long>(payload.index_bytes));
  payload.index = data + kHeaderBytes;
  payload.values = payload.index + payload.index_bytes;
  payload.order_map = payload.values + payload.value_bytes;
  return payload;
}

}  // namespace deepreduce
