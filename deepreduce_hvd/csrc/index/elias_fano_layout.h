// The places of EliasFano's low and high bits, shared by host and device.
#ifndef DEEPREDUCE_ELIAS_FANO_LAYOUT_H
#define DEEPREDUCE_ELIAS_FANO_LAYOUT_H

#include "support/bits.h"

namespace deepreduce {

struct EliasFanoLayout {
  unsigned width;  // low bits per index
  uint64_t low_bits, low_bytes, high_bits, high_bytes;
};

// For count >= 1 of d indices.
DR_HOST_DEVICE inline EliasFanoLayout elias_fano_layout(uint32_t d, uint32_t count) {
  const unsigned length = bit_length(d / count);
  EliasFanoLayout layout;
  layout.width = length == 0 ? 0 : length - 1;
  layout.low_bits = uint64_t{count} * layout.width;
  layout.low_bytes = packed_bytes(count, layout.width);
  layout.high_bits = uint64_t{count} + ((d - 1) >> layout.width) + 1;
  layout.high_bytes = (layout.high_bits + 7) / 8;
  return layout;
}

}  // namespace deepreduce
#endif
