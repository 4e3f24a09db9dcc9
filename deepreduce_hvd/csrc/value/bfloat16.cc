// BFloat16: the Format for value/half_values.h.
#include "value/half_values.h"

namespace deepreduce {
namespace {

struct Format {
  static constexpr uint16_t kExponent = 0x7F80u;
  static constexpr const char* kName = "bfloat16";
  static DR_INLINE uint16_t narrow(float value) { return float_to_bfloat16(value); }
  static DR_INLINE float widen(uint16_t half) { return bfloat16_to_float(half); }
};
using Values = HalfValues<Format>;

}  // namespace

extern const ValueCodec bfloat16_codec;
const ValueCodec bfloat16_codec = {kBFloat16,      "BFloat16",    false, Values::bits_per_value,
                                   Values::encode, Values::decode};

}  // namespace deepreduce
