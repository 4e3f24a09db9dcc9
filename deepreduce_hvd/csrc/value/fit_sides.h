// What the curve fits share: both signs apart, each sorted by magnitude.
#ifndef DEEPREDUCE_VALUE_FIT_SIDES_H
#define DEEPREDUCE_VALUE_FIT_SIDES_H

#include "../codecs.h"
#include "../simd.h"

namespace deepreduce {

// The values sorted: positives, then negatives (by the sign bit), each side's magnitudes largest
// first; equal ones, and those that differ by less than 2^-18 of themselves where that saves work,
// by position.
struct SortedSides {
  uint32_t counts[2];
  float* magnitudes;  // (counts[0] + counts[1],)
  float* side(int s) const { return magnitudes + (s == 0 ? 0 : counts[0]); }
};

// Fills order (count,): order[j] = position in `values` of the j-th value in sorted order.
SortedSides sort_sides(Context&, const float* values, uint32_t count, uint32_t* order);

// decoded[order[j]] = sent[j].
void restore_order(const float* sent, const uint32_t* order, uint32_t count, float* decoded);

}  // namespace deepreduce
#endif
