// What both curve fits compute of one value, shared by host and device. Number: double, or Lanes of
// several.
#ifndef DEEPREDUCE_VALUE_FIT_ELEMENT_H
#define DEEPREDUCE_VALUE_FIT_ELEMENT_H

#include <cfloat>
#include <cmath>

#include "../half.h"

#define DR_ELEMENT DR_HOST_DEVICE inline __attribute__((always_inline))

namespace deepreduce {

// The key to sort by: positives (0 and up) before negatives, larger magnitudes before smaller ones.
DR_HOST_DEVICE inline uint32_t sort_key(float value) { return float_bits(value) ^ 0x7FFFFFFFu; }
// The key without its side, which is the top bit.
DR_HOST_DEVICE inline uint32_t key_within_side(uint32_t key) { return key & 0x7FFFFFFFu; }
DR_HOST_DEVICE inline float magnitude_of_key(uint32_t within) {
  return bits_float(~within & 0x7FFFFFFFu);
}

// The bits that tell keys apart: the side, then the `span` that their range within a side takes.
// The `dropped` last ones (at most 2^-18 of a value) do not count where that saves a digit of the
// host's radix sort.
constexpr unsigned kMostDigitBits = 11;  // more buckets would not stay in a processor's first cache
constexpr unsigned kMostSortedBits = 27;
struct SortBits {
  unsigned span, dropped;
};
DR_HOST_DEVICE inline SortBits sort_bits(uint32_t least, uint32_t most) {
  constexpr unsigned kTwoDigits = 2 * kMostDigitBits, kMostDropped = 32 - kMostSortedBits;
  unsigned span = 0;
  while (span < 31 && ((most - least) >> span) != 0) ++span;
  const unsigned surplus = span + 1 > kTwoDigits ? span + 1 - kTwoDigits : 0;
  return {span, smaller(surplus, kMostDropped)};
}
// The key that fills span + 1 bits, when `least` is the least of all within a side.
DR_HOST_DEVICE inline uint32_t compact_key(uint32_t key, uint32_t least, unsigned span) {
  return (key_within_side(key) - least) | (key >> 31) << span;
}

DR_ELEMENT double absolute(const double& x) { return std::fabs(x); }

// A fitted magnitude as a value of the sign: never across zero, never infinite as a float32.
template <class Number>
DR_ELEMENT Number to_value(const Number& magnitude, const Number& sign) {
  return smaller(larger(magnitude, Number(0.0)), Number(static_cast<double>(FLT_MAX))) * sign;
}

}  // namespace deepreduce
#endif
