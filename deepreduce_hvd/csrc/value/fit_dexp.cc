// FitDExp: fits the sorted values of each sign by one double exponential.
#include <limits>

#include "value/dexp_element.h"
#include "value/fit_lanes.h"

namespace deepreduce {
namespace {

double bits_per_value(const double*) { return 16; }

// The sums of products of `terms` columns with each other and with the values.
template <int width, int terms>
struct Sums {
  Lanes<width> lanes[sums_of(terms)];
  DR_INLINE Sums() {
    for (Lanes<width>& each : lanes) each = Lanes<width>(0.0);
  }
  DR_INLINE void add(const Lanes<width> (&columns)[terms], const Lanes<width>& z) {
    int at = 0;
    for (int row = 0; row < terms; ++row) {
      for (int column = 0; column <= row; ++column, ++at)
        lanes[at] = lanes[at] + columns[row] * columns[column];
      lanes[at] = lanes[at] + columns[row] * z;
      ++at;
    }
  }
  DR_INLINE void fold(double* sums) const {
    for (int i = 0; i < sums_of(terms); ++i) sums[i] = lanes[i].fold();
  }
};

// Returns the points of [0, 1] from the i-th on.
template <int width>
DR_INLINE Lanes<width> points_from(uint32_t i, double step) {
  return Lanes<width>::sequence(i, 1.0) * Lanes<width>(step);
}

// Returns ones, with zeros in the lanes after the end.
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
    to_value(height(curve, points_from<width>(i, step)), Lanes<width>(sign)).store(out + i, n - i);
}

// Computes the factors a and c for `count` rates, by least squares on y * scale. Returns false if
// there are none within float32.
template <int width, int count>
DR_INLINE bool with_factors(const double* rates, const float* y, uint32_t n, double scale,
                            Curve& curve) {
  float rounded[2];
  if (!round_rates<count>(rates, rounded)) return false;
  const double step = step_of(n);
  Sums<width, count> sums;
  for (uint32_t i = 0; i < n; i += kLanes) {
    const Lanes<width> x = points_from<width>(i, step), inside = ones<width>(n - i);
    Lanes<width> columns[count];
    for (int j = 0; j < count; ++j) columns[j] = exponential(rounded[j], x) * inside;
    sums.add(columns, Lanes<width>::load(y + i, n - i) * Lanes<width>(scale));
  }
  double folded[sums_of(count)];
  sums.fold(folded);
  return curve_of<count>(folded, rounded, curve);
}

// Stores `curve` as the best if its squared error is the smallest so far.
template <int width>
DR_INLINE void compete(const Curve& curve, const float* y, uint32_t n, double scale, Curve& best,
                       double& least) {
  const double step = step_of(n);
  Lanes<width> sum(0.0);
  for (uint32_t i = 0; i < n; i += kLanes) {
    const Lanes<width> heights = height(curve, points_from<width>(i, step)) * ones<width>(n - i);
    const Lanes<width> difference =
        heights - Lanes<width>::load(y + i, n - i) * Lanes<width>(scale);
    sum = sum + difference * difference;
  }
  const double error = sum.fold();
  if (!(error < least)) return;
  best = curve;
  least = error;
}

// Computes the sums with the columns SS, x, S and 1. S and SS are the first and second cumulative
// integrals by the trapezoidal rule.
template <int width>
DR_INLINE void integrate(const float* y, uint32_t n, double scale, Sums<width, 4>& sums) {
  const double step = step_of(n), half = 0.5 * step;
  double first = 0.0, second = 0.0, last = y[0] * scale;
  for (uint32_t i = 0; i < n; i += kLanes) {
    double firsts[kLanes] = {}, seconds[kLanes] = {};
    for (uint32_t lane = 0; lane < kLanes && i + lane < n; ++lane) {
      const double z = y[i + lane] * scale, before = first;
      if (i + lane > 0) {
        first = first + trapezoid(z, last, half);
        second = second + trapezoid(first, before, half);
      }
      last = z;
      firsts[lane] = first;
      seconds[lane] = second;
    }
    const Lanes<width> inside = ones<width>(n - i);
    sums.add({Lanes<width>::from_doubles(seconds), points_from<width>(i, step) * inside,
              Lanes<width>::from_doubles(firsts), inside},
             Lanes<width>::load(y + i, n - i) * Lanes<width>(scale));
  }
}

// Fits by Jacquelin's integral equations. A single exponential and a constant compete with the
// double exponential; the smallest squared error wins.
template <int width>
DR_INLINE void fit_side(const float* y, uint32_t n, Curve& best) {
  best = Curve{};
  if (n == 0) return;
  const int exponent = scale_exponent(y[0]);
  const double scale = std::ldexp(1.0, -exponent);
  Sums<width, 4> sums;
  integrate(y, n, scale, sums);
  double folded[sums_of(4)];
  sums.fold(folded);
  double least = std::numeric_limits<double>::infinity(), solution[4], rates[2];
  Curve curve;
  const double constant[1] = {0.0};
  if (with_factors<width, 1>(constant, y, n, scale, curve))
    compete<width>(curve, y, n, scale, best, least);
  if (solve<4>(folded, 2, solution) && with_factors<width, 1>(solution, y, n, scale, curve))
    compete<width>(curve, y, n, scale, best, least);
  if (n >= 4 && solve<4>(folded, 0, solution) && two_rates(solution, rates) &&
      with_factors<width, 2>(rates, y, n, scale, curve))
    compete<width>(curve, y, n, scale, best, least);
  best.a = unscaled(best.a, exponent);
  best.c = unscaled(best.c, exponent);
}

#define DR_KERNELS(level, width, target)                                                 \
  target void evaluate_##level(const Curve& curve, uint32_t n, float sign, float* out) { \
    evaluate<width>(curve, n, sign, out);                                                \
  }                                                                                      \
  target void fit_side_##level(const float* y, uint32_t n, Curve& best) {                \
    fit_side<width>(y, n, best);                                                         \
  }

