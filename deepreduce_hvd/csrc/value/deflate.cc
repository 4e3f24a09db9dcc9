// Deflate: float32 bytes compressed by zlib, in blocks.
#include <zlib.h>

#include "codecs.h"

namespace deepreduce {
namespace {

constexpr uint32_t kBlock = 65536;
constexpr uint64_t kPlaneEnds = 64;  // more than the headers of three stored blocks
constexpr int kMemoryLevel = 8;      // zlib's default

double bits_per_value(const double* parameters) { return parameters[1] != 0 ? 26 : 28; }

// zlib uses the caller's memory too.
struct Memory {
  Arena& arena;
  uint64_t refused_items, refused_size;
};

// No exception may pass through zlib's C code, so failures are returned to zlib, which returns its
// own error.
voidpf allocate(voidpf user, uInt items, uInt size) {
  Memory& memory = *static_cast<Memory*>(user);
  try {
    return memory.arena.zeros<uint8_t>(uint64_t{items} * size);
  } catch (const Failure&) {
    memory.refused_items = items;
    memory.refused_size = size;
    return nullptr;
  }
}
void release(voidpf, voidpf) {}

void expect_memory(int status, const Memory& memory) {
  if (status == Z_MEM_ERROR) Arena::out_of_memory(memory.refused_items, memory.refused_size);
}
void expect_start(int status, const Memory& memory) {
  expect_memory(status, memory);
  if (status != Z_OK) invalid_argument("Deflate: expected zlib to start, got its error %d", status);
}

z_stream stream_in(Memory& memory) {
  z_stream stream{};
  stream.zalloc = allocate;
  stream.zfree = release;
  stream.opaque = &memory;
  return stream;
}

void shuffle(const uint8_t* values, uint32_t n, uint8_t* planes) {
  for (uint32_t i = 0; i < n; ++i)
    for (uint32_t byte = 0; byte < 4; ++byte)
      planes[byte * uint64_t{n} + i] = values[4 * uint64_t{i} + byte];
}

void unshuffle(const uint8_t* planes, uint32_t n, uint8_t* values) {
  for (uint32_t i = 0; i < n; ++i)
    for (uint32_t byte = 0; byte < 4; ++byte)
      values[4 * uint64_t{i} + byte] = planes[byte * uint64_t{n} + i];
}

void encode(Context& context, ValueEncoding& encoding, ByteWriter& section) {
  const int level = static_cast<int>(encoding.parameters[0]);
  const bool shuffled = encoding.parameters[1] != 0;
  const bool runs = encoding.parameters[2] != 0;
  if (level < 1 || level > 9) invalid_argument("Deflate level: expected 1 to 9, got %d", level);
  const uint32_t count = encoding.count;
  const uint32_t blocks = (count + kBlock - 1) / kBlock;
  section.put<uint8_t>(shuffled);
  if (blocks == 0) return;
  section.extend(uint64_t{4} * (blocks - 1));
  uint8_t* planes = context.arena.array<uint8_t>(uint64_t{4} * (count < kBlock ? count : kBlock));
  Memory memory{context.arena, 0, 0};
  z_stream stream = stream_in(memory);
  expect_start(deflateInit2(&stream, level, Z_DEFLATED, MAX_WBITS, kMemoryLevel,
                            runs ? Z_RLE : Z_DEFAULT_STRATEGY),
               memory);
  for (uint32_t block = 0; block < blocks; ++block) {
    const uint32_t first = block * kBlock;
    const uint32_t n = count - first < kBlock ? count - first : kBlock;
    std::memcpy(planes, encoding.values + first, uint64_t{4} * n);
    if (shuffled) shuffle(reinterpret_cast<const uint8_t*>(encoding.values + first), n, planes);
    const uint64_t start = section.size();
    const uint64_t bound = deflateBound(&stream, 4 * n) + kPlaneEnds;
    stream.next_in = planes;
    stream.next_out = section.extend(bound);
    stream.avail_out = static_cast<uInt>(bound);
    const unsigned pieces = shuffled && runs ? 4 : 1;
    int status = Z_OK;
    for (unsigned piece = 1; piece <= pieces && status == Z_OK; ++piece) {
      stream.avail_in = 4 / pieces * n;
      status = deflate(&stream, piece < pieces ? Z_BLOCK : Z_FINISH);
    }
    if (status != Z_STREAM_END)
      invalid_argument("Deflate: expected zlib to finish a block of %u values, got its status %d",
                       n, status);
    const uint32_t length = static_cast<uint32_t>(stream.total_out);
    section.shrink_to(start + length);
    if (block + 1 < blocks) std::memcpy(section.data() + 1 + uint64_t{4} * block, &length, 4);
    deflateReset(&stream);
  }
  deflateEnd(&stream);
  std::memcpy(encoding.decoded, encoding.values, uint64_t{4} * count);
}

void decode(Context& context, ByteReader& section, uint32_t count, float* values) {
  const uint8_t shuffled = section.get<uint8_t>();
  if (shuffled > 1)
    corrupt_payload("%s: expected a shuffle byte of 0 or 1, got %u", section.section(), shuffled);
  const uint32_t blocks = (count + kBlock - 1) / kBlock;
  if (blocks == 0) return section.expect_end();
  const uint8_t* lengths = section.take(uint64_t{4} * (blocks - 1));
  uint8_t* planes = context.arena.array<uint8_t>(uint64_t{4} * (count < kBlock ? count : kBlock));
  Memory memory{context.arena, 0, 0};
  z_stream stream = stream_in(memory);
  expect_start(inflateInit(&stream), memory);
  for (uint32_t block = 0; block < blocks; ++block) {
    const uint32_t first = block * kBlock;
    const uint32_t n = count - first < kBlock ? count - first : kBlock;
    uint64_t length = section.remaining();
    if (block + 1 < blocks) {
      uint32_t field;
      std::memcpy(&field, lengths + uint64_t{4} * block, 4);
      length = field;
    }
    if (length > UINT32_MAX)
      corrupt_payload("%s: expected a zlib stream of at most %u bytes, got %llu", section.section(),
                      UINT32_MAX, static_cast<unsigned long long>(length));
    stream.next_in = const_cast<uint8_t*>(section.take(length));
    stream.avail_in = static_cast<uInt>(length);
    stream.next_out = planes;
    stream.avail_out = 4 * n;
    const int status = inflate(&stream, Z_FINISH);
    expect_memory(status, memory);
    if (stream.msg != nullptr)
      corrupt_payload("%s: expected a zlib stream, got %s", section.section(), stream.msg);
    if (status != Z_STREAM_END || stream.avail_out != 0 || stream.avail_in != 0)
      corrupt_payload("%s: expected a zlib stream of %u bytes, got %u, %s, and %u bytes after them",
                      section.section(), 4 * n, 4 * n - stream.avail_out,
                      status == Z_STREAM_END ? "its end" : "not its end", stream.avail_in);
    uint8_t* out = reinterpret_cast<uint8_t*>(values + first);
    if (shuffled) {
      unshuffle(planes, n, out);
    } else {
      std::memcpy(out, planes, uint64_t{4} * n);
    }
    inflateReset(&stream);
  }
  inflateEnd(&stream);
}

}  // namespace

extern const ValueCodec deflate_codec;
const ValueCodec deflate_codec = {kDeflate, "Deflate", false, bits_per_value, encode, decode};

}  // namespace deepreduce
