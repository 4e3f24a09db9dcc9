// The layout of Rice's section and the choice of a block's parameter, shared by host and device.
#ifndef DEEPREDUCE_RICE_LAYOUT_H
#define DEEPREDUCE_RICE_LAYOUT_H

#include "index/index_blocks.h"
#include "support/bits.h"

namespace deepreduce {

constexpr unsigned kLargestRiceParameter = 31;
// bytes per directory entry; the directory has one for each block but the first
constexpr uint64_t kRiceEntryBytes = 8;

// Returns the size of parameters and directory.
DR_HOST_DEVICE inline uint64_t rice_head_bytes(uint32_t blocks) {
  return blocks == 0 ? 0 : blocks + kRiceEntryBytes * (blocks - 1);
}

// Whether a block of n indices can be at the bytes from `start` to `end` of the data.
DR_HOST_DEVICE inline bool rice_block_fits(uint64_t start, uint64_t end, uint64_t data_bytes,
                                           uint32_t n, unsigned b) {
  return end <= data_bytes && end > start + packed_bytes(n, b);
}

// Returns the maximum size of the unary codes of n indices. The gaps sum to less than d, so a valid
// block has no more bits than this. It also keeps the positions within 32 bits.
DR_HOST_DEVICE inline uint64_t rice_most_unary_bytes(uint32_t n, unsigned b, uint32_t d) {
  return (n + uint64_t{d >> b} + 7) / 8;
}

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
