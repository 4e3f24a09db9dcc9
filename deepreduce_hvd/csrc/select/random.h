// RandomK's keyed permutation of [0, d). Its first k values are k distinct random indices.
#ifndef DEEPREDUCE_SELECT_RANDOM_H
#define DEEPREDUCE_SELECT_RANDOM_H

#include "support/random.h"

namespace deepreduce {

// An alternating Feistel network on the smallest power of two that holds d, but at least 2^8,
// because it mixes fewer bits badly. Results outside of [0, d) are permuted again until they are
// inside (cycle walking).
struct RandomPermutation {
  static constexpr int kRounds = 8;
  uint64_t keys[kRounds];
  uint32_t d;
  unsigned low_bits;
  uint32_t low_mask, high_mask;

  DR_HOST_DEVICE RandomPermutation(uint64_t key, uint32_t d_) : d(d_) {
    for (int round = 0; round < kRounds; ++round)
      keys[round] = mix64(key ^ static_cast<uint64_t>(round));
    unsigned bits = 8;
    while (bits < 32 && (uint64_t{1} << bits) < d) ++bits;
    low_bits = bits - bits / 2;
    low_mask = (1u << low_bits) - 1;
    high_mask = (1u << (bits / 2)) - 1;
  }

  DR_HOST_DEVICE uint32_t operator()(uint32_t i) const {
    do {
      uint32_t low = i & low_mask, high = i >> low_bits;
      for (int round = 0; round < kRounds; round += 2) {
        low ^= random32(keys[round], high) & low_mask;
        high ^= random32(keys[round + 1], low) & high_mask;
      }
      i = high << low_bits | low;
    } while (i >= d);
    return i;
  }
};

}  // namespace deepreduce
#endif
