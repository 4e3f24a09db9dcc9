// The k elements of largest magnitude, exactly.
#ifndef DEEPREDUCE_SELECT_LARGEST_H
#define DEEPREDUCE_SELECT_LARGEST_H

#include "select/sum.h"

namespace deepreduce {

struct Kth {
  uint32_t bits;  // k-th largest magnitude; 0 if there are fewer than k elements
  uint32_t ties;  // number of elements with that magnitude among the k
};

// Scratch memory of find_kth.
struct KthScratch {
  KthScratch(Arena& arena, uint64_t most);

  uint32_t* histogram;
  uint32_t* rest;
};

// Finds the k-th of `count` magnitudes, all of which are >= `low`. The scratch memory is for at
// least `count`.
Kth find_kth(const SelectKernels& kernels, const float* values, uint32_t count, uint32_t k,
             uint32_t low, const KthScratch& scratch);

// Accumulates, and selects the k largest by (|value|, smaller index first), without zeros. In:
// `threshold` is any guess of the k-th magnitude, which only sets where the search starts. Out: the
// k-th magnitude.
Selection select_largest(Context& context, Sum& sum, uint32_t k, float& threshold);

}  // namespace deepreduce
#endif
