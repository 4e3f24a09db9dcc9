// The k elements of largest magnitude, exactly.
#ifndef DEEPREDUCE_SELECT_LARGEST_H
#define DEEPREDUCE_SELECT_LARGEST_H

#include "select_sum.h"

namespace deepreduce {

// Accumulates, and selects the k largest by (|value|, smaller index first) without zeros.
// `threshold` comes in as a guess of the k-th magnitude that may be anything, and goes out as what
// it was; it only says where to look first.
Selection select_largest(Context& context, Sum& sum, uint32_t k, float& threshold);

}  // namespace deepreduce
#endif
