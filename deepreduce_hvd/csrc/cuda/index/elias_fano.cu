// EliasFano: a thread writes a word of low bits; high bits are set one by one.
#include "cuda/algorithms.cuh"
#include "cuda/codecs.cuh"
#include "cuda/index/gap_bits.cuh"
#include "index/elias_fano_layout.h"

namespace deepreduce {
namespace cuda {
namespace {

constexpr uint32_t kEach = 16;  // indices whose high bits one thread sets; neighbors share words

// Returns word number `at` of the low bits.
__device__ uint32_t low_word(const uint32_t* indices, uint32_t count, unsigned width, uint64_t at) {
  const uint32_t mask = (1u << width) - 1;  // width <= 30
  uint64_t i = 32 * at / width;
  const unsigned passed = static_cast<unsigned>(32 * at - i * width);
  uint64_t word = (indices[i] & mask) >> passed;
  for (unsigned filled = width - passed; filled < 32 && ++i < count; filled += width)
    word |= uint64_t{indices[i] & mask} << filled;
  return static_cast<uint32_t>(word);
}

// The words of the section must be 0 before.
__device__ void write(const uint32_t* indices, const uint32_t* count_at, uint32_t d,
                      uint32_t* section, uint64_t* bytes) {
  const uint32_t count = *count_at;
  if (count == 0) {
    if (grid_index() == 0) *bytes = 0;
    return;
  }
  const EliasFanoLayout layout = elias_fano_layout(d, count);
  if (grid_index() == 0) *bytes = layout.low_bytes + layout.high_bytes;
  const uint64_t whole_words = layout.low_bits / 32;
  for (uint64_t at = grid_index(); at < whole_words; at += grid_stride())
    section[at] = low_word(indices, count, layout.width, at);
  // the high bits may begin in this word
  if (grid_index() == 0 && layout.low_bits % 32 != 0)
    atomicOr(section + whole_words, low_word(indices, count, layout.width, whole_words));
  const uint32_t groups = (count + kEach - 1) / kEach;
  for (uint32_t group = grid_index(); group < groups; group += grid_stride()) {
    uint64_t at = 0;
    uint32_t pending = 0;
    for (uint32_t i = group * kEach; i < group * kEach + kEach && i < count; ++i) {
      const uint64_t bit = 8 * layout.low_bytes + (indices[i] >> layout.width) + i;
      if (pending != 0 && bit / 32 != at) {
        atomicOr(section + at, pending);
        pending = 0;
      }
      at = bit / 32;
      pending |= 1u << (bit % 32);
    }
    atomicOr(section + at, pending);
  }
}

// Counts the set bits in every 64 high bits. Counts beyond the high bits do not change.
__device__ void count_high(const DeviceSection* section, uint32_t* counts, dr_cuda_result* result) {
  if (skipped(section, result)) return;
  const uint32_t count = section->count;
  if (count == 0) {
    if (grid_index() == 0 && section->bytes != 0)
      refuse(result, Refused::index_section_bytes, 0, section->bytes);
    return;
  }
  const EliasFanoLayout layout = elias_fano_layout(section->d, count);
  if (section->bytes != layout.low_bytes + layout.high_bytes) {
    if (grid_index() == 0)
      refuse(result, Refused::index_section_bytes, layout.low_bytes + layout.high_bytes,
             section->bytes);
    return;
  }
  const uint8_t* high = section->data + layout.low_bytes;
  if (grid_index() == 0) {
    expect_zero_padding(section->data, layout.low_bits, result);
    expect_zero_padding(high, layout.high_bits, result);
  }
  const uint32_t words = static_cast<uint32_t>((layout.high_bits + 63) / 64);
  for (uint32_t at = grid_index(); at < words; at += grid_stride())
    counts[at] =
        static_cast<uint32_t>(__popcll(load_bits(high, layout.high_bytes, uint64_t{64} * at)));
}

__device__ void read(const DeviceSection* section, const uint32_t* before, uint32_t* indices,
                     dr_cuda_result* result) {
  if (skipped(section, result)) return;
  const uint32_t count = section->count, d = section->d;
  if (count == 0) return;
  const EliasFanoLayout layout = elias_fano_layout(d, count);
  const unsigned width = layout.width;
  const uint8_t* high = section->data + layout.low_bytes;
  const uint32_t words = static_cast<uint32_t>((layout.high_bits + 63) / 64);
  for (uint32_t at = grid_index(); at < words; at += grid_stride()) {
    uint64_t word = load_bits(high, layout.high_bytes, uint64_t{64} * at);
    uint32_t j = before[at];
    bool neighbour = at > 0 && high[uint64_t{8} * at - 1] >> 7 != 0;  // the bit before this word
    int last = -1;  // the set bit before, in this word
    for (; word != 0; word &= word - 1, ++j) {
      const int bit = __ffsll(static_cast<long long>(word)) - 1;
      neighbour = last < 0 ? bit == 0 && neighbour : bit == last + 1;
      last = bit;
      if (j >= count) continue;
      const uint64_t low = load_field(section->data, section->bytes, uint64_t{j} * width, width);
      // with `count` bits in all, and none in the padding, this is below 2^32
      const uint64_t index = (uint64_t{64} * at + static_cast<uint32_t>(bit) - j) << width | low;
      indices[j] = static_cast<uint32_t>(index);
      if (j + 1 == count && index >= d) refuse(result, Refused::index_beyond_d, d, index);
      // between set bits that are not neighbors the high part grows
      if (!neighbour || j == 0) continue;
      const uint64_t low_before =
          load_field(section->data, section->bytes, uint64_t{j - 1} * width, width);
      if (low_before >= low)
        refuse(result, Refused::indices_not_ascending, index - low + low_before, index);
    }
    if (at + 1 == words && j != count) refuse(result, Refused::set_bits, count, j);
  }
}

uint64_t section_capacity(uint32_t d, uint32_t capacity, const double*) {
  // one more bit than for the indices, and two ends of bytes
  return std::min(d, capacity) == 0 ? 0 : most_gap_bits(d, capacity) / 8 + 3;
}

void encode(Device& device, DeviceIndexEncoding& encoding) {
  device.zero(encoding.section.data, encoding.section.capacity + 4);
  launch_elementwise<write>(
      device, blocks_for(encoding.capacity, 2), encoding.indices, encoding.count, encoding.d,
      reinterpret_cast<uint32_t*>(encoding.section.data), encoding.section.bytes);
}

uint32_t most_count(uint64_t bytes, uint32_t d) {
  return static_cast<uint32_t>(std::min<uint64_t>(d, 8 * bytes));
}

void decode(Device& device, const DeviceSection* section, uint32_t d, uint32_t capacity, uint64_t,
            const double*, uint32_t* indices) {
  const uint64_t mark = device.mark();
  // words of the high bits, for any count up to capacity
  const uint64_t words = (3 * uint64_t{std::min(d, capacity)} + 1 + 63) / 64;
  uint32_t* before = device.array<uint32_t>(words);
  launch_elementwise<count_high>(device, blocks_for(words), section, before, device.result());
  exclusive_sum(device, before, before, words);
  launch_elementwise<read>(device, blocks_for(words), section, before, indices, device.result());
  device.release(mark);
}

}  // namespace

extern const DeviceIndexCodec elias_fano_device_codec;
const DeviceIndexCodec elias_fano_device_codec = {
    kEliasFano, "EliasFano", false, section_capacity, nullptr, encode, most_count, decode};

}  // namespace cuda
}  // namespace deepreduce
