// Canonical Huffman codes of bytes, length-limited; shared by the Huffman index codec and the
// Quantile value codec.
#ifndef DEEPREDUCE_HUFFMAN_CODE_H
#define DEEPREDUCE_HUFFMAN_CODE_H

#include "base.h"

namespace deepreduce {

constexpr unsigned kHuffmanSymbols = 256;
constexpr unsigned kHuffmanLongest = 15;
constexpr uint64_t kHuffmanLengthsBytes = kHuffmanSymbols / 2;

struct HuffmanCode {
  uint8_t lengths[kHuffmanSymbols];
  uint16_t codes[kHuffmanSymbols];  // first bit is the least significant
};

// Computes optimal lengths of at most kHuffmanLongest bits (package-merge) and their canonical
// codes.
void make_huffman_code(const uint64_t* frequencies, HuffmanCode* code);

// Computes canonical codes for the lengths in a payload. Anything but a complete code, or one
// symbol of length 1, is a CorruptPayloadError.
void codes_from_lengths(const char* section, HuffmanCode* code);

void write_lengths(const HuffmanCode& code, ByteWriter& section);
void read_lengths(ByteReader& section, HuffmanCode* code);

// Returns the number of bytes that `count` symbols need.
uint64_t huffman_bytes(const HuffmanCode& code, const uint8_t* symbols, uint64_t count);
void write_symbols(const HuffmanCode& code, const uint8_t* symbols, uint64_t count,
                   ByteWriter& section);

// Decodes symbol by symbol from one byte-aligned block.
class HuffmanReader {
 public:
  // `table` has 2^kHuffmanLongest entries, filled by make_table.
  HuffmanReader(const uint16_t* table, const uint8_t* data, uint64_t bytes, const char* section)
      : table_(table), data_(data), bytes_(bytes), section_(section) {}
  static uint16_t* make_table(Arena& arena, const HuffmanCode& code);

  uint8_t next() {
    if (filled_ < kHuffmanLongest) refill();
    const uint16_t entry = table_[pending_ & ((1u << kHuffmanLongest) - 1)];
    const unsigned length = entry >> 8;
    if (length == 0 || length > filled_)
      corrupt_payload("%s: expected a Huffman code, got none that starts with its bits", section_);
    pending_ >>= length;
    filled_ -= length;
    return static_cast<uint8_t>(entry);
  }
  // Checks that the last code ends in the last byte, followed by zero padding.
  void expect_end() const {
    if (at_ != bytes_ || filled_ >= 8 || pending_ != 0)
      corrupt_payload("%s: expected Huffman codes that end in the block's last byte, got more bits",
                      section_);
  }

 private:
  // Loads whole bytes, up to 56 bits or the end. A wide load leaves bits above `filled_`; the next
  // refill loads the same bits again.
  void refill() {
    if (bytes_ - at_ >= 8) {
      uint64_t word;
      std::memcpy(&word, data_ + at_, 8);
      pending_ |= word << filled_;
      const unsigned bytes = (63 - filled_) / 8;
      at_ += bytes;
      filled_ += 8 * bytes;
    } else {
      while (filled_ <= 56 && at_ < bytes_) {
        pending_ |= static_cast<uint64_t>(data_[at_++]) << filled_;
        filled_ += 8;
      }
    }
  }

  const uint16_t* table_;
  const uint8_t* data_;
  uint64_t bytes_;
  const char* section_;
  uint64_t at_ = 0, pending_ = 0;
  unsigned filled_ = 0;
};

}  // namespace deepreduce
#endif
