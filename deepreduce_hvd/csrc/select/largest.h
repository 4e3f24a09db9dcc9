// The k elements of largest magnitude, exactly.
#ifndef DEEPREDUCE_SELECT_LARGEST_H
#define DEEPREDUCE_SELECT_LARGEST_H

#include "select/sum.h"

namespace deepreduce {

struct Kth {
  uint32_t bits;  // k-th largest magnitude; 0 if there are fewer than k elements
  uint32_t ties;  // number of elements with that magnitude among the k
};

// Finds the k-th of `count` magnitudes, all of which are >= `low`. `histogram` is scratch memory of
// kHistogramSize numbers.
constexpr uint32_t kHistogramSize = 2 * 2049;
Kth find_kth(const SelectKernels& kernels, const float* values, uint32_t count, uint32_t k,
             uint32_t low, uint32_t* histogram);

// Accumulates, and selects the k largest by (|value|, smaller index first), without zeros. In:
// `threshold` is any guess of the k-th magnitude, which only sets where the search starts. Out: the
// k-th magnitude.
Selection select_largest(Context& context, Sum& sum, uint32_t k, float& threshold);

}  // namespace deepreduce
#endif
