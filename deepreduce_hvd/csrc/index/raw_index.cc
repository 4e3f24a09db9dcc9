// RawIndex: 32-bit indices, in any order.
#include "codecs.h"

namespace deepreduce {
namespace {

void encode(Context&, IndexEncoding& encoding, ByteWriter& section) {
  section.put_bytes(encoding.indices, uint64_t{4} * encoding.count);
}

void decode(Context& context, ByteReader& section, uint32_t d, uint32_t count, uint32_t* indices) {
  const uint8_t* raw = section.take(uint64_t{4} * count);
  section.expect_end();
  if (count != 0) std::memcpy(indices, raw, uint64_t{4} * count);
  bool ascending = true;
  for (uint32_t i = 0; i < count; ++i) {
    if (indices[i] >= d)
      corrupt_payload("%s: expected an index below d = %u, got %u", section.section(), d,
                      indices[i]);
    ascending &= i == 0 || indices[i - 1] < indices[i];
  }
  if (ascending) return;
  uint64_t* seen = context.arena.zeros<uint64_t>((uint64_t{d} + 63) / 64);
  for (uint32_t i = 0; i < count; ++i) {
    const uint64_t bit = uint64_t{1} << (indices[i] & 63);
    if (seen[indices[i] >> 6] & bit)
      corrupt_payload("%s: expected distinct indices, got %u twice", section.section(), indices[i]);
    seen[indices[i] >> 6] |= bit;
  }
}

}  // namespace

extern const IndexCodec raw_index_codec;
const IndexCodec raw_index_codec = {kRawIndex, "RawIndex", true, encode, decode};

}  // namespace deepreduce
