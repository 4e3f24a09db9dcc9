// The k elements of largest magnitude, exactly.
#ifndef DEEPREDUCE_SELECT_LARGEST_H
#define DEEPREDUCE_SELECT_LARGEST_H

#include "select/sum.h"

namespace deepreduce {

// Accumulates, and selects the k largest by (|value|, smaller index first), without zeros. In:
// `threshold` is any guess of the k-th magnitude, which only sets where the search starts. Out: the
// k-th magnitude.
Selection select_largest(Context& context, Sum& sum, uint32_t k, float& threshold);

}  // namespace deepreduce
#endif
