// EliasFano: low bits as they are, high bits as a bitmap.
#include "bits.h"
#include "codecs.h"

namespace deepreduce {
namespace {

unsigned low_width(uint32_t d, uint32_t count) {
  const uint32_t ratio = d / count;
  return ratio == 0 ? 0 : 31 - static_cast<unsigned>(__builtin_clz(ratio));
}

uint64_t high_bits_of(uint32_t d, uint32_t count, unsigned width) { return uint64_t{count} + ((d - 1) >> width) + 1; }

void encode(Context&, IndexEncoding& encoding, ByteWriter& section) {
  const uint32_t count = encoding.count;
  if (count == 0) return;
  const unsigned width = low_width(encoding.d, count);
  const uint64_t low_bytes = packed_bytes(count, width);
  const uint64_t high_bytes = (high_bits_of(encoding.d, count, width) + 7) / 8;
  uint8_t* out = section.extend(low_bytes + high_bytes);
  uint8_t* high = out + low_bytes;
  std::memset(high, 0, high_bytes);
  BitWriter low(out);
  const uint32_t mask = static_cast<uint32_t>((uint64_t{1} << width) - 1);
  for (uint32_t i = 0; i < count; ++i) {
    low.put(encoding.indices[i] & mask, width);
    const uint64_t bit = uint64_t{encoding.indices[i] >> width} + i;
    high[bit >> 3] = static_cast<uint8_t>(high[bit >> 3] | (1u << (bit & 7)));
  }
  low.finish();
}

void decode(Context&, ByteReader& section, uint32_t d, uint32_t count, uint32_t* indices) {
  if (count == 0) return section.expect_end();
  const unsigned width = low_width(d, count);
  const uint64_t high_bits = high_bits_of(d, count, width);
  const uint64_t low_bytes = packed_bytes(count, width), high_bytes = (high_bits + 7) / 8;
  const uint8_t* low_data = section.take(low_bytes);
  const uint8_t* high = section.take(high_bytes);
  section.expect_end();
  BitReader low(low_data, low_bytes, section.section());
  uint32_t found = 0;
  int64_t previous = -1;
  for (uint64_t byte = 0; byte < high_bytes; byte += 8) {
    uint64_t word = 0;
    std::memcpy(&word, high + byte, high_bytes - byte < 8 ? high_bytes - byte : 8);
    for (; word != 0; word &= word - 1) {
      const uint64_t bit = byte * 8 + static_cast<uint64_t>(__builtin_ctzll(word));
      if (found == count || bit >= high_bits)
        corrupt_payload("%s: expected %u set bits in %llu, got more", section.section(), count, static_cast<unsigned long long>(high_bits));
      const int64_t index = static_cast<int64_t>(((bit - found) << width) | low.get(width));
      if (index <= previous || index >= static_cast<int64_t>(d))
        corrupt_payload("%s: expected ascending indices below d = %u", section.section(), d);
      indices[found++] = static_cast<uint32_t>(index);
      previous = index;
    }
  }
  if (found != count)
    corrupt_payload("%s: expected %u set bits in %llu, got %u", section.section(), count, static_cast<unsigned long long>(high_bits), found);
  low.expect_end();
}

}  // namespace

extern const IndexCodec elias_fano_codec;
const IndexCodec elias_fano_codec = {kEliasFano, "EliasFano", false, encode, decode};

}  // namespace deepreduce
