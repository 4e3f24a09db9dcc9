// Functions shared by Rice and EliasFano: the maximum length of their sections, and reads of bit
// fields.
#ifndef DEEPREDUCE_CUDA_GAP_BITS_CUH
#define DEEPREDUCE_CUDA_GAP_BITS_CUH

#include <algorithm>

#include "cuda/device.cuh"
#include "support/bits.h"

namespace deepreduce {
namespace cuda {

// Returns an upper bound of the bits of the gaps (Rice), or of the low and high bits (EliasFano),
// of any k <= capacity of d indices, without padding. Both take at most floor(log2(d / k)) + 3 bits
// per index, and k * (log2(d / k) + 3) grows with k. The bound is below 2^33.
inline uint64_t most_gap_bits(uint32_t d, uint32_t capacity) {
  const uint64_t k = std::min(d, capacity);
  return k == 0 ? 0 : k * (bit_length(static_cast<uint32_t>(d / k)) + 3);
}

// Returns the field of `width` <= 31 bits at `bit`. It must end within the data. Reads two words if
// both are within the data.
__device__ inline uint32_t load_field(const uint8_t* data, uint64_t bytes, uint64_t bit,
                                      unsigned width) {
  const uint8_t* at = data + bit / 8;
  const unsigned beyond = static_cast<unsigned>(reinterpret_cast<uintptr_t>(at) % 4);
  uint64_t words;
  if (at >= data + beyond && at - beyond + 8 <= data + bytes) {
    const uint32_t* aligned = reinterpret_cast<const uint32_t*>(at - beyond);
    words = (aligned[0] | uint64_t{aligned[1]} << 32) >> (8 * beyond + bit % 8);
  } else {
    words = load_bits(data, bytes, bit);
  }
  return static_cast<uint32_t>(words) & ((1u << width) - 1);
}

}  // namespace cuda
}  // namespace deepreduce
#endif
