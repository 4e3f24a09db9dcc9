// Bloom's parameters, the head of its section, the rate, bits and hashes of a filter and the limits
// of the policies, shared by host and device.
#ifndef DEEPREDUCE_BLOOM_SIZE_H
#define DEEPREDUCE_BLOOM_SIZE_H

#include <cmath>

#include "base.h"
#include "support/exact_log.h"

namespace deepreduce {

enum BloomPolicy : uint8_t { kNaive = 0, kP0 = 1, kP1 = 2, kLeftmost = 3, kP2 = 4 };
constexpr double kSmallestRate = 2.3283064365386963e-10;  // 2^-32
constexpr double kLargestRate = 0.999;
constexpr uint32_t kLargestHashes = 32;

DR_HOST_DEVICE inline bool random_policy(uint32_t policy) { return policy == kP1 || policy == kP2; }

struct BloomSettings {
  double rate;  // or 0 for DeepReduce's default, or -1 for "auto"
  uint8_t policy;
};
inline BloomSettings bloom_settings(const double* parameters) {
  if (!(parameters[1] >= kNaive && parameters[1] <= kP2))
    invalid_argument("Bloom policy: expected 0 to 4, got %g", parameters[1]);
  if (!(parameters[0] < 1))
    invalid_argument("Bloom fpr: expected a number below 1, got %g", parameters[0]);
  return {parameters[0], static_cast<uint8_t>(parameters[1])};
}

// Returns the number of bytes before the filter: policy, hashes, bits, and the seed of a random
// policy.
DR_HOST_DEVICE inline uint32_t bloom_head_bytes(uint32_t policy) {
  return random_policy(policy) ? 10 : 6;
}

// The first field of a section's head that is out of range.
enum class BloomField { none, policy, hashes, bits };
DR_HOST_DEVICE inline BloomField invalid_bloom_field(uint32_t policy, uint32_t hashes,
                                                     uint32_t bits) {
  if (policy > kP2) return BloomField::policy;
  if (hashes < 1 || hashes > kLargestHashes) return BloomField::hashes;
  return bits < 1 ? BloomField::bits : BloomField::none;
}

// Whether a filter for `count` indices can have `found` positives. In a payload of P0, `count` is
// the number of positives, because each of them has a value.
DR_HOST_DEVICE inline bool enough_positives(uint32_t policy, bool decoding, uint64_t found,
                                            uint32_t count) {
  return decoding && policy == kP0 ? found == count : found >= count;
}

// Returns the false-positive rate for `count` of d indices. `wanted` is a rate, 0 for DeepReduce's
// default, or -1 for "auto".
DR_HOST_DEVICE inline double bloom_rate(double wanted, uint32_t policy, uint32_t d, uint32_t count,
                                        double value_bits) {
  const double k = count;
  double rate = wanted;
  if (wanted == 0 || (wanted < 0 && policy != kP0)) rate = 0.1 * k / static_cast<double>(d);
  // minimizes the cost in the paper: the bits of the filter plus those of the additional values
  if (wanted < 0 && policy == kP0)
    rate = k / (value_bits * (kLn2 * kLn2) * (static_cast<double>(d) - k));
  rate = rate < kSmallestRate ? kSmallestRate : rate;
  return kLargestRate < rate ? kLargestRate : rate;
}

struct BloomSize {
  double bits;  // an integer; more than 32 bits if the filter is too large
  uint32_t hashes;
};

DR_HOST_DEVICE inline BloomSize bloom_size(double rate, uint32_t count) {
  const double log_rate = exact_log(rate);
  const double bits = std::ceil(-(count * log_rate) / (kLn2 * kLn2));
  const uint32_t hashes = static_cast<uint32_t>(std::ceil(-log_rate / kLn2));
  return {bits < 1 ? 1.0 : bits, hashes < 1 ? 1u : hashes};
}

// The maximum number of positives that P1 and P2 choose from. The encoder's filters are filled to
// at most h ln 2 / (h - 1), so positives times hashes stay below 3 d for any number of hashes. A
// payload with more positives could make decoding use too much memory.
DR_HOST_DEVICE inline uint64_t most_positives(uint32_t hashes, uint32_t d, uint32_t count) {
  const uint64_t entries = 3 * uint64_t{d} + 2 * uint64_t{count} * hashes + 4096;
  return (entries < 0xFFFFFFFFu ? entries : uint64_t{0xFFFFFFFFu}) / hashes;
}

}  // namespace deepreduce
#endif
