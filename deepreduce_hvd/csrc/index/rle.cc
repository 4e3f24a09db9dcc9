// RLE: run lengths of the bitmap.
#include "codecs.h"
#include "support/varint.h"

namespace deepreduce {
namespace {

void encode(Context&, IndexEncoding& encoding, ByteWriter& section) {
  const uint32_t* indices = encoding.indices;
  const uint32_t count = encoding.count;
  uint32_t next = 0;  // first position after the runs so far
  uint8_t pairs[1024];
  uint8_t* end = pairs;
  for (uint32_t i = 0; i < count;) {
    uint32_t run = 1;
    while (i + run < count && indices[i + run] == indices[i] + run) ++run;
    end = put_varint(put_varint(end, indices[i] - next - (i > 0)), run - 1);
    if (end > pairs + sizeof(pairs) - 2 * kLongestVarint) {
      section.put_bytes(pairs, static_cast<uint64_t>(end - pairs));
      end = pairs;
    }
    next = indices[i] + run;
    i += run;
  }
  section.put_bytes(pairs, static_cast<uint64_t>(end - pairs));
}

void decode(Context&, ByteReader& section, uint32_t d, uint32_t count, uint32_t* indices) {
  const auto next_byte = [&section] { return section.get<uint8_t>(); };
  uint64_t next = 0;
  uint32_t found = 0;
  for (bool first = true; section.remaining() != 0; first = false) {
    next += get_varint(next_byte, section.section()) + !first;
    const uint64_t run = get_varint(next_byte, section.section()) + 1;
    if (next + run > d || run > count - found)
      corrupt_payload("%s: expected runs of %u set bits within d = %u, got more", section.section(),
                      count, d);
    for (uint64_t i = 0; i < run; ++i) indices[found++] = static_cast<uint32_t>(next++);
  }
  if (found != count)
    corrupt_payload("%s: expected runs of %u set bits within d = %u, got %u", section.section(),
                    count, d, found);
}

}  // namespace

extern const IndexCodec rle_codec;
const IndexCodec rle_codec = {kRLE, "RLE", false, encode, decode};

}  // namespace deepreduce
