// Functions made of IEEE basic operations in a fixed order: the same bits on every processor. The
// Python equivalent is deepreduce_hvd/numerics/exact_math.py.
#ifndef DEEPREDUCE_EXACT_MATH_H
#define DEEPREDUCE_EXACT_MATH_H

#include <cstdint>
#include <cstring>

#include "support/host_device.h"

namespace deepreduce {

// Returns 2^n, where `shifted` is n + 1.5 * 2^52.
DR_HOST_DEVICE inline double power_of_two(const double& shifted) {
  uint64_t bits;
  std::memcpy(&bits, &shifted, sizeof(bits));
  bits = (bits + 1023) << 52;
  double power;
  std::memcpy(&power, &bits, sizeof(power));
  return power;
}

// Returns e^x for |x| <= 700. x = n ln 2 + r; the result is the Taylor polynomial of degree 13 in r
// by Horner's rule, times 2^n. Number is double, or a vector of doubles with its operators, a
// constructor from one double and a power_of_two.
template <class Number>
DR_ELEMENT Number exact_exp(const Number& x) {
  constexpr double kReciprocalFactorials[] = {1 / 479001600.0,
                                              1 / 39916800.0,
                                              1 / 3628800.0,
                                              1 / 362880.0,
                                              1 / 40320.0,
                                              1 / 5040.0,
                                              1 / 720.0,
                                              1 / 120.0,
                                              1 / 24.0,
                                              1 / 6.0,
                                              0.5,
                                              1.0,
                                              1.0};
  // adding it rounds to an integer, which is then in the low bits
  const Number magic(6755399441055744.0);
  const Number shifted = x * Number(1.4426950408889634) + magic;
  const Number n = shifted - magic;
  // ln 2 in two parts
  const Number r =
      (x - n * Number(6.93147180369123816490e-01)) - n * Number(1.90821492927058770002e-10);
  Number value(1 / 6227020800.0);
  for (const double coefficient : kReciprocalFactorials) value = value * r + Number(coefficient);
  return value * power_of_two(shifted);
}

}  // namespace deepreduce
#endif
