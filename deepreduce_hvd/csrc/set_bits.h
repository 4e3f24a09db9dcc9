// Positions of set bits: what Bitmap, EliasFano and Rice decode from.
#ifndef DEEPREDUCE_SET_BITS_H
#define DEEPREDUCE_SET_BITS_H

#include "base.h"

namespace deepreduce {

// The positions of the set bits of data (bytes,), ascending, to out (capacity,): bit i of byte j
// has position 8 j + i; bytes <= 2^29. Returns how many there are; when that is more than
// `capacity`, the result is only some larger number and out holds the first ones.
uint64_t set_bit_positions(Simd simd, const uint8_t* data, uint64_t bytes, uint32_t* out,
                           uint32_t capacity);

}  // namespace deepreduce
#endif
