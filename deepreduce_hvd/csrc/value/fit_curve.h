// The numeric kernels of FitPoly: chord distances, orthogonal fits, evaluation. The same bits at every SIMD level.
#ifndef DEEPREDUCE_VALUE_FIT_CURVE_H
#define DEEPREDUCE_VALUE_FIT_CURVE_H

#include "fit_sides.h"

namespace deepreduce {

constexpr int kMaxDegree = 7;

// The point farthest from its segment's chord.
struct Farthest {
  double distance;
  uint32_t position;  // from the segment's start
};

// Monic Gram polynomials on n equally spaced points x_i = (2i - (n - 1)) / n: P_{j+1} = x P_j - beta_j P_{j-1}.
struct Recurrence {
  int degree;  // usable: at most n - 1
  double beta[kMaxDegree + 1];
  double norm[kMaxDegree + 1];  // the square root of the sum of P_j^2
};
Recurrence recurrence_of(uint32_t n, int degree);

// The first of the points of y (n,) farthest from the chord of the first and last, among those with `fewest` or more points
// before and from them on; distance 0 when there is none.
Farthest farthest_from_chord(Simd, const float* y, uint32_t n, uint32_t fewest);

// moments[j] = sum of y P_j for j <= recurrence.degree; returns the sum of y^2.
double fit_moments(Simd, const float* y, uint32_t n, const Recurrence&, double* moments);

// powers[i] = the coefficient of x^i in sum_j monic[j] P_j(x), for i, j <= recurrence.degree.
void expand_in_powers(const double* monic, const Recurrence&, double* powers);

// out[i] = the value of `sign` of the polynomial at x_i, by Horner's rule.
void evaluate_polynomial(Simd, const double* powers, int degree, uint32_t n, float sign, float* out);

}  // namespace deepreduce
#endif
