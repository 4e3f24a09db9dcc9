// The counter-based random generator: a pure function of (key, counter), the same on every
// processor and device.
#ifndef DEEPREDUCE_RANDOM_H
#define DEEPREDUCE_RANDOM_H

#include <cstdint>

#include "api/deepreduce.h"
#include "support/host_device.h"

namespace deepreduce {

// The purpose of a random choice. It is part of the key: with all else equal, keys differ.
enum class Purpose : uint64_t { selection = 1, rounding = 2, bloom_policy = 3 };

DR_HOST_DEVICE inline uint64_t mix64(uint64_t x) {  // the SplitMix64 step (Steele, Lea, Flood 2014)
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

DR_HOST_DEVICE inline uint64_t random_key(uint64_t seed, uint64_t step, uint64_t tensor,
                                          uint64_t rank, Purpose purpose) {
  return mix64(mix64(mix64(mix64(mix64(seed) ^ step) ^ tensor) ^ rank) ^
               static_cast<uint64_t>(purpose));
}

inline uint64_t random_key(const dr_position& at, Purpose purpose) {
  return random_key(at.seed, at.step, at.tensor, at.rank, purpose);
}

// Returns 32 uniform bits for a counter: MurmurHash3's finalizer with both halves of the key mixed
// in.
DR_HOST_DEVICE inline uint32_t random32(uint64_t key, uint32_t counter) {
  uint32_t x = counter * 0x9E3779B1u + static_cast<uint32_t>(key);
  x ^= x >> 16;
  x *= 0x85EBCA6Bu;
  x ^= x >> 13;
  x += static_cast<uint32_t>(key >> 32);
  x *= 0xC2B2AE35u;
  x ^= x >> 16;
  return x;
}

// Returns a uniform float32 in [0, 1) with 24 bits.
DR_HOST_DEVICE inline float random_uniform(uint64_t key, uint32_t counter) {
  return static_cast<float>(random32(key, counter) >> 8) * 5.9604644775390625e-8f;
}

// Returns a uniform integer in [0, bound), bound >= 1, by multiply-shift.
DR_HOST_DEVICE inline uint32_t random_below(uint64_t key, uint32_t counter, uint32_t bound) {
  return static_cast<uint32_t>((static_cast<uint64_t>(random32(key, counter)) * bound) >> 32);
}

}  // namespace deepreduce
#endif
