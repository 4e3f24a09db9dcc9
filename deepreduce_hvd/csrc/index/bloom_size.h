// The rate, bits and hashes of a Bloom filter and what its policies bound, for processors and
// devices.
#ifndef DEEPREDUCE_BLOOM_SIZE_H
#define DEEPREDUCE_BLOOM_SIZE_H

#include <cmath>

#include "exact_log.h"

namespace deepreduce {

enum BloomPolicy : uint8_t { kNaive = 0, kP0 = 1, kP1 = 2, kLeftmost = 3, kP2 = 4 };
constexpr double kSmallestRate = 2.3283064365386963e-10;  // 2^-32
constexpr double kLargestRate = 0.999;

DR_HOST_DEVICE inline bool random_policy(uint32_t policy) { return policy == kP1 || policy == kP2; }

// The false-positive rate for count of d indices. `wanted`: a rate, 0: DeepReduce's default, -1:
// "auto".
DR_HOST_DEVICE inline double bloom_rate(double wanted, uint32_t policy, uint32_t d, uint32_t count,
                                        double value_bits) {
  const double k = count;
  double rate = wanted;
  if (wanted == 0 || (wanted < 0 && policy != kP0)) rate = 0.1 * k / static_cast<double>(d);
  // more filter bits against more values: the paper's cost has its minimum here
  if (wanted < 0 && policy == kP0)
    rate = k / (value_bits * (kLn2 * kLn2) * (static_cast<double>(d) - k));
  rate = rate < kSmallestRate ? kSmallestRate : rate;
  return kLargestRate < rate ? kLargestRate : rate;
}

struct BloomSize {
  double bits;  // a whole number, beyond 32 bits when the filter cannot be made
  uint32_t hashes;
};

DR_HOST_DEVICE inline BloomSize bloom_size(double rate, uint32_t count) {
  const double log_rate = exact_log(rate);
  const double bits = std::ceil(-(count * log_rate) / (kLn2 * kLn2));
  const uint32_t hashes = static_cast<uint32_t>(std::ceil(-log_rate / kLn2));
  return {bits < 1 ? 1.0 : bits, hashes < 1 ? 1u : hashes};
}

// The most positives that P1 and P2 choose from. Our filters are filled to at most h ln 2 / (h -
// 1), so that positives times hashes stay below 3 d, whatever the hashes are; more would make
// decoding cost memory that nothing earned.
DR_HOST_DEVICE inline uint64_t most_positives(uint32_t hashes, uint32_t d, uint32_t count) {
  const uint64_t entries = 3 * uint64_t{d} + 2 * uint64_t{count} * hashes + 4096;
  return (entries < 0xFFFFFFFFu ? entries : uint64_t{0xFFFFFFFFu}) / hashes;
}

}  // namespace deepreduce
#endif
