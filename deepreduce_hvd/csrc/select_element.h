// What selection does to one element, shared by host and device.
#ifndef DEEPREDUCE_SELECT_ELEMENT_H
#define DEEPREDUCE_SELECT_ELEMENT_H

#include <cfloat>

#include "half.h"

namespace deepreduce {

#define DR_ELEMENT DR_HOST_DEVICE inline __attribute__((always_inline))

DR_ELEMENT float saturate(float value) {
  value = value < -FLT_MAX ? -FLT_MAX : value;
  return value > FLT_MAX ? FLT_MAX : value;
}

// Magnitudes compare as the integers that their bits are, the sign taken off.
DR_ELEMENT uint32_t magnitude_bits(float value) { return float_bits(value) & 0x7FFFFFFFu; }

// The memory with the gradient's element added.
DR_ELEMENT float next_velocity(float momentum, float velocity, float gradient) {
  return saturate(momentum * velocity + gradient);
}
DR_ELEMENT float next_sum(float sum, float addend) { return saturate(sum + addend); }
// The memory without what was sent.
DR_ELEMENT float without(float sum, float weight, float sent) {
  return saturate(sum - weight * sent);
}

#undef DR_ELEMENT

}  // namespace deepreduce
#endif
