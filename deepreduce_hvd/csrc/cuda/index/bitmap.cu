// Bitmap: one bit per element.
#include "cuda/algorithms.cuh"
#include "cuda/codecs.cuh"

namespace deepreduce {
namespace cuda {
namespace {

uint32_t words_of(uint32_t d) { return static_cast<uint32_t>((uint64_t{d} + 31) / 32); }

__device__ void set_bits(const uint32_t* indices, const uint32_t* count, uint32_t d,
                         uint32_t* words, uint64_t* bytes) {
  for (uint32_t i = grid_index(); i < *count; i += grid_stride())
    atomicOr(words + indices[i] / 32, 1u << (indices[i] % 32));
  if (grid_index() == 0) *bytes = packed_bytes(d, 1);
}

// Returns word number `at` of the section, with zeros beyond its end.
__device__ uint32_t word_at(const DeviceSection* section, uint32_t at) {
  const uint64_t byte = uint64_t{4} * at;
  if (byte + 4 <= section->bytes) return load_u32(section->data + byte);
  uint32_t word = 0;
  for (uint64_t i = byte; i < section->bytes; ++i)
    word |= static_cast<uint32_t>(section->data[i]) << (8 * (i - byte));
  return word;
}

__device__ void count_bits(const DeviceSection* section, uint32_t words, uint32_t* counts,
                           dr_cuda_result* result) {
  if (skipped(section, result)) return;
  if (section->bytes != packed_bytes(section->d, 1)) {
    if (grid_index() == 0)
      refuse(result, Refused::index_section_bytes, packed_bytes(section->d, 1), section->bytes);
    return;
  }
  for (uint32_t at = grid_index(); at < words; at += grid_stride()) {
    const uint32_t word = word_at(section, at);
    counts[at] = static_cast<uint32_t>(__popc(word));
    const uint32_t in_use = section->d - 32 * at;  // bits of this word that are used
    if (in_use < 32 && word >> in_use != 0)
      refuse(result, Refused::set_bits, section->count, section->count);
  }
}

__device__ void read_positions(const DeviceSection* section, uint32_t words, const uint32_t* before,
                               uint32_t* indices, dr_cuda_result* result) {
  if (skipped(section, result)) return;
  const uint32_t count = section->count;
  for (uint32_t at = grid_index(); at < words; at += grid_stride()) {
    uint32_t word = word_at(section, at);
    uint32_t j = before[at];
    for (; word != 0; word &= word - 1, ++j)
      if (j < count)
        indices[j] = 32 * at + static_cast<uint32_t>(__ffs(static_cast<int>(word)) - 1);
    if (at + 1 == words && j != count) refuse(result, Refused::set_bits, count, j);
  }
  if (words == 0 && count != 0 && grid_index() == 0) refuse(result, Refused::set_bits, count, 0);
}

uint64_t section_capacity(uint32_t d, uint32_t, const double*) { return packed_bytes(d, 1); }

void encode(Device& device, DeviceIndexEncoding& encoding) {
  device.zero(encoding.section.data, uint64_t{4} * words_of(encoding.d));
  launch_elementwise<set_bits>(
      device, blocks_for(encoding.capacity), encoding.indices, encoding.count, encoding.d,
      reinterpret_cast<uint32_t*>(encoding.section.data), encoding.section.bytes);
}

uint32_t most_count(uint64_t bytes, uint32_t d) {
  return static_cast<uint32_t>(std::min<uint64_t>(d, 8 * bytes));
}

void decode(Device& device, const DeviceSection* section, uint32_t d, uint32_t, uint64_t,
            const double*, uint32_t* indices) {
  const uint64_t mark = device.mark();
  const uint32_t words = words_of(d);
  uint32_t* before = device.array<uint32_t>(words);
  launch_elementwise<count_bits>(device, blocks_for(words), section, words, before,
                                 device.result());
  exclusive_sum(device, before, before, words);
  launch_elementwise<read_positions>(device, blocks_for(words), section, words, before, indices,
                                     device.result());
  device.release(mark);
}

}  // namespace

extern const DeviceIndexCodec bitmap_device_codec;
const DeviceIndexCodec bitmap_device_codec = {kBitmap, "Bitmap", false,      section_capacity,
                                              nullptr, encode,   most_count, decode};

}  // namespace cuda
}  // namespace deepreduce
