// Float16: two bytes a value, rounded to nearest even, saturating.
#include "codecs.h"
#include "half.h"

namespace deepreduce {
namespace {

constexpr uint16_t kExponent = 0x7C00u;  // all ones: NaN or Inf, which no encoder writes

double bits_a_value(const double*) { return 16; }

void encode(Context&, ValueEncoding& encoding, ByteWriter& section) {
  uint8_t* out = section.extend(uint64_t{2} * encoding.count);
  for (uint32_t i = 0; i < encoding.count; ++i) {
    const uint16_t half = float_to_float16(encoding.values[i]);
    std::memcpy(out + uint64_t{2} * i, &half, 2);
    encoding.decoded[i] = float16_to_float(half);
  }
}

void decode(Context&, ByteReader& section, uint32_t count, float* values) {
  const uint8_t* data = section.take(uint64_t{2} * count);
  section.expect_end();
  bool finite = true;
  for (uint32_t i = 0; i < count; ++i) {
    uint16_t half;
    std::memcpy(&half, data + uint64_t{2} * i, 2);
    finite &= (half & kExponent) != kExponent;
    values[i] = float16_to_float(half);
  }
  if (!finite) corrupt_payload("%s: expected finite float16 values, got NaN or Inf", section.section());
}

}  // namespace

extern const ValueCodec float16_codec;
const ValueCodec float16_codec = {kFloat16, "Float16", false, bits_a_value, encode, decode};

}  // namespace deepreduce
