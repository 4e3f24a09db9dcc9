// LEB128 numbers: 7 bits per byte, least significant first, the top bit set in all bytes but the
// last; always the shortest form.
#ifndef DEEPREDUCE_VARINT_H
#define DEEPREDUCE_VARINT_H

#include "base.h"

namespace deepreduce {

constexpr unsigned kLongestVarint = 5;

// Writes at most kLongestVarint bytes and returns where the next number goes.
inline uint8_t* put_varint(uint8_t* out, uint32_t number) {
  for (; number >= 0x80; number >>= 7) *out++ = static_cast<uint8_t>(number | 0x80);
  *out++ = static_cast<uint8_t>(number);
  return out;
}

// Reads one number of up to 35 bits.
template <class NextByte>
inline uint64_t get_varint(NextByte next_byte, const char* section) {
  uint64_t number = 0;
  unsigned byte = 0;
  for (; byte < kLongestVarint; ++byte) {
    const uint8_t group = next_byte();
    number |= static_cast<uint64_t>(group & 0x7F) << (7 * byte);
    if (group < 0x80) {
      if (group == 0 && byte > 0) break;
      return number;
    }
  }
  corrupt_payload(
      "%s: expected numbers of at most %u bytes, no longer than needed, got one of %s%u bytes",
      section, kLongestVarint, byte == kLongestVarint ? "more than " : "",
      byte == kLongestVarint ? kLongestVarint : byte + 1);
}

}  // namespace deepreduce
#endif
