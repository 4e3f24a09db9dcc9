// Positions of set bits, for the decoders of Bitmap, EliasFano and Rice.
#ifndef DEEPREDUCE_SET_BITS_H
#define DEEPREDUCE_SET_BITS_H

#include "base.h"

namespace deepreduce {

// Writes the positions of the set bits of data (bytes,), ascending, to out (capacity,). Bit i of
// byte j has position 8 j + i; bytes <= 2^29. Returns the number of set bits. If that is more than
// `capacity`, returns some number larger than `capacity`, and out has the first ones.
uint64_t set_bit_positions(Simd simd, const uint8_t* data, uint64_t bytes, uint32_t* out,
                           uint32_t capacity);

}  // namespace deepreduce
#endif
