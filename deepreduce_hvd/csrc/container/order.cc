#include "container/order.h"

#include "support/bits.h"

namespace deepreduce {
namespace {

// Packs fields of a fixed width of at most 32 bits, two at a time, 8 bytes of memory at a time. The
// words are little-endian, like the format.
void pack(const uint32_t* fields, uint32_t count, unsigned width, uint8_t* out, uint64_t bytes) {
  uint64_t pending = 0;
  unsigned filled = 0;
  uint8_t* const end = out + bytes;
  const auto put = [&](uint64_t bits, unsigned n) {
    pending |= bits << filled;
    filled += n;
    if (filled >= 64) {
      std::memcpy(out, &pending, sizeof(pending));
      out += sizeof(pending);
      filled -= 64;
      pending = filled == 0 ? 0 : bits >> (n - filled);
    }
  };
  uint32_t j = 0;
  for (; j + 2 <= count; j += 2) put(fields[j] | uint64_t{fields[j + 1]} << width, 2 * width);
  if (j < count) put(fields[j], width);
  if (end > out) std::memcpy(out, &pending, static_cast<size_t>(end - out));
}

}  // namespace

void write_order(const uint32_t* order, uint32_t count, ByteWriter& section) {
  const unsigned width = bit_width_of(count);
  const uint64_t bytes = packed_bytes(count, width);
  pack(order, count, width, section.extend(bytes), bytes);
}

void read_order(Context& context, ByteReader& section, uint32_t count, uint32_t* order) {
  const unsigned width = bit_width_of(count);
  const uint64_t bytes = packed_bytes(count, width);
  const uint8_t* data = section.take(bytes);
  section.expect_end();
  // The entries are a permutation if they cover all positions 0..count-1. This is checked once, at
  // the end, so that the loops need no branches.
  uint8_t* seen = context.arena.zeros<uint8_t>(uint64_t{1} << width);
  const uint64_t mask = (uint64_t{1} << width) - 1;
  uint32_t whole = 0;  // number of entries whose 8 bytes lie within the section
  if (bytes >= 8) {
    const uint64_t last = (bytes - 8) * 8 + 7;  // last bit position from which 8 bytes can be read
    whole =
        width == 0 || last / width + 1 >= count ? count : static_cast<uint32_t>(last / width + 1);
  }
  for (uint32_t j = 0; j < whole; ++j) {
    const uint64_t bit = uint64_t{j} * width;
    uint64_t word;
    std::memcpy(&word, data + bit / 8, sizeof(word));
    order[j] = static_cast<uint32_t>((word >> (bit % 8)) & mask);
    seen[order[j]] = 1;
  }
  const uint64_t at = uint64_t{whole} * width;
  BitReader rest(data + at / 8, bytes - at / 8, section.section());
  rest.get(static_cast<unsigned>(at % 8));
  for (uint32_t j = whole; j < count; ++j) {
    order[j] = rest.get(width);
    seen[order[j]] = 1;
  }
  rest.expect_end();
  uint32_t positions = 0;
  for (uint32_t i = 0; i < count; ++i) positions += seen[i];
  if (positions != count)
    corrupt_payload("%s: expected a permutation of %u positions, got %u of them", section.section(),
                    count, positions);
}

}  // namespace deepreduce
