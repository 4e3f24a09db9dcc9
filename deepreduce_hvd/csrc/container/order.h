// The order mapping: the place of each sent value in ascending index order, ceil(log2 k) bits per
// entry.
#ifndef DEEPREDUCE_ORDER_H
#define DEEPREDUCE_ORDER_H

#include "base.h"

namespace deepreduce {

void write_order(const uint32_t* order, uint32_t count, ByteWriter& section);

// Fills order (count,). Anything but a permutation of 0..count-1 is a CorruptPayloadError.
void read_order(Context& context, ByteReader& section, uint32_t count, uint32_t* order);

}  // namespace deepreduce
#endif
