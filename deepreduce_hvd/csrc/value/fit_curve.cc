#include "value/fit_curve.h"

#include "value/fit_lanes.h"

namespace deepreduce {
namespace {

// The values decrease, up to an error of kUnsorted of a value plus kUnsortedTiny, and the chord is
// monotonic. So the ends of a block bound the distances within it. Only the few blocks that may
// contain the maximum are computed in full, and the one that does is computed once more to find the
// position. Both errors are four times the disorder that sort_sides leaves: the second is that of
// numbers below the normal ones, whose steps are 2^-149.
constexpr double kUnsorted = 1.0 / (1 << 16), kUnsortedTiny = 0x1p-142;

template <int width>
DR_INLINE void farthest(const float* y, uint32_t n, uint32_t fewest, Farthest& result) {
  using Doubles = Lanes<width>;
  constexpr uint32_t kBlock = 128;
  const Chord chord = chord_of(y, n);
  const double first = chord.first, gradient = chord.gradient;
  const Doubles base = Doubles(first), slope = Doubles(gradient), eight = Doubles(kLanes);
  const uint32_t end = n - fewest + 1;
  double sampled = 0.0;  // largest distance at the ends of blocks: a lower bound of the maximum
  for (uint32_t i = fewest; i < end; i += kBlock) {
    const double distance = chord_distance<double>(y[i], first, gradient, i);
    sampled = distance > sampled ? distance : sampled;
  }
  double best = 0.0;
  uint32_t best_block = fewest;
  for (uint32_t block = fewest; block < end; block += kBlock) {
    const uint32_t block_end = end - block < kBlock ? end : block + kBlock;
    const double high = y[block], low = y[block_end - 1], slack = kUnsorted * high + kUnsortedTiny;
    const double chord_start = first + gradient * block,
                 chord_end = first + gradient * (block_end - 1);
    const double above = high - chord_end + slack, below = chord_start - low + slack;
    if (above < sampled && below < sampled) continue;
    Doubles offset = Doubles::sequence(block, 1.0), most = Doubles(0.0);
    uint32_t i = block;
    for (; i + kLanes <= block_end; i += kLanes) {
      most = larger(chord_distance(Doubles::load(y + i), base, slope, offset), most);
      offset = offset + eight;
    }
    double lanes[kLanes], block_most = 0.0;
    most.copy_to(lanes);
    for (const double lane : lanes) block_most = lane > block_most ? lane : block_most;
    for (; i < block_end; ++i) {
      const double distance = chord_distance<double>(y[i], first, gradient, i);
      block_most = distance > block_most ? distance : block_most;
    }
    if (block_most > best) {
      best = block_most;
      best_block = block;
    }
  }
  uint32_t position = best_block;
  if (best > 0.0)
    while (chord_distance<double>(y[position], first, gradient, position) != best) ++position;
  result = {best, position};
}

template <int width, int degree>
DR_INLINE void moments_of(const float* y, uint32_t n, const double* beta, double* moments,
                          double* squares) {
  using Doubles = Lanes<width>;
  const Doubles inverse = Doubles(1.0 / n), step = Doubles(2.0 * kLanes);
  Doubles offset = Doubles::sequence(point_offset(0, n), 2.0);
  Doubles sums[degree + 1], square = Doubles(0.0);
  for (Doubles& sum : sums) sum = square;
  for (uint32_t i = 0; i < n; i += kLanes) {
    const Doubles value = Doubles::load(y + i, n - i);
    const Doubles x = offset * inverse;
    square = square + value * value;
    sums[0] = sums[0] + value;
    Doubles before = Doubles(1.0), now = x;
    for (int j = 1; j <= degree; ++j) {
      sums[j] = sums[j] + value * now;
      const Doubles next = next_gram(x, now, Doubles(beta[j]), before);
      before = now;
      now = next;
    }
    offset = offset + step;
  }
  for (int j = 0; j <= degree; ++j) moments[j] = sums[j].fold();
  *squares = square.fold();
}

template <int width, int degree>
DR_INLINE void evaluate_at_points(const double* powers, uint32_t n, float sign, float* out) {
  using Doubles = Lanes<width>;
  const Doubles inverse = Doubles(1.0 / n), step = Doubles(2.0 * kLanes), signs = Doubles(sign);
  Doubles offset = Doubles::sequence(point_offset(0, n), 2.0);
  for (uint32_t i = 0; i < n; i += kLanes) {
    const Doubles x = offset * inverse;
    Doubles value = Doubles(powers[degree]);
    for (int j = degree - 1; j >= 0; --j) value = horner(value, x, Doubles(powers[j]));
    to_value(value, signs).store(out + i, n - i);
    offset = offset + step;
  }
}

using MomentsOf = void (*)(const float*, uint32_t, const double*, double*, double*);
using EvaluateAtPoints = void (*)(const double*, uint32_t, float, float*);

// The kernels compiled for one SIMD level, and their tables by degree.
#define DR_KERNELS(level, width, target)                                                        \
  target void farthest_##level(const float* y, uint32_t n, uint32_t fewest, Farthest& result) { \
    farthest<width>(y, n, fewest, result);                                                      \
  }                                                                                             \
  template <int degree>                                                                         \
  target void moments_##level(const float* y, uint32_t n, const double* beta, double* moments,  \
                              double* squares) {                                                \
    moments_of<width, degree>(y, n, beta, moments, squares);                                    \
  }                                                                                             \
  template <int degree>                                                                         \
  target void evaluate_##level(const double* powers, uint32_t n, float sign, float* out) {      \
    evaluate_at_points<width, degree>(powers, n, sign, out);                                    \
  }                                                                                             \
  const MomentsOf moments_table_##level[] = {                                                   \
      moments_##level<0>, moments_##level<1>, moments_##level<2>, moments_##level<3>,           \
      moments_##level<4>, moments_##level<5>, moments_##level<6>, moments_##level<7>};          \
  const EvaluateAtPoints evaluate_table_##level[] = {                                           \
      evaluate_##level<0>, evaluate_##level<1>, evaluate_##level<2>, evaluate_##level<3>,       \
      evaluate_##level<4>, evaluate_##level<5>, evaluate_##level<6>, evaluate_##level<7>};

DR_KERNELS(scalar, kScalarWidth, )
#if defined(__x86_64__)
DR_KERNELS(avx2, kAvx2Width, DR_AVX2)
DR_KERNELS(avx512, kAvx512Width, DR_AVX512)
#endif

}  // namespace

Farthest farthest_from_chord(Simd simd, const float* y, uint32_t n, uint32_t fewest) {
  if (n < 2 * fewest) return {0.0, 0};
  Farthest result;
  DR_CHOOSE(simd, farthest)(y, n, fewest, result);
  return result;
}

double fit_moments(Simd simd, const float* y, uint32_t n, const Recurrence& recurrence,
                   double* moments) {
  double squares;
  DR_CHOOSE(simd, moments_table)[recurrence.degree](y, n, recurrence.beta, moments, &squares);
  return squares;
}

void evaluate_polynomial(Simd simd, const double* powers, int degree, uint32_t n, float sign,
                         float* out) {
  DR_CHOOSE(simd, evaluate_table)[degree](powers, n, sign, out);
}

}  // namespace deepreduce
