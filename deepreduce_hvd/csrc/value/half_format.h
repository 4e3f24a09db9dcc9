// The 16-bit formats of values, shared by host and device.
#ifndef DEEPREDUCE_VALUE_HALF_FORMAT_H
#define DEEPREDUCE_VALUE_HALF_FORMAT_H

#include "support/half.h"

namespace deepreduce {

struct Float16Format {
  static constexpr uint16_t kExponent = 0x7C00u;  // all ones in NaN and Inf
  static constexpr const char* kName = "float16";
  DR_ELEMENT static uint16_t narrow(float value) { return float_to_float16(value); }
  DR_ELEMENT static float widen(uint16_t half) { return float16_to_float(half); }
};

struct BFloat16Format {
  static constexpr uint16_t kExponent = 0x7F80u;
  static constexpr const char* kName = "bfloat16";
  DR_ELEMENT static uint16_t narrow(float value) { return float_to_bfloat16(value); }
  DR_ELEMENT static float widen(uint16_t half) { return bfloat16_to_float(half); }
};

// Whether a value is finite. No encoder writes NaN or Inf.
template <class Format>
DR_ELEMENT bool half_is_finite(uint16_t half) {
  return (half & Format::kExponent) != Format::kExponent;
}

}  // namespace deepreduce
#endif
