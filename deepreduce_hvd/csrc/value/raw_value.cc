// RawValue: unchanged float32 values.
#include "codecs.h"

namespace deepreduce {
namespace {

double bits_per_value(const double*) { return 32; }

void encode(Context&, ValueEncoding& encoding, ByteWriter& section) {
  section.put_bytes(encoding.values, uint64_t{4} * encoding.count);
  if (encoding.count != 0)
    std::memcpy(encoding.decoded, encoding.values, uint64_t{4} * encoding.count);
}

void decode(Context&, ByteReader& section, uint32_t count, float* values) {
  const uint8_t* raw = section.take(uint64_t{4} * count);
  section.expect_end();
  if (count != 0) std::memcpy(values, raw, uint64_t{4} * count);
}

}  // namespace

extern const ValueCodec raw_value_codec;
const ValueCodec raw_value_codec = {kRawValue, "RawValue", false, bits_per_value, encode, decode};

}  // namespace deepreduce
