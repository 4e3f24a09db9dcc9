// Rice: gaps between indices in adaptive Golomb-Rice codes, in blocks that can be coded in
// parallel.
#include "codecs.h"
#include "index/rice_layout.h"
#include "support/bits.h"
#include "support/set_bits.h"

namespace deepreduce {
namespace {

// The gaps sum to less than d, so the sums of quotients fit 32 bits.
RiceParameter choose_parameter(const uint32_t* gaps, uint32_t n, uint64_t sum) {
  const RiceCandidates candidates = rice_candidates(sum, n);
  uint32_t quotients[3] = {};
  for (uint32_t i = 0; i < n; ++i) {
    const uint32_t gap = gaps[i] >> candidates.first;
    quotients[0] += gap;
    quotients[1] += gap >> 1;
    quotients[2] += gap >> 2;
  }
  return choose_rice_parameter(candidates, quotients, n);
}

void encode_block(const uint32_t* gaps, uint32_t n, RiceParameter parameter, ByteWriter& section) {
  const unsigned b = parameter.b;
  const uint64_t low_bytes = packed_bytes(n, b);
  const uint64_t unary_bytes = (parameter.bits - uint64_t{n} * b + 7) / 8;
  uint8_t* out = section.extend(low_bytes + unary_bytes);
  const uint32_t mask = static_cast<uint32_t>((uint64_t{1} << b) - 1);
  BitWriter low(out);
  for (uint32_t i = 0; i < n; ++i) low.put(gaps[i] & mask, b);
  low.finish();
  uint8_t* unary = out + low_bytes;
  std::memset(unary, 0, unary_bytes);
  uint64_t word = 0, word_at = 0, bit = 0;
  for (uint32_t i = 0; i < n; ++i, ++bit) {
    bit += gaps[i] >> b;
    if (bit >> 6 != word_at) {
      std::memcpy(unary + 8 * word_at, &word, 8);
      word = 0;
      word_at = bit >> 6;
    }
    word |= uint64_t{1} << (bit & 63);
  }
  std::memcpy(unary + 8 * word_at, &word, unary_bytes - 8 * word_at);
}

void encode(Context& context, IndexEncoding& encoding, ByteWriter& section) {
  const uint32_t blocks = index_blocks(encoding.count);
  if (blocks == 0) return;
  const uint64_t directory_at = blocks, data_at = rice_head_bytes(blocks);
  section.extend(data_at);
  uint32_t* gaps = context.arena.array<uint32_t>(kIndexBlock);
  uint32_t next = 0;  // smallest possible next index
  for (uint32_t block = 0; block < blocks; ++block) {
    const uint32_t first = block * kIndexBlock, n = indices_in_block(encoding.count, block);
    if (block > 0) {
      const uint32_t entry[2] = {next, block_start_field(section.size() - data_at)};
      std::memcpy(section.data() + directory_at + kRiceEntryBytes * (block - 1), entry,
                  kRiceEntryBytes);
    }
    const uint32_t* indices = encoding.indices + first;
    gaps[0] = indices[0] - next;
    for (uint32_t i = 1; i < n; ++i) gaps[i] = indices[i] - indices[i - 1] - 1;
    const uint64_t sum = uint64_t{indices[n - 1]} + 1 - next - n;
    const RiceParameter parameter = choose_parameter(gaps, n, sum);
    section.data()[block] = static_cast<uint8_t>(parameter.b);
    encode_block(gaps, n, parameter, section);
    next = indices[n - 1] + 1;
  }
}

// Returns the smallest index that may follow the block.
uint32_t decode_block(Simd simd, const uint8_t* data, uint64_t bytes, uint32_t n, unsigned b,
                      uint32_t next, uint32_t d, uint32_t* indices, const char* section) {
  const uint64_t low_bytes = packed_bytes(n, b);
  const uint64_t unary_bytes = bytes - low_bytes;
  expect_zero_padding(data, uint64_t{n} * b, section);
  if (unary_bytes > rice_most_unary_bytes(n, b, d))
    corrupt_payload("%s: expected an index below d = %u, got %llu bytes of unary codes", section, d,
                    static_cast<unsigned long long>(unary_bytes));
  const uint64_t found = set_bit_positions(simd, data + low_bytes, unary_bytes, indices, n);
  if (found != n || indices[n - 1] / 8 + 1 != unary_bytes)
    corrupt_payload(
        "%s: expected %u unary codes that end in the block's last byte, got %llu in %llu bytes",
        section, n, static_cast<unsigned long long>(found),
        static_cast<unsigned long long>(unary_bytes));
  const uint32_t quotients = indices[n - 1] - (n - 1);  // their sum
  uint64_t base = next;  // smallest next index if all quotients were 0
  for_each_field(data, bytes, n, b, [&](uint32_t i, uint64_t field) {
    base += field;
    indices[i] = static_cast<uint32_t>(base + (uint64_t{indices[i] - i} << b));
    ++base;
  });
  const uint64_t last = base - 1 + (uint64_t{quotients} << b);
  if (last >= d)  // indices are ascending, in 64 bits
    corrupt_payload("%s: expected an index below d = %u, got %llu", section, d,
                    static_cast<unsigned long long>(last));
  return indices[n - 1] + 1;
}

void decode(Context& context, ByteReader& section, uint32_t d, uint32_t count, uint32_t* indices) {
  const uint32_t blocks = index_blocks(count);
  if (blocks == 0) return section.expect_end();
  const uint8_t* parameters = section.take(blocks);
  const uint8_t* directory = section.take(kRiceEntryBytes * (blocks - 1));
  const uint64_t data_bytes = section.remaining();
  const uint8_t* data = section.take(data_bytes);
  uint32_t next = 0;
  uint64_t start = 0;
  for (uint32_t block = 0; block < blocks; ++block) {
    const uint32_t n = indices_in_block(count, block);
    const unsigned b = parameters[block];
    if (b > kLargestRiceParameter)
      corrupt_payload("%s: expected a Rice parameter of at most %u, got %u", section.section(),
                      kLargestRiceParameter, b);
    uint64_t end = data_bytes;
    uint32_t before_following = 0;
    if (block + 1 < blocks) {
      uint32_t entry[2];
      std::memcpy(entry, directory + kRiceEntryBytes * block, kRiceEntryBytes);
      before_following = entry[0];
      end = entry[1];
    }
    if (!rice_block_fits(start, end, data_bytes, n, b))
      block_outside(section.section(), block, data_bytes, start, end);
    next = decode_block(context.simd, data + start, end - start, n, b, next, d,
                        indices + block * kIndexBlock, section.section());
    if (block + 1 < blocks)
      expect_block_start(section.section(), block + 1, next, before_following);
    start = end;
  }
}

}  // namespace

extern const IndexCodec rice_codec;
const IndexCodec rice_codec = {kRice, "Rice", false, encode, decode};

}  // namespace deepreduce
