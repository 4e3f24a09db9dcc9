// Rice: gaps between indices, adaptive Golomb-Rice codes in blocks that can be coded in parallel.
#include "bits.h"
#include "codecs.h"

namespace deepreduce {
namespace {

constexpr uint32_t kBlock = 4096;
constexpr unsigned kLargestParameter = 31;
constexpr uint64_t kEntryBytes = 8;

unsigned bit_length(uint32_t value) { return value == 0 ? 0 : 32 - static_cast<unsigned>(__builtin_clz(value)); }

uint64_t cost(const uint32_t* gaps, uint32_t n, unsigned b) {
  uint64_t quotients = 0;
  for (uint32_t i = 0; i < n; ++i) quotients += gaps[i] >> b;
  return quotients + uint64_t{n} * (b + 1);
}

// The number of low bits that costs least: of floor(log2(mean gap)) and its neighbours, the smaller one on ties.
unsigned choose_parameter(const uint32_t* gaps, uint32_t n, uint64_t sum, uint64_t* bits) {
  const unsigned length = bit_length(static_cast<uint32_t>(sum / n));
  const unsigned guess = length == 0 ? 0 : length - 1;
  unsigned best = guess == 0 ? 0 : guess - 1;
  *bits = cost(gaps, n, best);
  for (unsigned b = best + 1; b <= guess + 1 && b <= kLargestParameter; ++b) {
    const uint64_t other = cost(gaps, n, b);
    if (other < *bits) {
      *bits = other;
      best = b;
    }
  }
  return best;
}

// 64 bits from `bit` on; bits past the end are zero.
uint64_t load_bits(const uint8_t* data, uint64_t bytes, uint64_t bit) {
  const uint64_t byte = bit >> 3;
  uint64_t word = 0;
  if (byte + 8 <= bytes) {
    std::memcpy(&word, data + byte, 8);
  } else if (byte < bytes) {
    std::memcpy(&word, data + byte, bytes - byte);
  }
  return word >> (bit & 7);
}

void encode_block(const uint32_t* gaps, uint32_t n, unsigned b, uint64_t bits, ByteWriter& section) {
  const uint64_t low_bytes = packed_bytes(n, b);
  const uint64_t unary_bytes = (bits - uint64_t{n} * b + 7) / 8;
  uint8_t* out = section.extend(low_bytes + unary_bytes);
  if (b > 0) {
    BitWriter low(out);
    const uint32_t mask = static_cast<uint32_t>((uint64_t{1} << b) - 1);
    for (uint32_t i = 0; i < n; ++i) low.put(gaps[i] & mask, b);
    low.finish();
  }
  uint8_t* unary = out + low_bytes;
  std::memset(unary, 0, unary_bytes);
  uint64_t bit = 0;
  for (uint32_t i = 0; i < n; ++i) {
    bit += gaps[i] >> b;
    unary[bit >> 3] = static_cast<uint8_t>(unary[bit >> 3] | (1u << (bit & 7)));
    ++bit;
  }
}

void encode(Context& context, IndexEncoding& encoding, ByteWriter& section) {
  const uint32_t blocks = (encoding.count + kBlock - 1) / kBlock;
  if (blocks == 0) return;
  const uint64_t directory_at = blocks, data_at = blocks + kEntryBytes * (blocks - 1);
  section.extend(data_at);
  uint32_t* gaps = context.arena.array<uint32_t>(kBlock);
  uint32_t next = 0;  // the smallest index that may come now
  for (uint32_t block = 0; block < blocks; ++block) {
    const uint32_t first = block * kBlock;
    const uint32_t n = encoding.count - first < kBlock ? encoding.count - first : kBlock;
    if (block > 0) {
      const uint64_t start = section.size() - data_at;
      if (start > UINT32_MAX) invalid_argument("index section: expected at most 4294967295 bytes, got more; compress more or split the tensor");
      const uint32_t entry[2] = {next, static_cast<uint32_t>(start)};
      std::memcpy(section.data() + directory_at + kEntryBytes * (block - 1), entry, kEntryBytes);
    }
    const uint32_t* indices = encoding.indices + first;
    gaps[0] = indices[0] - next;
    for (uint32_t i = 1; i < n; ++i) gaps[i] = indices[i] - indices[i - 1] - 1;
    const uint64_t sum = uint64_t{indices[n - 1]} + 1 - next - n;
    uint64_t bits;
    const unsigned b = choose_parameter(gaps, n, sum, &bits);
    section.data()[block] = static_cast<uint8_t>(b);
    encode_block(gaps, n, b, bits, section);
    next = indices[n - 1] + 1;
  }
}

// Returns the smallest index that may follow the block.
uint32_t decode_block(const uint8_t* data, uint64_t bytes, uint32_t n, unsigned b, uint32_t next, uint32_t d, uint32_t* indices,
                      const char* section) {
  const uint64_t low_bytes = packed_bytes(n, b);
  const uint8_t* unary = data + low_bytes;
  const uint64_t unary_bytes = bytes - low_bytes;
  const uint64_t mask = (uint64_t{1} << b) - 1;
  const uint64_t largest_quotient = d >> b;
  if ((n * uint64_t{b}) % 8 != 0 && (data[low_bytes - 1] >> ((n * uint64_t{b}) % 8)) != 0)
    corrupt_payload("%s: expected zero padding and the end of the bits", section);
  uint64_t window = 0, unary_bit = 0, low_bit = 0, value = next;
  unsigned available = 0;
  for (uint32_t i = 0; i < n; ++i) {
    uint64_t quotient = 0;
    while (window == 0) {
      quotient += available;
      if (unary_bit >= unary_bytes * 8) corrupt_payload("%s: expected %u unary codes, got %u", section, n, i);
      window = load_bits(unary, unary_bytes, unary_bit);
      available = 64 - static_cast<unsigned>(unary_bit & 7);
      unary_bit += available;
    }
    const unsigned zeros = static_cast<unsigned>(__builtin_ctzll(window));
    quotient += zeros;
    available -= zeros + 1;
    window = zeros == 63 ? 0 : window >> (zeros + 1);
    if (quotient > largest_quotient)
      corrupt_payload("%s: expected an index below d = %u, got a gap of at least %llu", section, d, static_cast<unsigned long long>(quotient << b));
    const uint64_t gap = (quotient << b) | (load_bits(data, bytes, low_bit) & mask);
    low_bit += b;
    value += gap;
    if (value >= d) corrupt_payload("%s: expected an index below d = %u, got %llu", section, d, static_cast<unsigned long long>(value));
    indices[i] = static_cast<uint32_t>(value);
    ++value;
  }
  // the last one lies in the last byte, and nothing follows it
  const uint64_t used_bits = unary_bit - available;
  if (window != 0 || (used_bits + 7) / 8 != unary_bytes)
    corrupt_payload("%s: expected %u unary codes that end in the block's last byte, got %llu bytes", section, n,
                    static_cast<unsigned long long>(unary_bytes));
  return static_cast<uint32_t>(value);
}

void decode(Context&, ByteReader& section, uint32_t d, uint32_t count, uint32_t* indices) {
  const uint32_t blocks = (count + kBlock - 1) / kBlock;
  if (blocks == 0) return section.expect_end();
  const uint8_t* parameters = section.take(blocks);
  const uint8_t* directory = section.take(kEntryBytes * (blocks - 1));
  const uint64_t data_bytes = section.remaining();
  const uint8_t* data = section.take(data_bytes);
  uint32_t next = 0;
  uint64_t start = 0;
  for (uint32_t block = 0; block < blocks; ++block) {
    const uint32_t first = block * kBlock;
    const uint32_t n = count - first < kBlock ? count - first : kBlock;
    const unsigned b = parameters[block];
    if (b > kLargestParameter) corrupt_payload("%s: expected a Rice parameter of at most %u, got %u", section.section(), kLargestParameter, b);
    uint64_t end = data_bytes;
    uint32_t before_following = 0;
    if (block + 1 < blocks) {
      uint32_t entry[2];
      std::memcpy(entry, directory + kEntryBytes * block, kEntryBytes);
      before_following = entry[0];
      end = entry[1];
    }
    if (end > data_bytes || end <= start + packed_bytes(n, b))
      corrupt_payload("%s: expected block %u within %llu bytes, got %llu to %llu", section.section(), block,
                      static_cast<unsigned long long>(data_bytes), static_cast<unsigned long long>(start), static_cast<unsigned long long>(end));
    next = decode_block(data + start, end - start, n, b, next, d, indices + first, section.section());
    if (block + 1 < blocks && before_following != next)
      corrupt_payload("%s: expected block %u to start at %u, got %u", section.section(), block + 1, next, before_following);
    start = end;
  }
}

}  // namespace

extern const IndexCodec rice_codec;
const IndexCodec rice_codec = {kRice, "Rice", false, encode, decode};

}  // namespace deepreduce
