// QSGD's parameters and the layout of its section, shared by host and device.
#ifndef DEEPREDUCE_VALUE_QSGD_SETTINGS_H
#define DEEPREDUCE_VALUE_QSGD_SETTINGS_H

#include "support/bits.h"

namespace deepreduce {

constexpr uint32_t kSmallestBucket = 8, kLargestBucket = 32768;
constexpr uint64_t kQSGDHead = 3;  // bytes before the norms

struct QSGDSettings {
  unsigned bits;
  uint32_t bucket;
  bool l2;
};

// Whether a section may have these settings.
DR_HOST_DEVICE inline bool qsgd_is_valid(unsigned bits, uint32_t bucket) {
  return bits >= 1 && bits <= 8 && bucket >= kSmallestBucket && bucket <= kLargestBucket &&
         bucket % 8 == 0;
}

DR_HOST_DEVICE inline uint32_t qsgd_buckets(uint32_t count, uint32_t bucket) {
  return static_cast<uint32_t>((uint64_t{count} + bucket - 1) / bucket);
}

// Returns the number of bytes before the codes.
DR_HOST_DEVICE inline uint64_t qsgd_head_bytes(uint32_t count, uint32_t bucket) {
  return kQSGDHead + uint64_t{4} * qsgd_buckets(count, bucket);
}

// Whether a norm of a section is finite and not negative.
DR_HOST_DEVICE inline bool qsgd_norm_is_valid(uint32_t norm_bits) {
  return norm_bits < 0x7F800000u;
}

inline double qsgd_bits_per_value(const double* parameters) {
  return parameters[0] + 32.0 / parameters[1];
}

inline QSGDSettings qsgd_settings(const double* parameters) {
  if (!(parameters[0] >= 1 && parameters[0] <= 8) ||
      !(parameters[1] >= kSmallestBucket && parameters[1] <= kLargestBucket))
    invalid_argument("QSGD: expected 1 to 8 bits in buckets of 8 to 32768, got %g and %g",
                     parameters[0], parameters[1]);
  const unsigned bits = static_cast<unsigned>(parameters[0]);
  const uint32_t bucket = static_cast<uint32_t>(parameters[1]);
  if (!qsgd_is_valid(bits, bucket))
    invalid_argument("QSGD bucket: expected a multiple of 8, got %u", bucket);
  return {bits, bucket, parameters[2] != 0};
}

}  // namespace deepreduce
#endif