DR_KERNELS(scalar, kScalarWidth, )
#if defined(__x86_64__)
DR_KERNELS(avx2, kAvx2Width, DR_AVX2)
DR_KERNELS(avx512, kAvx512Width, DR_AVX512)
#endif

void evaluate_sides(Simd simd, const Curve (&curves)[2], uint32_t positives, uint32_t count,
                    float* out) {
  DR_CHOOSE(simd, evaluate)(curves[0], positives, 1.0f, out);
  DR_CHOOSE(simd, evaluate)(curves[1], count - positives, -1.0f, out + positives);
}

void encode(Context& context, ValueEncoding& encoding, ByteWriter& section) {
  if (encoding.count == 0) return;
  const SortedSides sorted = sort_sides(context, encoding.values, encoding.count, encoding.order);
  Curve curves[2];
  for (int s = 0; s < 2; ++s)
    DR_CHOOSE(context.simd, fit_side)(sorted.side(s), sorted.counts[s], curves[s]);
  section.put(sorted.counts[0]);
  section.put_bytes(curves, sizeof(curves));
  // in place, because the fit is done
  evaluate_sides(context.simd, curves, sorted.counts[0], encoding.count, sorted.magnitudes);
  restore_order(sorted.magnitudes, encoding.order, encoding.count, encoding.decoded);
}

void decode(Context& context, ByteReader& section, uint32_t count, float* values) {
  if (count == 0) return section.expect_end();
  if (section.remaining() != kDExpBytes)
    corrupt_payload("%s: expected %llu bytes, got %llu", section.section(),
                    static_cast<unsigned long long>(kDExpBytes),
                    static_cast<unsigned long long>(section.remaining()));
  const uint32_t positives = section.get<uint32_t>();
  if (positives > count)
    corrupt_payload("%s: expected at most %u positive values, got %u", section.section(), count,
                    positives);
  static const uint8_t zeros[sizeof(Curve)] = {};
  Curve curves[2];
  for (int s = 0; s < 2; ++s) {
    const uint8_t* raw = section.take(sizeof(Curve));
    std::memcpy(&curves[s], raw, sizeof(Curve));
    if (!is_finite(curves[s]))
      corrupt_payload("%s: expected finite coefficients, got %g, %g, %g and %g", section.section(),
                      static_cast<double>(curves[s].a), static_cast<double>(curves[s].b),
                      static_cast<double>(curves[s].c), static_cast<double>(curves[s].d));
    if ((s == 0 ? positives : count - positives) == 0 &&
        std::memcmp(raw, zeros, sizeof(zeros)) != 0)
      corrupt_payload(
          "%s: expected coefficients of 0 for a sign without values, got %g, %g, %g and %g",
          section.section(), static_cast<double>(curves[s].a), static_cast<double>(curves[s].b),
          static_cast<double>(curves[s].c), static_cast<double>(curves[s].d));
  }
  evaluate_sides(context.simd, curves, positives, count, values);
}

}  // namespace

extern const ValueCodec fit_dexp_codec;
const ValueCodec fit_dexp_codec = {kFitDExp, "FitDExp", true, bits_per_value, encode, decode};

}  // namespace deepreduce
