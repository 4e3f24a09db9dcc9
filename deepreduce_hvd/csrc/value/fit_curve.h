// The numeric kernels of FitPoly: chord distances, orthogonal fits, evaluation. They compute the
// same bits at every SIMD level.
#ifndef DEEPREDUCE_VALUE_FIT_CURVE_H
#define DEEPREDUCE_VALUE_FIT_CURVE_H

#include "value/fit_sides.h"
#include "value/poly_element.h"

namespace deepreduce {

// The point farthest from the chord of its segment.
struct Farthest {
  double distance;
  uint32_t position;  // relative to the start of the segment
};

// Returns the point of y (n,) farthest from the chord of the first and last point, the first one at
// ties. Only points with at least `fewest` points before them, and at least `fewest` from them on,
// count. The distance is 0 if there is none.
Farthest farthest_from_chord(Simd, const float* y, uint32_t n, uint32_t fewest);

// moments[j] = sum of y P_j for j <= recurrence.degree; returns the sum of y^2.
double fit_moments(Simd, const float* y, uint32_t n, const Recurrence&, double* moments);

// out[i] = the value at x_i of the polynomial, of the given sign, by Horner's rule.
void evaluate_polynomial(Simd, const double* powers, int degree, uint32_t n, float sign,
                         float* out);

}  // namespace deepreduce
#endif
