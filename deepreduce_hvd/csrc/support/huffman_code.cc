#include "support/huffman_code.h"

#include <algorithm>

#include "support/bits.h"

namespace deepreduce {
namespace {

uint16_t reversed(uint32_t code, unsigned length) {
  uint32_t result = 0;
  for (unsigned bit = 0; bit < length; ++bit) result |= ((code >> bit) & 1u) << (length - 1 - bit);
  return static_cast<uint16_t>(result);
}

void assign_codes(HuffmanCode* code) {
  uint32_t next = 0;
  for (unsigned length = 1; length <= kHuffmanLongest; ++length, next <<= 1)
    for (unsigned symbol = 0; symbol < kHuffmanSymbols; ++symbol)
      if (code->lengths[symbol] == length) code->codes[symbol] = reversed(next++, length);
}

}  // namespace

void make_huffman_code(const uint64_t* frequencies, HuffmanCode* code) {
  std::memset(code, 0, sizeof(*code));
  unsigned symbols[kHuffmanSymbols], n = 0;
  for (unsigned symbol = 0; symbol < kHuffmanSymbols; ++symbol)
    if (frequencies[symbol] != 0) symbols[n++] = symbol;
  std::sort(symbols, symbols + n, [frequencies](unsigned a, unsigned b) {
    return frequencies[a] != frequencies[b] ? frequencies[a] < frequencies[b] : a < b;
  });
  if (n == 1) code->lengths[symbols[0]] = 1;
  if (n >= 2) {
    // per level: symbols, and packages of two from the level before, merged by weight
    bool is_symbol[kHuffmanLongest][2 * kHuffmanSymbols];
    uint64_t packages[kHuffmanSymbols], merged[2 * kHuffmanSymbols];
    unsigned package_count = 0;
    for (unsigned level = 0; level < kHuffmanLongest; ++level) {
      unsigned at_symbol = 0, at_package = 0, size = 0;
      while (at_symbol < n || at_package < package_count) {
        const bool take =
            at_package == package_count ||
            (at_symbol < n && frequencies[symbols[at_symbol]] <= packages[at_package]);
        merged[size] = take ? frequencies[symbols[at_symbol]] : packages[at_package];
        is_symbol[level][size++] = take;
        at_symbol += take;
        at_package += !take;
      }
      package_count = size / 2;
      for (unsigned i = 0; i < package_count; ++i) packages[i] = merged[2 * i] + merged[2 * i + 1];
    }
    unsigned taken = 2 * n - 2;
    for (unsigned level = kHuffmanLongest; level-- > 0;) {
      unsigned in_level = 0;
      for (unsigned i = 0; i < taken; ++i) in_level += is_symbol[level][i];
      for (unsigned i = 0; i < in_level; ++i) ++code->lengths[symbols[i]];
      taken = 2 * (taken - in_level);
    }
  }
  assign_codes(code);
}

void codes_from_lengths(const char* section, HuffmanCode* code) {
  uint32_t kraft = 0;
  unsigned used = 0, longest = 0;
  for (const uint8_t length : code->lengths) {
    if (length == 0) continue;
    ++used;
    longest = std::max<unsigned>(longest, length);
    kraft += 1u << (kHuffmanLongest - length);  // lengths are 4-bit fields
  }
  if (!(kraft == 1u << kHuffmanLongest || (used == 1 && longest == 1)))
    corrupt_payload(
        "%s: expected lengths of a complete Huffman code of at most %u bits, got %u codes of up to "
        "%u bits with Kraft sum %g",
        section, kHuffmanLongest, used, longest,
        static_cast<double>(kraft) / (1u << kHuffmanLongest));
  std::memset(code->codes, 0, sizeof(code->codes));
  assign_codes(code);
}

void write_lengths(const HuffmanCode& code, ByteWriter& section) {
  uint8_t* out = section.extend(kHuffmanLengthsBytes);
  for (unsigned i = 0; i < kHuffmanLengthsBytes; ++i)
    out[i] = static_cast<uint8_t>(code.lengths[2 * i] | code.lengths[2 * i + 1] << 4);
}

void read_lengths(ByteReader& section, HuffmanCode* code) {
  const uint8_t* packed = section.take(kHuffmanLengthsBytes);
  for (unsigned i = 0; i < kHuffmanLengthsBytes; ++i) {
    code->lengths[2 * i] = packed[i] & 15;
    code->lengths[2 * i + 1] = packed[i] >> 4;
  }
  codes_from_lengths(section.section(), code);
}

uint64_t huffman_bytes(const HuffmanCode& code, const uint8_t* symbols, uint64_t count) {
  uint64_t bits = 0;
  for (uint64_t i = 0; i < count; ++i) bits += code.lengths[symbols[i]];
  return (bits + 7) / 8;
}

void write_symbols(const HuffmanCode& code, const uint8_t* symbols, uint64_t count,
                   ByteWriter& section) {
  const uint64_t bytes = huffman_bytes(code, symbols, count);
  BitWriter bits(section.extend(bytes));
  for (uint64_t i = 0; i < count; ++i) bits.put(code.codes[symbols[i]], code.lengths[symbols[i]]);
  bits.finish();
}

uint16_t* HuffmanReader::make_table(Arena& arena, const HuffmanCode& code) {
  constexpr uint32_t size = 1u << kHuffmanLongest;
  uint16_t* table = arena.zeros<uint16_t>(size);
  for (unsigned symbol = 0; symbol < kHuffmanSymbols; ++symbol) {
    const unsigned length = code.lengths[symbol];
    if (length == 0) continue;
    for (uint32_t entry = code.codes[symbol]; entry < size; entry += 1u << length)
      table[entry] = static_cast<uint16_t>(length << 8 | symbol);
  }
  return table;
}

}  // namespace deepreduce
