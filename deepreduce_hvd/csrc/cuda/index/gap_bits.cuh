// The longest sections of Rice and EliasFano.
#ifndef DEEPREDUCE_CUDA_GAP_BITS_CUH
#define DEEPREDUCE_CUDA_GAP_BITS_CUH

#include <algorithm>

#include "bits.h"

namespace deepreduce {
namespace cuda {

// No fewer bits than the gaps (Rice) or low and high bits (EliasFano) of any k <= capacity of d indices take, padding not counted: both take
// at most floor(log2(d / k)) + 3 for an index, and k (log2(d / k) + 3) grows with k. That is below 2^33.
inline uint64_t most_gap_bits(uint32_t d, uint32_t capacity) {
  const uint64_t k = std::min(d, capacity);
  return k == 0 ? 0 : k * (bit_length(static_cast<uint32_t>(d / k)) + 3);
}

}  // namespace cuda
}  // namespace deepreduce
#endif
