// Sorted values for the curve fits on the device: signs are separate, and each is sorted by
// magnitude (csrc/value/fit_sides.h).
#ifndef DEEPREDUCE_CUDA_VALUE_FIT_SIDES_CUH
#define DEEPREDUCE_CUDA_VALUE_FIT_SIDES_CUH

#include "cuda/codecs.cuh"
#include "value/fit_element.h"

namespace deepreduce {
namespace cuda {

// lanes of every sum of floats: element i goes to lane i mod 8; then lanes l and l + 4, l + 2, l +
// 1 are added
constexpr uint32_t kLanes = 8;

// All in device memory: first positives, then negatives, largest magnitudes first.
struct SortedSides {
  const uint32_t* counts;   // (2,)
  const float* magnitudes;  // (capacity,) the first *count are valid
};

// Fills order (capacity,): order[j] = position in `values` of the j-th value in sorted order.
SortedSides sort_sides(Device&, const float* values, const uint32_t* count, uint32_t capacity,
                       uint32_t* order);

// Adds the lanes of a sum, in place.
__device__ inline double fold_lanes(double* lanes) {
  for (uint32_t half = kLanes / 2; half >= 1; half /= 2)
    for (uint32_t l = 0; l < half; ++l) lanes[l] = lanes[l] + lanes[l + half];
  return lanes[0];
}

}  // namespace cuda
}  // namespace deepreduce
#endif
