// Float16: the Format for value/half_values.h.
#include "value/half_values.h"

namespace deepreduce {
namespace {

struct Format {
  static constexpr uint16_t kExponent = 0x7C00u;
  static constexpr const char* kName = "float16";
  static DR_INLINE uint16_t narrow(float value) { return float_to_float16(value); }
  static DR_INLINE float widen(uint16_t half) { return float16_to_float(half); }
};
using Values = HalfValues<Format>;

}  // namespace

extern const ValueCodec float16_codec;
const ValueCodec float16_codec = {kFloat16,       "Float16",     false, Values::bits_per_value,
                                  Values::encode, Values::decode};

}  // namespace deepreduce
