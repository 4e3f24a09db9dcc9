// FitDExp: each sign's sorted values as one double exponential.
#include <cmath>
#include <initializer_list>

#include "../exact_math.h"
#include "fit_lanes.h"

namespace deepreduce {
namespace {

constexpr double kLowest = -700.0, kHighest = 600.0;  // of an exponent: two float32 times e^600 are still finite
constexpr double kLowestRate = -1e6, kHighestRate = 300.0;
constexpr uint64_t kSectionBytes = 36;

double bits_a_value(const double*) { return 16; }

// Sums of products of `terms` columns with each other and with the values.
template <int width, int terms>
struct Sums {
  Lanes<width> lanes[terms * (terms + 1) / 2 + terms];
  DR_INLINE Sums() {
    for (Lanes<width>& each : lanes) each = Lanes<width>(0.0);
  }
  DR_INLINE void add(const Lanes<width> (&columns)[terms], const Lanes<width>& z) {
    int at = 0;
    for (int row = 0; row < terms; ++row) {
      for (int column = 0; column <= row; ++column, ++at) lanes[at] = lanes[at] + columns[row] * columns[column];
      lanes[at] = lanes[at] + columns[row] * z;
      ++at;
    }
  }
  // Least squares on the columns from `first` on, by elimination with the largest pivot; false when singular.
  DR_INLINE bool solve(int first, double* result) const {
    const int size = terms - first;
    double rows[terms][terms + 1];
    for (int row = first; row < terms; ++row) {
      const int start = row * (row + 1) / 2 + row;
      for (int column = first; column <= row; ++column)
        rows[row - first][column - first] = rows[column - first][row - first] = lanes[start + column].fold();
      rows[row - first][size] = lanes[start + row + 1].fold();
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
      finite &= std::isfinite(result[i]);
    }
    return finite;
  }
};

// a e^(b x) + c e^(d x)
struct Curve {
  float a, b, c, d;
};

double step_of(uint32_t n) { return n > 1 ? 1.0 / (n - 1) : 0.0; }

template <int width>
DR_INLINE Lanes<width> exponential(double rate, const Lanes<width>& x) {
  using Doubles = Lanes<width>;
  return exact_exp(Doubles::smaller(Doubles::larger(Doubles(rate) * x, Doubles(kLowest)), Doubles(kHighest)));
}

template <int width>
DR_INLINE Lanes<width> height(const Curve& curve, const Lanes<width>& x) {
  return Lanes<width>(curve.a) * exponential(curve.b, x) + Lanes<width>(curve.c) * exponential(curve.d, x);
}

// The points of [0, 1] from the i-th on.
template <int width>
DR_INLINE Lanes<width> points_from(uint32_t i, double step) {
  return Lanes<width>::sequence(i, 1.0) * Lanes<width>(step);
}

// Ones, and zeros in the lanes beyond the end.
template <int width>
DR_INLINE Lanes<width> ones(uint32_t left) {
  double each[kLanes];
  for (uint32_t lane = 0; lane < kLanes; ++lane) each[lane] = lane < left ? 1.0 : 0.0;
  return Lanes<width>::from_doubles(each);
}

template <int width>
DR_INLINE void evaluate(const Curve& curve, uint32_t n, float sign, float* out) {
  const double step = step_of(n);
  for (uint32_t i = 0; i < n; i += kLanes)
    height(curve, points_from<width>(i, step)).to_values(Lanes<width>(sign)).store(out + i, n - i);
}

// The factors a and c for `count` rates, by least squares on y * scale; false when there are none within float32.
template <int width, int count>
DR_INLINE bool with_factors(const double* rates, const float* y, uint32_t n, double scale, Curve& curve) {
  constexpr double largest = std::numeric_limits<float>::max();
  float rounded[2] = {};
  for (int i = 0; i < count; ++i) {
    if (!(rates[i] >= kLowestRate && rates[i] <= kHighestRate)) return false;
    rounded[i] = static_cast<float>(rates[i]);
  }
  const double step = step_of(n);
  Sums<width, count> sums;
  for (uint32_t i = 0; i < n; i += kLanes) {
    const Lanes<width> x = points_from<width>(i, step), inside = ones<width>(n - i);
    Lanes<width> columns[count];
    for (int j = 0; j < count; ++j) columns[j] = exponential(rounded[j], x) * inside;
    sums.add(columns, Lanes<width>::load(y + i, n - i) * Lanes<width>(scale));
  }
  double factors[2] = {};
  if (!sums.solve(0, factors)) return false;
  if (!(std::fabs(factors[0]) <= largest && std::fabs(factors[1]) <= largest)) return false;
  curve = {static_cast<float>(factors[0]), rounded[0], static_cast<float>(factors[1]), rounded[1]};
  return true;
}

// Keeps `curve` as the best when its squared error is the smallest so far.
template <int width>
DR_INLINE void compete(const Curve& curve, const float* y, uint32_t n, double scale, Curve& best, double& least) {
  const double step = step_of(n);
  Lanes<width> sum(0.0);
  for (uint32_t i = 0; i < n; i += kLanes) {
    const Lanes<width> heights = height(curve, points_from<width>(i, step)) * ones<width>(n - i);
    const Lanes<width> difference = heights - Lanes<width>::load(y + i, n - i) * Lanes<width>(scale);
    sum = sum + difference * difference;
  }
  const double error = sum.fold();
  if (!(error < least)) return;
  best = curve;
  least = error;
}

// Sums with the columns SS, x, S and 1: S and SS are the first and second cumulative trapezoid integrals.
template <int width>
DR_INLINE void integrate(const float* y, uint32_t n, double scale, Sums<width, 4>& sums) {
  const double step = step_of(n), half = 0.5 * step;
  double first = 0.0, second = 0.0, last = y[0] * scale;
  for (uint32_t i = 0; i < n; i += kLanes) {
    double firsts[kLanes] = {}, seconds[kLanes] = {};
    for (uint32_t lane = 0; lane < kLanes && i + lane < n; ++lane) {
      const double z = y[i + lane] * scale, before = first;
      if (i + lane > 0) {
        first = first + (z + last) * half;
        second = second + (first + before) * half;
      }
      last = z;
      firsts[lane] = first;
      seconds[lane] = second;
    }
    const Lanes<width> inside = ones<width>(n - i);
    sums.add({Lanes<width>::from_doubles(seconds), points_from<width>(i, step) * inside, Lanes<width>::from_doubles(firsts), inside},
             Lanes<width>::load(y + i, n - i) * Lanes<width>(scale));
  }
}

// Jacquelin's integral equations; a single exponential and a constant compete. The smallest squared error wins.
template <int width>
DR_INLINE void fit_side(const float* y, uint32_t n, Curve& best) {
  best = Curve{};
  if (n == 0) return;
  int exponent;
  std::frexp(static_cast<double>(y[0]), &exponent);
  const double scale = std::ldexp(1.0, -exponent);
  Sums<width, 4> sums;
  integrate(y, n, scale, sums);
  double least = std::numeric_limits<double>::infinity(), solution[4];
  Curve curve;
  const double constant[1] = {0.0};
  if (with_factors<width, 1>(constant, y, n, scale, curve)) compete<width>(curve, y, n, scale, best, least);
  if (sums.solve(2, solution) && with_factors<width, 1>(solution, y, n, scale, curve))
    compete<width>(curve, y, n, scale, best, least);
  if (n >= 4 && sums.solve(0, solution)) {
    const double discriminant = solution[2] * solution[2] + 4.0 * solution[0];
    if (discriminant > 0.0) {
      const double root = std::sqrt(discriminant);
      const double rates[2] = {0.5 * (solution[2] + root), 0.5 * (solution[2] - root)};
      if (with_factors<width, 2>(rates, y, n, scale, curve)) compete<width>(curve, y, n, scale, best, least);
    }
  }
  for (float* factor : {&best.a, &best.c}) {
    constexpr double largest = std::numeric_limits<float>::max();
    const double scaled = std::ldexp(static_cast<double>(*factor), exponent);
    *factor = static_cast<float>(scaled < -largest ? -largest : scaled > largest ? largest : scaled);
  }
}

#define DR_KERNELS(level, width, target)                                                              \
  target void evaluate_##level(const Curve& curve, uint32_t n, float sign, float* out) {              \
    evaluate<width>(curve, n, sign, out);                                                             \
  }                                                                                                   \
  target void fit_side_##level(const float* y, uint32_t n, Curve& best) { fit_side<width>(y, n, best); }

DR_KERNELS(scalar, kScalarWidth, )
#if defined(__x86_64__)
DR_KERNELS(avx2, kAvx2Width, DR_AVX2)
DR_KERNELS(avx512, kAvx512Width, DR_AVX512)
#endif

void evaluate_sides(Simd simd, const Curve (&curves)[2], uint32_t positives, uint32_t count, float* out) {
  DR_CHOOSE(simd, evaluate)(curves[0], positives, 1.0f, out);
  DR_CHOOSE(simd, evaluate)(curves[1], count - positives, -1.0f, out + positives);
}

void encode(Context& context, ValueEncoding& encoding, ByteWriter& section) {
  if (encoding.count == 0) return;
  const SortedSides sorted = sort_sides(context, encoding.values, encoding.count, encoding.order);
  Curve curves[2];
  for (int s = 0; s < 2; ++s) DR_CHOOSE(context.simd, fit_side)(sorted.side(s), sorted.counts[s], curves[s]);
  section.put(sorted.counts[0]);
  section.put_bytes(curves, sizeof(curves));
  evaluate_sides(context.simd, curves, sorted.counts[0], encoding.count, sorted.magnitudes);  // in place: they are fitted
  restore_order(sorted.magnitudes, encoding.order, encoding.count, encoding.decoded);
}

void decode(Context& context, ByteReader& section, uint32_t count, float* values) {
  static_assert(sizeof(Curve) == 16, "four coefficients");
  if (count == 0) return section.expect_end();
  if (section.remaining() != kSectionBytes)
    corrupt_payload("%s: expected %llu bytes, got %llu", section.section(), static_cast<unsigned long long>(kSectionBytes),
                    static_cast<unsigned long long>(section.remaining()));
  const uint32_t positives = section.get<uint32_t>();
  if (positives > count) corrupt_payload("%s: expected at most %u positive values, got %u", section.section(), count, positives);
  static const uint8_t zeros[sizeof(Curve)] = {};
  Curve curves[2];
  for (int s = 0; s < 2; ++s) {
    const uint8_t* raw = section.take(sizeof(Curve));
    std::memcpy(&curves[s], raw, sizeof(Curve));
    const Curve& curve = curves[s];
    if (!(std::isfinite(curve.a) && std::isfinite(curve.b) && std::isfinite(curve.c) && std::isfinite(curve.d)))
      corrupt_payload("%s: expected finite coefficients", section.section());
    if ((s == 0 ? positives : count - positives) == 0 && std::memcmp(raw, zeros, sizeof(zeros)) != 0)
      corrupt_payload("%s: expected coefficients of 0 for a sign without values", section.section());
  }
  evaluate_sides(context.simd, curves, positives, count, values);
}

}  // namespace

extern const ValueCodec fit_dexp_codec;
const ValueCodec fit_dexp_codec = {kFitDExp, "FitDExp", true, bits_a_value, encode, decode};

}  // namespace deepreduce
