// Computations on one value for both curve fits, shared by host and device. Number is double or
// Lanes.
#ifndef DEEPREDUCE_VALUE_FIT_ELEMENT_H
#define DEEPREDUCE_VALUE_FIT_ELEMENT_H

#include <cfloat>
#include <cmath>

#include "support/half.h"

namespace deepreduce {

// Returns the sort key: positives (including 0) before negatives, larger magnitudes before smaller
// ones.
DR_HOST_DEVICE inline uint32_t side_key(float value) { return float_bits(value) ^ 0x7FFFFFFFu; }
// Returns the key without its side, which is the top bit.
DR_HOST_DEVICE inline uint32_t key_within_side(uint32_t key) { return key & 0x7FFFFFFFu; }
DR_HOST_DEVICE inline float magnitude_of_key(uint32_t within) {
  return bits_float(~within & 0x7FFFFFFFu);
}

// The bits by which keys are compared: the side, then the `span` bits of their range within a side.
// The last `dropped` bits (at most 2^-18 of a value, or 31 * 2^-149 if that is more) are ignored if
// that saves a digit of the host's radix sort.
constexpr unsigned kMostDigitBits = 11;  // more buckets would not fit in the level-1 cache
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
// Returns the key in span + 1 bits, where `least` is the smallest key within a side.
DR_HOST_DEVICE inline uint32_t compact_key(uint32_t key, uint32_t least, unsigned span) {
  return (key_within_side(key) - least) | (key >> 31) << span;
}

DR_ELEMENT double absolute(const double& x) { return std::fabs(x); }

// Returns a fitted magnitude, clamped to [0, FLT_MAX], times the sign.
template <class Number>
DR_ELEMENT Number to_value(const Number& magnitude, const Number& sign) {
  return smaller(larger(magnitude, Number(0.0)), Number(static_cast<double>(FLT_MAX))) * sign;
}

}  // namespace deepreduce
#endif
