// Bitmap: one bit per element.
#include "codecs.h"
#include "support/bits.h"
#include "support/set_bits.h"

namespace deepreduce {
namespace {

void encode(Context&, IndexEncoding& encoding, ByteWriter& section) {
  const uint64_t bytes = packed_bytes(encoding.d, 1);
  uint8_t* bits = section.extend(bytes);
  std::memset(bits, 0, bytes);
  for (uint32_t i = 0; i < encoding.count; ++i) {
    const uint32_t index = encoding.indices[i];
    bits[index >> 3] = static_cast<uint8_t>(bits[index >> 3] | (1u << (index & 7)));
  }
}

void decode(Context& context, ByteReader& section, uint32_t d, uint32_t count, uint32_t* indices) {
  const uint64_t bytes = packed_bytes(d, 1);
  const uint8_t* bits = section.take(bytes);
  section.expect_end();
  const uint64_t found = set_bit_positions(context.simd, bits, bytes, indices, count);
  if (found != count || (found > 0 && indices[found - 1] >= d))
    corrupt_payload("%s: expected %u set bits below d = %u, got %llu or one at d or above",
                    section.section(), count, d, static_cast<unsigned long long>(found));
}

}  // namespace

extern const IndexCodec bitmap_codec;
const IndexCodec bitmap_codec = {kBitmap, "Bitmap", false, encode, decode};

}  // namespace deepreduce
