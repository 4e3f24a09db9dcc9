#include "container/payload.h"

#include "support/simd.h"

namespace deepreduce {
namespace {

// Adds up the terms of the words number `first` to `last` - 1.
DR_INLINE uint64_t sum_loop(const uint8_t* data, uint64_t first, uint64_t last) {
  uint64_t sum = 0;
  for (uint64_t i = first; i < last; ++i) {
    uint64_t word;
    std::memcpy(&word, data + 8 * i, 8);
    sum += checksum_term(word, i);
  }
  return sum;
}

uint64_t sum_scalar(const uint8_t* data, uint64_t first, uint64_t last) {
  return sum_loop(data, first, last);
}
#if defined(__x86_64__)
DR_AVX2 uint64_t sum_avx2(const uint8_t* data, uint64_t first, uint64_t last) {
  return sum_loop(data, first, last);
}
DR_AVX512 uint64_t sum_avx512(const uint8_t* data, uint64_t first, uint64_t last) {
  return sum_loop(data, first, last);
}
#endif

// For at least kHeaderBytes bytes.
uint64_t checksum(Simd simd, const uint8_t* data, uint64_t size) {
  const auto sum_words = DR_CHOOSE(simd, sum);
  const uint64_t words = size / 8;
  uint64_t sum = sum_scalar(data, 0, kHeaderWords) + checksum_term(0, kHeaderWords) +
                 sum_words(data, kHeaderWords + 1, words);
  if (size % 8 != 0) {
    uint64_t word = 0;
    std::memcpy(&word, data + 8 * words, size % 8);
    sum += checksum_term(word, words);
  }
  return sum;
}

void expect_section_length(uint64_t bytes, const char* section) {
  if (bytes > UINT32_MAX)
    invalid_argument(
        "%s section: expected at most 4294967295 bytes, got %llu; compress more or split the tensor",
        section, static_cast<unsigned long long>(bytes));
}

// Raises the error for a header that check_header refuses.
[[noreturn]] void refuse(const Header& header, const HeaderRefusal& refusal) {
  const unsigned long long expected = refusal.expected, got = refusal.got;
  switch (refusal.fault) {
    case HeaderFault::payload_magic:
      corrupt_payload("payload magic: expected 44 52 48 56, got %02x %02x %02x %02x",
                      header.magic & 255, header.magic >> 8 & 255, header.magic >> 16 & 255,
                      header.magic >> 24);
    case HeaderFault::payload_version:
      corrupt_payload("payload version: expected %llu, got %llu", expected, got);
    case HeaderFault::payload_length:
      corrupt_payload("payload length: expected %llu bytes from the header, got %llu", expected,
                      got);
    case HeaderFault::payload_checksum:
      corrupt_payload("payload checksum: expected %016llx, got %016llx", expected, got);
    case HeaderFault::payload_flags:
      corrupt_payload("payload flags: expected 0 or 1, got %llu", got);
    case HeaderFault::payload_dtype:
      corrupt_payload("payload dtype: expected 0 to 3, got %llu", got);
    case HeaderFault::payload_order:
      corrupt_payload("payload order: expected 0 to 2, got %llu", got);
    case HeaderFault::payload_reserved:
      corrupt_payload("payload reserved bytes: expected 0 0, got %u %u", header.reserved & 255,
                      header.reserved >> 8);
    case HeaderFault::order_section_bytes:
      corrupt_payload("order section: expected 0 bytes for order %u, got %llu", header.order, got);
    case HeaderFault::payload_elements:
      corrupt_payload("payload d: expected at most 2147483647, got %llu", got);
    case HeaderFault::payload_count:
      corrupt_payload("payload count: expected at most d = %llu, got %llu", expected, got);
    case HeaderFault::non_finite_values:
      corrupt_payload("non-finite payload: expected no values, got %llu", got);
    case HeaderFault::non_finite_bytes:
      corrupt_payload("non-finite payload: expected %llu bytes without sections, got %llu",
                      expected, got);
    case HeaderFault::non_finite_index:
      corrupt_payload("non-finite payload: expected the index codec %llu, got %llu", expected, got);
    case HeaderFault::non_finite_value:
      corrupt_payload("non-finite payload: expected the value codec %llu, got %llu", expected, got);
    case HeaderFault::all_count:
      corrupt_payload("payload without indices: expected count = d = %llu, got %llu", expected,
                      got);
    case HeaderFault::all_index_bytes:
      corrupt_payload("payload without indices: expected an empty index section, got %llu bytes",
                      got);
    case HeaderFault::all_order:
      corrupt_payload("payload without indices: expected an order of at most %llu, got %llu",
                      expected, got);
    case HeaderFault::nothing:
      break;
  }
  corrupt_payload("payload header: expected a valid one, got another");
}

}  // namespace

void expect_section_lengths(const Payload& payload) {
  expect_section_length(payload.index_bytes, "index");
  expect_section_length(payload.value_bytes, "value");
  expect_section_length(payload.order_bytes, "order");
}

void write_payload(Simd simd, const Payload& payload, uint8_t* out) {
  uint64_t words[kHeaderBytes / 8] = {};
  store_header(payload, words);
  std::memcpy(out, words, kHeaderBytes);
  uint8_t* at = out + kHeaderBytes;
  const auto put = [&at](const uint8_t* bytes, uint64_t size) {
    if (size != 0) std::memcpy(at, bytes, size);
    at += size;
  };
  put(payload.index, payload.index_bytes);
  put(payload.values, payload.value_bytes);
  put(payload.order_map, payload.order_bytes);
  const uint64_t sum = checksum(simd, out, payload.total_bytes());
  std::memcpy(out + kChecksumOffset, &sum, 8);
}

Header read_header(const uint8_t* data, uint64_t size) {
  if (size < kHeaderBytes)
    corrupt_payload("payload: expected at least %llu bytes, got %llu",
                    static_cast<unsigned long long>(kHeaderBytes),
                    static_cast<unsigned long long>(size));
  return load_header(data);
}

PayloadStart read_start(const uint8_t* data, uint64_t size) {
  const Header header = read_header(data, size);
  if (header.magic != kMagic) refuse(header, {HeaderFault::payload_magic, kMagic, header.magic});
  if (header.version != kVersion)
    refuse(header, {HeaderFault::payload_version, kVersion, header.version});
  const uint64_t total = header.total_bytes();
  if (total > size) refuse(header, {HeaderFault::payload_length, total, size});
  return {total, header.non_finite()};
}

Payload read_payload(Simd simd, const uint8_t* data, uint64_t size) {
  Payload payload{read_header(data, size)};
  const HeaderRefusal refusal = check_header(payload, size, checksum(simd, data, size));
  if (refusal.fault != HeaderFault::nothing) refuse(payload, refusal);
  payload.index = data + kHeaderBytes;
  payload.values = payload.index + payload.index_bytes;
  payload.order_map = payload.values + payload.value_bytes;
  return payload;
}

}  // namespace deepreduce
