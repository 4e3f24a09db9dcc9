// Fields of 0 to 32 bits, least significant bit first within little-endian bytes.
#ifndef DEEPREDUCE_BITS_H
#define DEEPREDUCE_BITS_H

#include "base.h"
#include "support/host_device.h"

namespace deepreduce {

DR_HOST_DEVICE inline uint64_t packed_bytes(uint64_t count, unsigned width) {
  return (count * width + 7) / 8;
}

// Number of bits of a value without leading zeros: 0 for 0.
DR_HOST_DEVICE inline unsigned bit_length(uint32_t value) {
#ifdef __CUDA_ARCH__
  return 32 - static_cast<unsigned>(__clz(static_cast<int>(value)));
#else
  return value == 0 ? 0 : 32 - static_cast<unsigned>(__builtin_clz(value));
#endif
}

DR_HOST_DEVICE inline unsigned bit_length(uint64_t value) {
  unsigned length = 0;
  for (; value != 0; value >>= 1) ++length;
  return length;
}

// Number of bits that distinguish `count` values: ceil(log2(count)), 0 for one or none.
DR_HOST_DEVICE inline unsigned bit_width_of(uint32_t count) {
  unsigned width = 0;
  while (width < 32 && (uint64_t{1} << width) < count) ++width;
  return width;
}

// Whether the bits of the last byte after the first `bits` bits of `data` are zero.
DR_HOST_DEVICE inline bool is_zero_padded(const uint8_t* data, uint64_t bits) {
  return bits % 8 == 0 || data[bits / 8] >> (bits % 8) == 0;
}

inline void expect_zero_padding(const uint8_t* data, uint64_t bits, const char* section) {
  if (!is_zero_padded(data, bits))
    corrupt_payload("%s: expected zero padding, got bits that are set", section);
}

// Loads 64 bits from position `bit`. Only the low 57 are valid. Bits past the end are zero.
DR_HOST_DEVICE inline uint64_t load_bits(const uint8_t* data, uint64_t bytes, uint64_t bit) {
  const uint64_t byte = bit >> 3;
  uint64_t word = 0;
  if (byte + 8 <= bytes) {
    memcpy(&word, data + byte, 8);
  } else if (byte < bytes) {
    memcpy(&word, data + byte, bytes - byte);
  }
  return word >> (bit & 7);
}

// Calls visit(i, field) for each of `count` fields of `width` bits, from the first bit of `data`
// on. Bits past the end are zero.
template <class Visit>
inline void for_each_field(const uint8_t* data, uint64_t bytes, uint32_t count, unsigned width,
                           Visit visit) {
  const uint64_t mask = (uint64_t{1} << width) - 1;
  // the fields whose 8 bytes are within the data need no test
  uint64_t whole = 0;
  if (bytes >= 8) whole = width == 0 ? count : ((bytes - 8) * 8 + 7) / width + 1;
  const uint32_t quick = whole < count ? static_cast<uint32_t>(whole) : count;
  uint64_t bit = 0;
  uint32_t i = 0;
  for (; i < quick; ++i, bit += width) {
    uint64_t word;
    memcpy(&word, data + (bit >> 3), 8);
    visit(i, (word >> (bit & 7)) & mask);
  }
  for (; i < count; ++i, bit += width) visit(i, load_bits(data, bytes, bit) & mask);
}

// Appends fields to memory that the caller has made large enough. Writes 8 bytes at a time, but
// never past the last byte of the last field.
class BitWriter {
 public:
  explicit BitWriter(uint8_t* out) : start_(out), out_(out) {}
  void put(uint32_t value, unsigned width) {  // width <= 32, value < 2^width
    pending_ |= static_cast<uint64_t>(value) << filled_;
    filled_ += width;
    if (filled_ >= 64) {
      std::memcpy(out_, &pending_, 8);
      out_ += 8;
      filled_ -= 64;
      pending_ = static_cast<uint64_t>(value) >> (width - filled_);
    }
  }
  // Pads to a byte boundary with zero bits; returns the number of bytes written.
  uint64_t finish() {
    const unsigned bytes = (filled_ + 7) / 8;
    std::memcpy(out_, &pending_, bytes);
    out_ += bytes;
    pending_ = 0;
    filled_ = 0;
    return static_cast<uint64_t>(out_ - start_);
  }

 private:
  uint8_t* start_;
  uint8_t* out_;
  uint64_t pending_ = 0;
  unsigned filled_ = 0;  // below 64
};

// Reads fields; reading past the end is a CorruptPayloadError.
class BitReader {
 public:
  BitReader(const uint8_t* data, uint64_t bytes, const char* section)
      : at_(data), end_(data + bytes), section_(section) {}
  uint32_t get(unsigned width) {
    while (filled_ < width) {
      if (at_ == end_)
        corrupt_payload("%s: expected %u more bits, got %u", section_, width, filled_);
      pending_ |= static_cast<uint64_t>(*at_++) << filled_;
      filled_ += 8;
    }
    const uint32_t value = static_cast<uint32_t>(pending_ & ((uint64_t{1} << width) - 1));
    pending_ >>= width;
    filled_ -= width;
    return value;
  }
  // Checks that the rest of the last byte is zero and that nothing follows.
  void expect_end() const {
    if (at_ != end_)
      corrupt_payload("%s: expected the end of the bits, got %llu more bytes", section_,
                      static_cast<unsigned long long>(end_ - at_));
    if (pending_ != 0)
      corrupt_payload("%s: expected zero padding, got bits that are set", section_);
  }

 private:
  const uint8_t* at_;
  const uint8_t* end_;
  const char* section_;
  uint64_t pending_ = 0;
  unsigned filled_ = 0;
};

}  // namespace deepreduce
#endif
