// What the parts of FitPoly on the device hand on: all in device memory.
#ifndef DEEPREDUCE_CUDA_VALUE_FIT_POLY_CUH
#define DEEPREDUCE_CUDA_VALUE_FIT_POLY_CUH

#include "cuda/value/fit_sides.cuh"
#include "value/poly_element.h"

namespace deepreduce {
namespace cuda {

constexpr uint32_t kMostTerms = kMaxDegree + 1;

struct PolySide {
  uint32_t start, count;  // among the sorted values
  uint32_t wanted;        // segments, when encoding
  uint32_t segments;
  int32_t exponent;
  // encoding: the bits that the magnitudes of each column's coefficients have
  uint32_t columns[kMostTerms];
  // encoding: bit j is set when column j has a coefficient that is not 0
  uint32_t used;
  uint32_t lengths;  // encoding: the bits that the lengths have, but the last one's
};

struct PolyHead {
  PolySide side[2];
  uint32_t degree, length_width, width[kMostTerms];
  uint32_t row_width;  // of all coefficients of a segment
};

// Segment s of a side has the place side * most + s; coefficients and powers have kMostTerms
// numbers at each place.
struct PolyArrays {
  PolyHead* head;
  uint32_t* starts;  // from the side's start
  int64_t* coefficients;
  double* powers;
  uint32_t most;  // host: segments of a side
};

__device__ inline uint32_t segment_end(const PolyArrays& arrays, uint32_t side, uint32_t s) {
  return s + 1 < arrays.head->side[side].segments ? arrays.starts[side * arrays.most + s + 1]
                                                  : arrays.head->side[side].count;
}

// Fills starts and each side's `segments` from start, count and wanted: the cuts of the host's
// greedy search.
void find_segments(Device&, const float* magnitudes, const PolyArrays&, uint32_t capacity,
                   int degree);

// Fills coefficients, and exponent, columns, used and lengths of each side.
void fit_segments(Device&, const float* magnitudes, const PolyArrays&, int degree);

}  // namespace cuda
}  // namespace deepreduce
#endif
