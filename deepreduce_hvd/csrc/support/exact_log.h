// A natural logarithm made of basic operations, so it is the same on every machine. The C library's
// is not.
#ifndef DEEPREDUCE_EXACT_LOG_H
#define DEEPREDUCE_EXACT_LOG_H

#include <cmath>

#include "support/host_device.h"

namespace deepreduce {

constexpr double kLn2 = 0.6931471805599453;

// For normal positive x; the error is a few units in the last place. The Python equivalent is
// deepreduce_hvd/numerics/exact_log.py.
DR_HOST_DEVICE inline double exact_log(double x) {
  int exponent;
  double fraction = std::frexp(x, &exponent);  // exact; in [0.5, 1)
  if (fraction < 0.7071067811865476) {
    fraction *= 2;
    --exponent;
  }
  // log f = 2 artanh((f - 1) / (f + 1)), |argument| < 0.172
  const double s = (fraction - 1) / (fraction + 1);
  const double square = s * s;
  double series = 0;
  for (int power = 21; power >= 1; power -= 2) series = series * square + 1.0 / power;
  return exponent * kLn2 + 2 * s * series;
}

}  // namespace deepreduce
#endif
