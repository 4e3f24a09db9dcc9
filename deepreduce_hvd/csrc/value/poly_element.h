// FitPoly's formulas for one point and one segment, shared by host and device. Number is double or
// Lanes.
#ifndef DEEPREDUCE_VALUE_POLY_ELEMENT_H
#define DEEPREDUCE_VALUE_POLY_ELEMENT_H

#include "base.h"
#include "support/bits.h"
#include "value/fit_element.h"

namespace deepreduce {

constexpr int kMaxDegree = 7;
constexpr uint32_t kMaxSegments = 1024;  // per side
constexpr int kLowestExponent = -152, kHighestExponent = 160;
constexpr unsigned kMaxWidth = 32;  // bits of a field
constexpr uint64_t kPolyHead = 14;  // bytes before the widths

// Whether a section may have these fields, of a side of `count` values.
DR_HOST_DEVICE inline bool poly_degree_is_valid(int degree) {
  return degree >= 1 && degree <= kMaxDegree;
}
DR_HOST_DEVICE inline bool poly_segments_are_valid(uint32_t segments, uint32_t count) {
  return segments <= smaller(count, kMaxSegments) && (segments == 0) == (count == 0);
}
DR_HOST_DEVICE inline bool poly_exponent_is_valid(int exponent, uint32_t count) {
  return count == 0 ? exponent == 0 : exponent >= kLowestExponent && exponent <= kHighestExponent;
}

struct PolySettings {
  int degree;
  uint32_t segments;  // per side; 0: chosen by the values
};
inline PolySettings poly_settings(const double* parameters) {
  const int degree = static_cast<int>(parameters[0]);
  const double segments = parameters[1];
  if (!(parameters[0] >= 1 && parameters[0] <= kMaxDegree) || parameters[0] != degree)
    invalid_argument("FitPoly degree: expected 1 to %d, got %g", kMaxDegree, parameters[0]);
  if (!(segments >= 0 && segments <= kMaxSegments) || segments != std::floor(segments))
    invalid_argument("FitPoly segments: expected 0 (by the values) to %u, got %g", kMaxSegments,
                     segments);
  return {degree, static_cast<uint32_t>(segments)};
}

// Returns the paper's p = ceil(2 sqrt(M)), with M in units of the mean gap. At most sqrt(n), and at
// most n / 4 per coefficient.
DR_HOST_DEVICE inline uint32_t choose_segments(const float* y, uint32_t n, int degree) {
  const double root = std::floor(std::sqrt(static_cast<double>(n))),
               for_terms = n / (4 * static_cast<uint32_t>(degree + 1));
  const double most = smaller(smaller(root, for_terms), static_cast<double>(kMaxSegments));
  // values that were not sorted to the last bit may even increase
  if (most < 2.0 || y[0] <= y[n - 1]) return 1;
  const double first = y[0], second = y[1], before_last = y[n - 2], last = y[n - 1];
  const double mean_gap = (first - last) / (n - 1);
  const double p = smaller(
      std::ceil(2.0 * std::sqrt(std::fabs((first - second) - (before_last - last)) / mean_gap)),
      most);
  return p < 1.0 ? 1 : static_cast<uint32_t>(p);
}

// The chord from a segment's first point to its last.
struct Chord {
  double first, gradient;
};
DR_HOST_DEVICE inline Chord chord_of(const float* y, uint32_t n) {
  const double first = y[0];
  return {first, (static_cast<double>(y[n - 1]) - first) / (n - 1)};
}
// Returns the distance of a point's value from the chord; offset: position of the point in the
// segment.
template <class Number>
DR_ELEMENT Number chord_distance(const Number& value, const Number& first, const Number& gradient,
                                 const Number& offset) {
  return absolute(value - (first + gradient * offset));
}

// Monic Gram polynomials on n equally spaced points x_i = (2i - (n - 1)) / n: P_{j+1} = x P_j -
// beta_j P_{j-1}.
struct Recurrence {
  int degree;  // usable degree: at most n - 1
  double beta[kMaxDegree + 1];
  double norm[kMaxDegree + 1];  // square root of the sum of P_j^2
};
DR_HOST_DEVICE inline Recurrence recurrence_of(uint32_t n, int degree) {
  Recurrence result{};
  result.degree = static_cast<uint32_t>(degree) < n ? degree : static_cast<int>(n) - 1;
  const double points = n;
  double squared_norm = points;
  result.norm[0] = std::sqrt(squared_norm);
  for (int j = 1; j <= result.degree; ++j) {
    const double square = static_cast<double>(j * j);
    result.beta[j] = square * (1.0 - square / (points * points)) / (4.0 * square - 1.0);
    squared_norm = squared_norm * result.beta[j];
    result.norm[j] = std::sqrt(squared_norm);
  }
  return result;
}
template <class Number>
DR_ELEMENT Number next_gram(const Number& x, const Number& now, const Number& beta,
                            const Number& before) {
  return x * now - beta * before;
}

// Returns 2 i - (n - 1); x_i is this times 1 / n.
DR_HOST_DEVICE inline double point_offset(uint32_t i, uint32_t n) {
  return -static_cast<double>(n - 1) + 2.0 * i;
}

// powers[i] = the coefficient of x^i in sum_j monic[j] P_j(x), for i, j <= recurrence.degree.
DR_HOST_DEVICE inline void expand_in_powers(const double* monic, const Recurrence& recurrence,
                                            double* powers) {
  double before[kMaxDegree + 1] = {}, now[kMaxDegree + 1] = {1.0};
  for (int i = 0; i <= recurrence.degree; ++i) powers[i] = 0.0;
  for (int j = 0; j <= recurrence.degree; ++j) {
    double next[kMaxDegree + 1] = {};
    for (int i = 0; i <= recurrence.degree; ++i) {
      powers[i] = powers[i] + monic[j] * now[i];
      next[i] = (i == 0 ? 0.0 : now[i - 1]) - recurrence.beta[j] * before[i];
    }
    for (int i = 0; i <= kMaxDegree; ++i) {
      before[i] = now[i];
      now[i] = next[i];
    }
  }
}

// Computes the powers for a segment's coefficients (degree + 1,); returns the usable degree.
DR_HOST_DEVICE inline int segment_powers(const int64_t* coefficients, int exponent, uint32_t n,
                                         int degree, double* powers) {
  const Recurrence recurrence = recurrence_of(n, degree);
  double monic[kMaxDegree + 1];
  for (int j = 0; j <= recurrence.degree; ++j)
    monic[j] = std::ldexp(static_cast<double>(coefficients[j]), exponent) / recurrence.norm[j];
  expand_in_powers(monic, recurrence, powers);
  return recurrence.degree;
}
// One step of Horner's rule.
template <class Number>
DR_ELEMENT Number horner(const Number& value, const Number& x, const Number& power) {
  return value * x + power;
}

// Returns floor(log2(sqrt(x))) for x > 0.
DR_HOST_DEVICE inline int half_exponent(double x) {
  int exponent;
  std::frexp(x, &exponent);
  return (exponent - 1) >> 1;
}

// Returns the step of a side's coefficients, as an exponent of 2. `total` is the sum of squares,
// `fitted` the part of it that the fit explains.
DR_HOST_DEVICE inline int side_exponent(double total, double fitted, uint32_t total_terms) {
  if (!(total > 0.0)) return 0;
  // in an orthonormal basis, rounding adds at most terms * step^2 / 4 to the squared error; the
  // step keeps this within 0.1 % of the smallest error
  const int finest = larger(half_exponent(total) - 26, kLowestExponent);
  const double rest = 0.008 * (total - fitted) / total_terms;
  return rest > 0.0 ? larger(half_exponent(rest), finest) : finest;
}
DR_HOST_DEVICE inline int64_t quantized(double fit, int exponent) {
  return static_cast<int64_t>(std::nearbyint(std::ldexp(fit, -exponent)));
}

// Widths of fields. The sign of a coefficient needs one bit; a column of zeros needs none.
DR_HOST_DEVICE inline uint64_t bits_without_sign(int64_t coefficient) {
  return static_cast<uint64_t>(coefficient < 0 ? ~coefficient : coefficient);
}
DR_HOST_DEVICE inline unsigned column_width(bool used, uint64_t magnitudes) {
  return used ? bit_length(magnitudes) + 1 : 0;
}
DR_HOST_DEVICE inline uint32_t field_of(int64_t coefficient, unsigned width) {
  return static_cast<uint32_t>(static_cast<uint64_t>(coefficient) & ((uint64_t{1} << width) - 1));
}
DR_HOST_DEVICE inline int64_t coefficient_of(uint32_t field, unsigned width) {
  const int64_t sign = (int64_t{1} << width) >> 1;
  return (int64_t{field} ^ sign) - sign;
}

}  // namespace deepreduce
#endif
