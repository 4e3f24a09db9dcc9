// EliasFano: low bits unchanged, high bits as a bitmap.
#include "codecs.h"
#include "index/elias_fano_layout.h"
#include "support/bits.h"
#include "support/set_bits.h"

namespace deepreduce {
namespace {

void encode(Context&, IndexEncoding& encoding, ByteWriter& section) {
  const uint32_t count = encoding.count;
  if (count == 0) return;
  const EliasFanoLayout layout = elias_fano_layout(encoding.d, count);
  const unsigned width = layout.width;
  uint8_t* out = section.extend(layout.low_bytes + layout.high_bytes);
  uint8_t* high = out + layout.low_bytes;
  std::memset(high, 0, layout.high_bytes);
  BitWriter low(out);
  const uint32_t mask = static_cast<uint32_t>((uint64_t{1} << width) - 1);
  for (uint32_t i = 0; i < count; ++i) {
    low.put(encoding.indices[i] & mask, width);
    const uint64_t bit = uint64_t{encoding.indices[i] >> width} + i;
    high[bit >> 3] = static_cast<uint8_t>(high[bit >> 3] | (1u << (bit & 7)));
  }
  low.finish();
}

void decode(Context& context, ByteReader& section, uint32_t d, uint32_t count, uint32_t* indices) {
  if (count == 0) return section.expect_end();
  const EliasFanoLayout layout = elias_fano_layout(d, count);
  const unsigned width = layout.width;
  const uint64_t low_bytes = layout.low_bytes, high_bits = layout.high_bits,
                 high_bytes = layout.high_bytes;
  const uint8_t* low = section.take(low_bytes);
  const uint8_t* high = section.take(high_bytes);
  section.expect_end();
  expect_zero_padding(low, layout.low_bits, section.section());
  const uint64_t found = set_bit_positions(context.simd, high, high_bytes, indices, count);
  if (found != count || indices[count - 1] >= high_bits)
    corrupt_payload("%s: expected %u set bits in %llu, got %llu or one in the padding",
                    section.section(), count, static_cast<unsigned long long>(high_bits),
                    static_cast<unsigned long long>(found));
  // compute all in 64 bits, then check them once
  int64_t previous = -1;
  bool ascending = true;
  for_each_field(low, low_bytes + high_bytes, count, width, [&](uint32_t i, uint64_t field) {
    const int64_t index = static_cast<int64_t>((uint64_t{indices[i] - i} << width) | field);
    ascending &= index > previous;
    indices[i] = static_cast<uint32_t>(index);
    previous = index;
  });
  if (!ascending) {
    uint32_t i = 1;
    while (i + 1 < count && indices[i] > indices[i - 1]) ++i;
    corrupt_payload("%s: expected ascending indices, got %u followed by %u", section.section(),
                    indices[i - 1], indices[i]);
  }
  if (previous >= static_cast<int64_t>(d))
    corrupt_payload("%s: expected indices below d = %u, got %lld", section.section(), d,
                    static_cast<long long>(previous));
}

}  // namespace

extern const IndexCodec elias_fano_codec;
const IndexCodec elias_fano_codec = {kEliasFano, "EliasFano", false, encode, decode};

}  // namespace deepreduce
