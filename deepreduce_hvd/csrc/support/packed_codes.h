// Codes of 1 to 8 bits, packed 8 at a time. The layout is that of the fields of bits.h.
#ifndef DEEPREDUCE_PACKED_CODES_H
#define DEEPREDUCE_PACKED_CODES_H

#include "support/bits.h"

namespace deepreduce {

// Packs n codes, n a multiple of 8. `out` needs room for 8 more bytes.
void pack_codes(Simd simd, const uint8_t* codes, uint32_t n, unsigned bits, uint8_t* out);

// Unpacks n codes from `packed`, a multiple of 8 codes at a time: `codes` needs room for 7 more.
// Reads nothing from `end` on; codes there are 0.
void unpack_codes(Simd simd, const uint8_t* packed, const uint8_t* end, uint32_t n, unsigned bits,
                  uint8_t* codes);

}  // namespace deepreduce
#endif
