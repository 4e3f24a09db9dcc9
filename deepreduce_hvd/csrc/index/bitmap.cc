// Bitmap: one bit an element.
#include "codecs.h"

namespace deepreduce {
namespace {

void encode(Context&, IndexEncoding& encoding, ByteWriter& section) {
  const uint64_t bytes = (uint64_t{encoding.d} + 7) / 8;
  uint8_t* bits = section.extend(bytes);
  std::memset(bits, 0, bytes);
  for (uint32_t i = 0; i < encoding.count; ++i) {
    const uint32_t index = encoding.indices[i];
    bits[index >> 3] = static_cast<uint8_t>(bits[index >> 3] | (1u << (index & 7)));
  }
}

void decode(Context&, ByteReader& section, uint32_t d, uint32_t count, uint32_t* indices) {
  const uint64_t bytes = (uint64_t{d} + 7) / 8;
  const uint8_t* bits = section.take(bytes);
  section.expect_end();
  uint32_t found = 0;
  for (uint64_t byte = 0; byte < bytes; byte += 8) {
    uint64_t word = 0;
    std::memcpy(&word, bits + byte, bytes - byte < 8 ? bytes - byte : 8);
    for (; word != 0; word &= word - 1) {
      const uint64_t index = byte * 8 + static_cast<uint64_t>(__builtin_ctzll(word));
      if (index >= d || found == count)
        corrupt_payload("%s: expected %u set bits below d = %u, got more", section.section(), count, d);
      indices[found++] = static_cast<uint32_t>(index);
    }
  }
  if (found != count) corrupt_payload("%s: expected %u set bits below d = %u, got %u", section.section(), count, d, found);
}

}  // namespace

extern const IndexCodec bitmap_codec;
const IndexCodec bitmap_codec = {kBitmap, "Bitmap", false, encode, decode};

}  // namespace deepreduce
