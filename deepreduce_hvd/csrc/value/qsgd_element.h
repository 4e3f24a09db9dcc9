// QSGD's arithmetic on one value, shared by host and device.
#ifndef DEEPREDUCE_VALUE_QSGD_ELEMENT_H
#define DEEPREDUCE_VALUE_QSGD_ELEMENT_H

#include <cfloat>
#include <cmath>

#include "support/half.h"
#include "support/random.h"

namespace deepreduce {

// Returns s of the paper.
DR_HOST_DEVICE inline float qsgd_levels(unsigned bits) {
  return bits == 1 ? 1.0f : static_cast<float>((1u << (bits - 1)) - 1);
}

// Returns the code of a value with magnitude at most `norm`, norm > 0: the sign, then the level,
// rounded by `uniform` in [0, 1).
DR_HOST_DEVICE inline uint8_t qsgd_code(float value, float norm, float levels, unsigned sign_shift,
                                        float uniform) {
  const float magnitude = bits_float(magnitude_bits(value));
  // not negative, so truncation is floor
  const int level = static_cast<int>((magnitude / norm) * levels + uniform);
  const int largest = static_cast<int>(levels);
  const uint32_t sign = float_bits(value) >> 31;
  return static_cast<uint8_t>((level < largest ? level : largest) |
                              static_cast<int>(sign << sign_shift));
}

// The same for one bit: 1 for the norm, 0 for minus the norm.
DR_HOST_DEVICE inline uint8_t qsgd_sign_code(float value, float norm, float uniform) {
  const int code = static_cast<int>((value / norm + 1.0f) * 0.5f + uniform);
  return static_cast<uint8_t>(code < 1 ? code : 1);
}

// Returns the decoded value of a code: the multiple of the norm, rounded to float32, times the
// norm.
DR_HOST_DEVICE inline float qsgd_value(uint8_t code, float norm, float levels,
                                       unsigned sign_shift) {
  const int level = code & ((1 << sign_shift) - 1);
  const uint32_t sign = static_cast<uint32_t>(code) >> sign_shift << 31;
  return bits_float(float_bits((static_cast<float>(level) / levels) * norm) | sign);
}

DR_HOST_DEVICE inline float qsgd_sign_value(uint8_t code, float norm) {
  return bits_float(float_bits(norm) | (code == 0 ? 0x80000000u : 0u));
}

// Returns the norm for a bucket's sum of squares.
DR_HOST_DEVICE inline float qsgd_euclidean_norm(double squares) {
  const double norm = std::sqrt(squares);
  return norm > FLT_MAX ? FLT_MAX : static_cast<float>(norm);
}

}  // namespace deepreduce
#endif
