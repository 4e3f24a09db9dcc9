// Shared by the curve fits: separates the signs and sorts each by magnitude.
#ifndef DEEPREDUCE_VALUE_FIT_SIDES_H
#define DEEPREDUCE_VALUE_FIT_SIDES_H

#include "codecs.h"
#include "support/simd.h"

namespace deepreduce {

// The sorted values: positives, then negatives (by the sign bit), the largest magnitudes of each
// side first. Equal magnitudes are ordered by position, and so may be magnitudes with a relative
// difference below 2^-18, or a difference below 32 * 2^-149, if that saves work.
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
