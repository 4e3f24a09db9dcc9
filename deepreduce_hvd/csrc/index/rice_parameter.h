// The choice of a Rice block's parameter, shared by host and device.
#ifndef DEEPREDUCE_RICE_PARAMETER_H
#define DEEPREDUCE_RICE_PARAMETER_H

#include "support/bits.h"

namespace deepreduce {

constexpr uint32_t kRiceBlock = 4096;
constexpr unsigned kLargestRiceParameter = 31;
// bytes per directory entry; the directory has one for each block but the first
constexpr uint64_t kRiceEntryBytes = 8;

// The candidates first, first + 1 ... last, at most three: floor(log2(mean gap)) and its neighbors.
struct RiceCandidates {
  unsigned first, last;
};

// For n >= 1 gaps that sum to `sum`.
DR_HOST_DEVICE inline RiceCandidates rice_candidates(uint64_t sum, uint32_t n) {
  const unsigned length = bit_length(static_cast<uint32_t>(sum / n));
  const unsigned guess = length == 0 ? 0 : length - 1;
  return {guess == 0 ? 0 : guess - 1,
          guess + 1 < kLargestRiceParameter ? guess + 1 : kLargestRiceParameter};
}

struct RiceParameter {
  unsigned b;
  uint64_t bits;  // size of the block with this parameter
};

// Returns the candidate with the smallest size, the smaller candidate at ties. quotients[c] is the
// sum of gap >> (first + c).
DR_HOST_DEVICE inline RiceParameter choose_rice_parameter(RiceCandidates candidates,
                                                          const uint32_t (&quotients)[3],
                                                          uint32_t n) {
  RiceParameter best{candidates.first, quotients[0] + uint64_t{n} * (candidates.first + 1)};
  for (unsigned b = candidates.first + 1; b <= candidates.last; ++b) {
    const uint64_t bits = quotients[b - candidates.first] + uint64_t{n} * (b + 1);
    if (bits < best.bits) best = {b, bits};
  }
  return best;
}

}  // namespace deepreduce
#endif
