// float16 and bfloat16 conversions, to nearest even, shared by host and device.
#ifndef DEEPREDUCE_HALF_H
#define DEEPREDUCE_HALF_H

#include <cstdint>
#include <cstring>

#include "random.h"  // DR_HOST_DEVICE

namespace deepreduce {

DR_HOST_DEVICE inline uint32_t float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

DR_HOST_DEVICE inline float bits_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

DR_HOST_DEVICE inline float bfloat16_to_float(uint16_t half) { return bits_float(static_cast<uint32_t>(half) << 16); }

// Finite input; saturates at the largest finite bfloat16, so that what is lost stays in the residual.
DR_HOST_DEVICE inline uint16_t float_to_bfloat16(float value) {
  const uint32_t bits = float_bits(value);
  const uint32_t rounded = bits + 0x7FFFu + ((bits >> 16) & 1u);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint16_t magnitude = static_cast<uint16_t>((rounded >> 16) & 0x7FFFu);
  return static_cast<uint16_t>(sign | (magnitude > 0x7F7Fu ? 0x7F7Fu : magnitude));
}

DR_HOST_DEVICE inline float float16_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 0x1Fu;
  const uint32_t mantissa = half & 0x3FFu;
  if (exponent == 0x1Fu) return bits_float(sign | 0x7F800000u | (mantissa << 13));
  if (exponent != 0) return bits_float(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  const float magnitude = static_cast<float>(mantissa) * 5.9604644775390625e-8f;  // mantissa * 2^-24
  return bits_float(sign | float_bits(magnitude));
}

// Finite input; saturates at +-65504.
DR_HOST_DEVICE inline uint16_t float_to_float16(float value) {
  const uint32_t bits = float_bits(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7BFFu);  // rounds to 65504 or would overflow
  if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 leaves round(|value| * 2^24) in the low bits
    const float shifted = bits_float(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (float_bits(shifted) - 0x3F000000u));
  }
  const uint32_t rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

}  // namespace deepreduce
#endif
