// The numeric kernels of FitPoly: chord distances, orthogonal fits, evaluation. The same bits at
// every SIMD level.
#ifndef DEEPREDUCE_VALUE_FIT_CURVE_H
#define DEEPREDUCE_VALUE_FIT_CURVE_H

#include "fit_sides.h"
#include "poly_element.h"

namespace deepreduce {

// The point farthest from its segment's chord.
struct Farthest {
  double distance;
  uint32_t position;  // from the segment's start
};

// The first of the points of y (n,) farthest from the chord of the first and last, among those with
// `fewest` or more points before and from them on; distance 0 when there is none.
Farthest farthest_from_chord(Simd, const float* y, uint32_t n, uint32_t fewest);

// moments[j] = sum of y P_j for j <= recurrence.degree; returns the sum of y^2.
double fit_moments(Simd, const float* y, uint32_t n, const Recurrence&, double* moments);

// out[i] = the value of `sign` of the polynomial at x_i, by Horner's rule.
void evaluate_polynomial(Simd, const double* powers, int degree, uint32_t n, float sign,
                         float* out);

}  // namespace deepreduce
#endif
