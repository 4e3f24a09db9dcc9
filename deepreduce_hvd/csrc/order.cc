#include "order.h"

#include "bits.h"

namespace deepreduce {

void write_order(const uint32_t* order, uint32_t count, ByteWriter& section) {
  const unsigned width = bit_width_of(count);
  BitWriter bits(section.extend(packed_bytes(count, width)));
  for (uint32_t j = 0; j < count; ++j) bits.put(order[j], width);
  bits.finish();
}

void read_order(Context& context, ByteReader& section, uint32_t count, uint32_t* order) {
  const unsigned width = bit_width_of(count);
  const uint64_t bytes = packed_bytes(count, width);
  BitReader bits(section.take(bytes), bytes, section.section());
  section.expect_end();
  uint64_t* seen = context.arena.zeros<uint64_t>((uint64_t{count} + 63) / 64);
  for (uint32_t j = 0; j < count; ++j) {
    const uint32_t position = bits.get(width);
    if (position >= count) corrupt_payload("%s: expected a position below %u, got %u", section.section(), count, position);
    const uint64_t bit = uint64_t{1} << (position & 63);
    if (seen[position >> 6] & bit) corrupt_payload("%s: expected distinct positions, got %u twice", section.section(), position);
    seen[position >> 6] |= bit;
    order[j] = position;
  }
  bits.expect_end();
}

}  // namespace deepreduce
