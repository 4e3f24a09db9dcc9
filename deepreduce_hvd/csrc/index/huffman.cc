// Huffman: a Huffman code of the bytes of indices or gaps.
#include "support/huffman_code.h"

#include "codecs.h"
#include "index/index_blocks.h"
#include "support/varint.h"

namespace deepreduce {
namespace {

enum Kind : uint8_t { kStatic = 0, kDelta = 1 };

// Makes the code of the four bytes of all indices 0 … d-1 together. Both sides compute it from d.
void static_code(uint32_t d, HuffmanCode* code) {
  uint64_t frequencies[kHuffmanSymbols] = {};
  for (unsigned byte = 0; byte < 4; ++byte) {
    const uint64_t unit = uint64_t{1} << (8 * byte);
    const uint64_t whole = d / (unit << 8), rest = d % (unit << 8);
    for (uint64_t symbol = 0; symbol < kHuffmanSymbols; ++symbol) {
      const uint64_t below = symbol * unit;
      const uint64_t partial = rest <= below ? 0 : rest - below < unit ? rest - below : unit;
      frequencies[symbol] += whole * unit + partial;
    }
  }
  make_huffman_code(frequencies, code);
}

// Writes the symbols of one block; returns their number.
uint32_t block_symbols(Kind kind, const uint32_t* indices, uint32_t n, uint32_t next,
                       uint8_t* symbols) {
  if (kind == kStatic) {
    std::memcpy(symbols, indices, uint64_t{4} * n);
    return 4 * n;
  }
  uint8_t* at = symbols;
  for (uint32_t i = 0; i < n; ++i) {
    at = put_varint(at, indices[i] - next);
    next = indices[i] + 1;
  }
  return static_cast<uint32_t>(at - symbols);
}

void encode(Context& context, IndexEncoding& encoding, ByteWriter& section) {
  const uint32_t count = encoding.count;
  if (count == 0) return;
  const Kind kind = encoding.parameters[0] != 0 ? kDelta : kStatic;
  const uint32_t blocks = index_blocks(count);
  uint8_t* symbols = context.arena.array<uint8_t>(uint64_t{kLongestVarint} * kIndexBlock);
  const auto each_block = [&](auto visit) {
    uint32_t next = 0;
    for (uint32_t block = 0; block < blocks; ++block) {
      const uint32_t first = block * kIndexBlock, n = indices_in_block(count, block);
      visit(block, next, block_symbols(kind, encoding.indices + first, n, next, symbols));
      next = encoding.indices[first + n - 1] + 1;
    }
  };
  HuffmanCode code;
  section.put<uint8_t>(kind);
  if (kind == kDelta) {
    uint64_t frequencies[kHuffmanSymbols] = {};
    each_block([&](uint32_t, uint32_t, uint32_t n) {
      for (uint32_t i = 0; i < n; ++i) ++frequencies[symbols[i]];
    });
    make_huffman_code(frequencies, &code);
    write_lengths(code, section);
  } else {
    static_code(encoding.d, &code);
  }
  const uint64_t entry_bytes = kind == kDelta ? 8 : 4;
  const uint64_t directory_at = section.size();
  section.extend(entry_bytes * (blocks - 1));
  const uint64_t data_at = section.size();
  each_block([&](uint32_t block, uint32_t next, uint32_t n) {
    if (block > 0) {
      const uint32_t entry[2] = {next, block_start_field(section.size() - data_at)};
      uint8_t* place = section.data() + directory_at + entry_bytes * (block - 1);
      std::memcpy(place, kind == kDelta ? entry : entry + 1, entry_bytes);
    }
    write_symbols(code, symbols, n, section);
  });
}

void decode(Context& context, ByteReader& section, uint32_t d, uint32_t count, uint32_t* indices) {
  if (count == 0) return section.expect_end();
  const uint8_t kind = section.get<uint8_t>();
  if (kind > kDelta) corrupt_payload("%s: expected kind 0 or 1, got %u", section.section(), kind);
  HuffmanCode code;
  if (kind == kDelta) {
    read_lengths(section, &code);
  } else {
    static_code(d, &code);
  }
  const uint32_t blocks = index_blocks(count);
  const uint64_t entry_bytes = kind == kDelta ? 8 : 4;
  const uint8_t* directory = section.take(entry_bytes * (blocks - 1));
  const uint64_t data_bytes = section.remaining();
  const uint8_t* data = section.take(data_bytes);
  const uint16_t* table = HuffmanReader::make_table(context.arena, code);
  uint64_t start = 0, next = 0;
  for (uint32_t block = 0; block < blocks; ++block) {
    const uint32_t first = block * kIndexBlock, n = indices_in_block(count, block);
    uint64_t end = data_bytes;
    if (block + 1 < blocks) {
      uint32_t entry;
      std::memcpy(&entry, directory + entry_bytes * (block + 1) - 4, 4);
      end = entry;
    }
    if (end < start || end > data_bytes)
      block_outside(section.section(), block, data_bytes, start, end);
    if (kind == kDelta && block > 0) {
      uint32_t before;
      std::memcpy(&before, directory + entry_bytes * (block - 1), 4);
      expect_block_start(section.section(), block, next, before);
    }
    HuffmanReader reader(table, data + start, end - start, section.section());
    for (uint32_t i = 0; i < n; ++i) {
      uint64_t index = 0;
      if (kind == kDelta) {
        index = next + get_varint([&reader] { return reader.next(); }, section.section());
      } else {
        for (unsigned byte = 0; byte < 4; ++byte)
          index |= static_cast<uint64_t>(reader.next()) << (8 * byte);
        if (index < next)
          corrupt_payload("%s: expected ascending indices, got %llu after %llu", section.section(),
                          static_cast<unsigned long long>(index),
                          static_cast<unsigned long long>(next - 1));
      }
      if (index >= d)
        corrupt_payload("%s: expected an index below d = %u, got %llu", section.section(), d,
                        static_cast<unsigned long long>(index));
      indices[first + i] = static_cast<uint32_t>(index);
      next = index + 1;
    }
    reader.expect_end();
    start = end;
  }
}

}  // namespace

extern const IndexCodec huffman_codec;
const IndexCodec huffman_codec = {kHuffman, "Huffman", false, encode, decode};

}  // namespace deepreduce
