// float16 and bfloat16 conversions, rounding to nearest even, shared by host and device.
#ifndef DEEPREDUCE_HALF_H
#define DEEPREDUCE_HALF_H

#include <cstdint>
#include <cstring>

#include "support/host_device.h"

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

// The bits of a float without its sign; as integers they have the order of magnitudes.
DR_ELEMENT uint32_t magnitude_bits(float value) { return float_bits(value) & 0x7FFFFFFFu; }

DR_HOST_DEVICE inline float bfloat16_to_float(uint16_t half) {
  return bits_float(static_cast<uint32_t>(half) << 16);
}

// Finite input. Saturates at the largest finite bfloat16, so the rest stays in the residual.
DR_HOST_DEVICE inline uint16_t float_to_bfloat16(float value) {
  const uint32_t bits = float_bits(value);
  const uint32_t rounded = bits + 0x7FFFu + ((bits >> 16) & 1u);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint16_t magnitude = static_cast<uint16_t>((rounded >> 16) & 0x7FFFu);
  return static_cast<uint16_t>(sign | (magnitude > 0x7F7Fu ? 0x7F7Fu : magnitude));
}

// Selects by bits. With ?: compilers put the arithmetic of one case behind a branch, and loops are
// not vectorized.
DR_HOST_DEVICE inline uint32_t select_bits(bool first, uint32_t if_first, uint32_t otherwise) {
  const uint32_t mask = 0u - static_cast<uint32_t>(first);
  return (if_first & mask) | (otherwise & ~mask);
}

DR_HOST_DEVICE inline float float16_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7FFFu;
  // the mantissa as an integer times 2^-24; signed, since few processors convert unsigned integers
  const float small =
      static_cast<float>(static_cast<int32_t>(magnitude & 0x3FFu)) * 5.9604644775390625e-8f;
  // corrects the exponent's bias, also for NaN and Inf
  const uint32_t normal = (magnitude << 13) + (magnitude >= 0x7C00u ? 0x70000000u : 0x38000000u);
  return bits_float(sign | select_bits(magnitude < 0x400u, float_bits(small), normal));
}

// Finite input; saturates at +-65504.
DR_HOST_DEVICE inline uint16_t float_to_float16(float value) {
  const uint32_t bits = float_bits(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  // subnormal: adding 0.5 leaves round(|value| * 2^24) in the low bits
  const uint32_t small = float_bits(bits_float(magnitude) + 0.5f) - 0x3F000000u;
  const uint32_t normal = (magnitude + 0xFFFu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
  const uint32_t unbounded = select_bits(magnitude < 0x38800000u, small, normal);
  // saturates what would round to more than 65504
  return static_cast<uint16_t>(sign | select_bits(magnitude >= 0x477FF000u, 0x7BFFu, unbounded));
}

}  // namespace deepreduce
#endif
