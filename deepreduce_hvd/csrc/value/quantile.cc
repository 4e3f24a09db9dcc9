// Quantile: SketchML's quantile buckets.
#include <algorithm>
#include <cmath>
#include <utility>

#include "codecs.h"
#include "support/bits.h"
#include "support/half.h"
#include "support/huffman_code.h"

namespace deepreduce {
namespace {

constexpr uint32_t kBlock = 4096;
constexpr uint32_t kMostBuckets = 256;
// A bucket's mean has 32 bits. With at least 8 values per bucket, the table has at most 4 bits per
// value.
constexpr uint64_t kValuesABucket = 8;
enum Kind : uint8_t { kFixedWidth = 0, kHuffmanCoded = 1 };

struct Sides {
  uint32_t negative, other;
};

double bits_per_value(const double* parameters) {
  return bit_width_of(static_cast<uint32_t>(parameters[0]));
}

// Returns the numbers of buckets for the negative and the other values, in proportion to the
// numbers of values.
Sides buckets_of_sides(uint64_t count, uint64_t negatives, uint64_t wanted) {
  const uint64_t others = count - negatives;
  const uint64_t total =
      std::max<uint64_t>(std::min(wanted, (count + kValuesABucket - 1) / kValuesABucket),
                         (negatives > 0) + (others > 0));
  if (negatives == 0) return {0, static_cast<uint32_t>(total)};
  if (others == 0) return {static_cast<uint32_t>(total), 0};
  const uint64_t share = std::max<uint64_t>((total * negatives + count / 2) / count, 1);
  const uint64_t negative = std::min({share, total - 1, negatives});
  return {static_cast<uint32_t>(negative),
          static_cast<uint32_t>(std::min(total - negative, others))};
}

// Returns a key in the order of the values; -0 and 0 have equal keys.
inline uint32_t ascending_key(float value) {
  const uint32_t bits = float_bits(value + 0.0f);
  return bits ^ ((bits >> 31) != 0 ? 0xFFFFFFFFu : 0x80000000u);
}

// Returns the positions of the values in ascending order, equal ones by position: a radix sort by
// the digits that differ.
const uint32_t* sorted_positions(Arena& arena, const float* values, uint32_t count) {
  constexpr unsigned kDigits = 3, kDigitBits = 11;
  constexpr uint32_t kPlaces = 1u << kDigitBits;
  uint32_t* next = arena.zeros<uint32_t>(kDigits * kPlaces);  // per digit: counts, then places
  uint64_t* entries = arena.array<uint64_t>(count);           // key and position
  uint64_t* spare = arena.array<uint64_t>(count);
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t key = ascending_key(values[i]);
    for (unsigned digit = 0; digit < kDigits; ++digit)
      ++next[digit * kPlaces + ((key >> (digit * kDigitBits)) & (kPlaces - 1))];
    entries[i] = uint64_t{key} << 32 | i;
  }
  for (unsigned digit = 0; digit < kDigits; ++digit) {
    uint32_t* places = next + digit * kPlaces;
    if (std::find(places, places + kPlaces, count) != places + kPlaces) continue;  // equal digits
    uint32_t start = 0;
    for (uint32_t place = 0; place < kPlaces; ++place) start += std::exchange(places[place], start);
    const unsigned shift = 32 + digit * kDigitBits;
    for (uint32_t i = 0; i < count; ++i)
      spare[places[(entries[i] >> shift) & (kPlaces - 1)]++] = entries[i];
    std::swap(entries, spare);
  }
  uint32_t* positions = arena.array<uint32_t>(count);
  for (uint32_t i = 0; i < count; ++i) positions[i] = static_cast<uint32_t>(entries[i]);
  return positions;
}

void encode(Context& context, ValueEncoding& encoding, ByteWriter& section) {
  const double wanted = encoding.parameters[0];
  if (!(wanted >= 2 && wanted <= kMostBuckets))
    invalid_argument("Quantile buckets: expected 2 to 256, got %g", wanted);
  const uint32_t count = encoding.count;
  const float* values = encoding.values;
  const uint32_t* ascending = sorted_positions(context.arena, values, count);
  uint32_t negatives = 0;
  for (uint32_t i = 0; i < count; ++i) negatives += values[i] < 0;

  const Sides sides = buckets_of_sides(count, negatives, static_cast<uint64_t>(wanted));
  float means[kMostBuckets];
  uint64_t frequencies[kHuffmanSymbols] = {};
  uint8_t* symbols = context.arena.array<uint8_t>(count);
  uint32_t bucket = 0;
  const auto fill_side = [&](uint64_t first, uint64_t n, uint64_t buckets) {
    for (uint64_t j = 0; j < buckets; ++j, ++bucket) {
      const uint64_t start = first + j * n / buckets, end = first + (j + 1) * n / buckets;
      double sum = -0.0;  // neutral for addition, even to -0
      for (uint64_t i = start; i < end; ++i) {
        sum += values[ascending[i]];
        symbols[ascending[i]] = static_cast<uint8_t>(bucket);
      }
      means[bucket] = static_cast<float>(sum / static_cast<double>(end - start));
      frequencies[bucket] = end - start;
    }
  };
  fill_side(0, negatives, sides.negative);
  fill_side(negatives, count - negatives, sides.other);
  for (uint32_t i = 0; i < count; ++i) encoding.decoded[i] = means[symbols[i]];

  const uint32_t blocks = (count + kBlock - 1) / kBlock;
  const auto block_size = [count](uint32_t block) {
    return std::min(kBlock, count - block * kBlock);
  };
  HuffmanCode code;
  make_huffman_code(frequencies, &code);
  uint64_t huffman_total = kHuffmanLengthsBytes + uint64_t{4} * (blocks == 0 ? 0 : blocks - 1);
  for (uint32_t block = 0; block < blocks; ++block)
    huffman_total += huffman_bytes(code, symbols + block * kBlock, block_size(block));
  const unsigned width = bit_width_of(bucket);
  const Kind kind = huffman_total < packed_bytes(count, width) ? kHuffmanCoded : kFixedWidth;

  section.put(static_cast<uint16_t>(sides.negative));
  section.put(static_cast<uint16_t>(sides.other));
  section.put<uint8_t>(kind);
  section.put_bytes(means, uint64_t{4} * bucket);
  if (kind == kFixedWidth) {
    BitWriter bits(section.extend(packed_bytes(count, width)));
    for (uint32_t i = 0; i < count; ++i) bits.put(symbols[i], width);
    bits.finish();
    return;
  }
  write_lengths(code, section);
  const uint64_t directory_at = section.size();
  section.extend(uint64_t{4} * (blocks - 1));
  const uint64_t data_at = section.size();
  for (uint32_t block = 0; block < blocks; ++block) {
    // smaller than with a fixed width, so far below 4 GiB
    const uint32_t start = static_cast<uint32_t>(section.size() - data_at);
    if (block > 0)
      std::memcpy(section.data() + directory_at + uint64_t{4} * (block - 1), &start, 4);
    write_symbols(code, symbols + block * kBlock, block_size(block), section);
  }
}

void decode(Context& context, ByteReader& section, uint32_t count, float* values) {
  const uint32_t total = uint32_t{section.get<uint16_t>()} + section.get<uint16_t>();
  const uint8_t kind = section.get<uint8_t>();
  if (total > kMostBuckets || (total == 0) != (count == 0) || kind > kHuffmanCoded ||
      (kind == kHuffmanCoded && count == 0))
    corrupt_payload("%s: expected %s, got %u coded as %u", section.section(),
                    count == 0 ? "0 buckets coded as 0" : "1 to 256 buckets coded as 0 or 1", total,
                    kind);
  float means[kMostBuckets];
  const uint8_t* table = section.take(uint64_t{4} * total);
  std::memcpy(means, table, uint64_t{4} * total);
  for (uint32_t i = 0; i < total; ++i)
    if (!std::isfinite(means[i]))
      corrupt_payload("%s: expected finite means, got %g", section.section(),
                      static_cast<double>(means[i]));
  const auto mean_of = [&](uint32_t symbol) {
    if (symbol >= total)
      corrupt_payload("%s: expected buckets below %u, got %u", section.section(), total, symbol);
    return means[symbol];
  };
  if (kind == kFixedWidth) {
    const unsigned width = bit_width_of(total);
    const uint64_t bytes = packed_bytes(count, width);
    BitReader bits(section.take(bytes), bytes, section.section());
    section.expect_end();
    for (uint32_t i = 0; i < count; ++i) values[i] = mean_of(bits.get(width));
    bits.expect_end();
    return;
  }
  HuffmanCode code;
  read_lengths(section, &code);
  const uint32_t blocks = (count + kBlock - 1) / kBlock;
  const uint8_t* directory = section.take(uint64_t{4} * (blocks - 1));
  const uint64_t data_bytes = section.remaining();
  const uint8_t* data = section.take(data_bytes);
  const uint16_t* lookup = HuffmanReader::make_table(context.arena, code);
  uint64_t start = 0;
  for (uint32_t block = 0; block < blocks; ++block) {
    uint64_t end = data_bytes;
    if (block + 1 < blocks) {
      uint32_t field;
      std::memcpy(&field, directory + uint64_t{4} * block, 4);
      end = field;
    }
    if (end < start || end > data_bytes)
      block_outside(section.section(), block, data_bytes, start, end);
    HuffmanReader reader(lookup, data + start, end - start, section.section());
    const uint32_t first = block * kBlock;
    for (uint32_t i = 0; i < std::min(kBlock, count - first); ++i)
      values[first + i] = mean_of(reader.next());
    reader.expect_end();
    start = end;
  }
}

}  // namespace

extern const ValueCodec quantile_codec;
const ValueCodec quantile_codec = {kQuantile, "Quantile", false, bits_per_value, encode, decode};

}  // namespace deepreduce
