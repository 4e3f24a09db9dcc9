// Selection on one element, shared by host and device.
#ifndef DEEPREDUCE_SELECT_ELEMENT_H
#define DEEPREDUCE_SELECT_ELEMENT_H

#include <cfloat>

#include "support/half.h"

namespace deepreduce {

DR_ELEMENT float saturate(float value) {
  value = value < -FLT_MAX ? -FLT_MAX : value;
  return value > FLT_MAX ? FLT_MAX : value;
}

// The momentum buffer after the gradient's element is added.
DR_ELEMENT float next_velocity(float momentum, float velocity, float gradient) {
  return saturate(momentum * velocity + gradient);
}
DR_ELEMENT float next_sum(float sum, float addend) { return saturate(sum + addend); }
// The memory after the sent value is subtracted.
DR_ELEMENT float without(float sum, float weight, float sent) {
  return saturate(sum - weight * sent);
}

}  // namespace deepreduce
#endif
