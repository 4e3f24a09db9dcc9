// FitDExp's formulas for one point and one side, shared by host and device. Number is double or
// Lanes.
#ifndef DEEPREDUCE_VALUE_DEXP_ELEMENT_H
#define DEEPREDUCE_VALUE_DEXP_ELEMENT_H

#include "support/exact_math.h"
#include "value/fit_element.h"

namespace deepreduce {

constexpr uint64_t kDExpBytes = 36;

// a e^(b x) + c e^(d x)
struct Curve {
  float a, b, c, d;
};
static_assert(sizeof(Curve) == 16, "four coefficients");

DR_ELEMENT bool is_finite(double x) { return std::fabs(x) <= DBL_MAX; }
DR_HOST_DEVICE inline bool is_finite(const Curve& curve) {
  return is_finite(curve.a) && is_finite(curve.b) && is_finite(curve.c) && is_finite(curve.d);
}

// Returns the distance of points: the i-th of n points is i times this.
DR_HOST_DEVICE inline double step_of(uint32_t n) { return n > 1 ? 1.0 / (n - 1) : 0.0; }

// Returns e^(rate x). The exponent is clamped so that a float32 times the result is finite.
template <class Number>
DR_ELEMENT Number exponential(double rate, const Number& x) {
  return exact_exp(smaller(larger(Number(rate) * x, Number(-700.0)), Number(600.0)));
}
template <class Number>
DR_ELEMENT Number height(const Curve& curve, const Number& x) {
  return Number(curve.a) * exponential(curve.b, x) + Number(curve.c) * exponential(curve.d, x);
}

// One step of a cumulative integral by the trapezoidal rule.
template <class Number>
DR_ELEMENT Number trapezoid(const Number& now, const Number& before, const Number& half_step) {
  return (now + before) * half_step;
}

// Number of sums of products of `terms` columns with each other and with the values. They are
// stored by row: row r has the products with column 0 ... column r, and with the values.
DR_HOST_DEVICE constexpr int sums_of(int terms) { return terms * (terms + 1) / 2 + terms; }

// Solves least squares on the columns from `first` on, by elimination with the largest pivot.
// Returns false if singular.
template <int terms>
DR_HOST_DEVICE inline bool solve(const double* sums, int first, double* result) {
  const int size = terms - first;
  double rows[terms][terms + 1];
  for (int row = first; row < terms; ++row) {
    const int start = row * (row + 1) / 2 + row;
    for (int column = first; column <= row; ++column)
      rows[row - first][column - first] = rows[column - first][row - first] = sums[start + column];
    rows[row - first][size] = sums[start + row + 1];
  }
  for (int column = 0; column < size; ++column) {
    int pivot = column;
    for (int i = column + 1; i < size; ++i)
      if (std::fabs(rows[i][column]) > std::fabs(rows[pivot][column])) pivot = i;
    for (int j = 0; j <= size; ++j) {
      const double other = rows[column][j];
      rows[column][j] = rows[pivot][j];
      rows[pivot][j] = other;
    }
    if (!(std::fabs(rows[column][column]) > 1e-300)) return false;
    for (int i = column + 1; i < size; ++i) {
      const double factor = rows[i][column] / rows[column][column];
      for (int j = column; j <= size; ++j) rows[i][j] = rows[i][j] - factor * rows[column][j];
    }
  }
  bool finite = true;
  for (int i = size - 1; i >= 0; --i) {
    double value = rows[i][size];
    for (int j = i + 1; j < size; ++j) value = value - rows[i][j] * result[j];
    result[i] = value / rows[i][i];
    finite = finite && is_finite(result[i]);
  }
  return finite;
}

// Rounds rates to the format that is sent; returns false if they are out of range.
template <int count>
DR_HOST_DEVICE inline bool round_rates(const double* rates, float (&rounded)[2]) {
  rounded[0] = rounded[1] = 0.0f;
  for (int i = 0; i < count; ++i) {
    if (!(rates[i] >= -1e6 && rates[i] <= 300.0)) return false;
    rounded[i] = static_cast<float>(rates[i]);
  }
  return true;
}

// Makes the curve of `count` rates whose factors solve the sums. Returns false if there is none
// within float32.
template <int count>
DR_HOST_DEVICE inline bool curve_of(const double* sums, const float (&rates)[2], Curve& curve) {
  double factors[2] = {};
  if (!solve<count>(sums, 0, factors)) return false;
  if (!(std::fabs(factors[0]) <= FLT_MAX && std::fabs(factors[1]) <= FLT_MAX)) return false;
  curve = {static_cast<float>(factors[0]), rates[0], static_cast<float>(factors[1]), rates[1]};
  return true;
}

// Computes the two rates from the solution of Jacquelin's integral equation. Returns false if they
// are not real.
DR_HOST_DEVICE inline bool two_rates(const double* solution, double* rates) {
  const double discriminant = solution[2] * solution[2] + 4.0 * solution[0];
  if (!(discriminant > 0.0)) return false;
  const double root = std::sqrt(discriminant);
  rates[0] = 0.5 * (solution[2] + root);
  rates[1] = 0.5 * (solution[2] - root);
  return true;
}

// Values are scaled by 2^-exponent of the largest before the fit, so that squares stay in range.
// `unscaled` undoes this, clamped to float32.
DR_HOST_DEVICE inline int scale_exponent(float largest_value) {
  int exponent;
  std::frexp(static_cast<double>(largest_value), &exponent);
  return exponent;
}
DR_HOST_DEVICE inline float unscaled(float factor, int exponent) {
  const double scaled = std::ldexp(static_cast<double>(factor), exponent), most = FLT_MAX;
  return static_cast<float>(smaller(larger(scaled, -most), most));
}

}  // namespace deepreduce
#endif
