// Data and functions shared by the parts of FitPoly. All pointers point to device memory.
#ifndef DEEPREDUCE_CUDA_VALUE_FIT_POLY_CUH
#define DEEPREDUCE_CUDA_VALUE_FIT_POLY_CUH

#include "cuda/value/fit_sides.cuh"
#include "value/poly_element.h"

namespace deepreduce {
namespace cuda {

constexpr uint32_t kMostTerms = kMaxDegree + 1;

struct PolySide {
  uint32_t start, count;  // position among the sorted values
  uint32_t wanted;        // encoding: number of segments
  uint32_t segments;
  int32_t exponent;
  // encoding: bits of the magnitudes of each column's coefficients
  uint32_t columns[kMostTerms];
  // encoding: bit j is set if column j has a non-zero coefficient
  uint32_t used;
  uint32_t lengths;  // encoding: bits of the lengths, without the last one
};

struct PolyHead {
  PolySide side[2];
  uint32_t degree, length_width, width[kMostTerms];
  uint32_t row_width;  // bits of all coefficients of a segment
};

// Segment s of a side is at place side * most + s. Each place has kMostTerms coefficients and
// powers.
struct PolyArrays {
  PolyHead* head;
  uint32_t* starts;  // relative to the side's start
  int64_t* coefficients;
  double* powers;
  uint32_t most;  // host: maximum number of segments per side
};

__device__ inline uint32_t segment_end(const PolyArrays& arrays, uint32_t side, uint32_t s) {
  return s + 1 < arrays.head->side[side].segments ? arrays.starts[side * arrays.most + s + 1]
                                                  : arrays.head->side[side].count;
}

// Fills starts and each side's `segments` from start, count and wanted. The cuts are those of the
// host's greedy search.
void find_segments(Device&, const float* magnitudes, const PolyArrays&, uint32_t capacity,
                   int degree);

// Fills coefficients, and exponent, columns, used and lengths of each side.
void fit_segments(Device&, const float* magnitudes, const PolyArrays&, int degree);

}  // namespace cuda
}  // namespace deepreduce
#endif
