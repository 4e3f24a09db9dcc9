// RawIndex: 32-bit indices, in any order.
#include "cuda/codecs.cuh"

namespace deepreduce {
namespace cuda {
namespace {

__device__ void write(const uint32_t* indices, const uint32_t* count, uint32_t* section,
                      uint64_t* bytes) {
  for (uint32_t i = grid_index(); i < *count; i += grid_stride()) section[i] = indices[i];
  if (grid_index() == 0) *bytes = uint64_t{4} * *count;
}

__device__ void read(const DeviceSection* section, uint32_t* indices, uint32_t* disordered,
                     dr_cuda_result* result) {
  if (skipped(section, result)) return;
  const uint32_t count = section->count, d = section->d;
  if (section->bytes != uint64_t{4} * count) {
    if (grid_index() == 0)
      refuse(result, Refused::index_section_bytes, uint64_t{4} * count, section->bytes);
    return;
  }
  for (uint32_t i = grid_index(); i < count; i += grid_stride()) {
    const uint32_t index = load_u32(section->data + uint64_t{4} * i);
    if (index >= d) refuse(result, Refused::index_beyond_d, d, index);
    // all threads that write it write the same value
    if (i > 0 && load_u32(section->data + uint64_t{4} * i - 4) >= index) *disordered = 1;
    indices[i] = index;
  }
}

// Only unsorted indices can contain duplicates that were not refused before.
__device__ void clear(const DeviceSection* section, const uint32_t* disordered, uint32_t* seen,
                      uint32_t words, const dr_cuda_result* result) {
  if (skipped(section, result) || *disordered == 0) return;
  for (uint32_t word = grid_index(); word < words; word += grid_stride()) seen[word] = 0;
}

__device__ void expect_distinct(const DeviceSection* section, const uint32_t* disordered,
                                const uint32_t* indices, uint32_t* seen, dr_cuda_result* result) {
  if (skipped(section, result) || *disordered == 0) return;
  for (uint32_t i = grid_index(); i < section->count; i += grid_stride()) {
    const uint32_t bit = 1u << (indices[i] % 32);
    if (atomicOr(seen + indices[i] / 32, bit) & bit)
      refuse(result, Refused::index_twice, section->count, indices[i]);
  }
}

uint64_t section_capacity(uint32_t, uint32_t capacity, const double*) {
  return uint64_t{4} * capacity;
}

void encode(Device& device, DeviceIndexEncoding& encoding) {
  launch_elementwise<write>(device, blocks_for(encoding.capacity), encoding.indices, encoding.count,
                            reinterpret_cast<uint32_t*>(encoding.section.data),
                            encoding.section.bytes);
}

uint32_t most_count(uint64_t bytes, uint32_t d) {
  return static_cast<uint32_t>(std::min<uint64_t>(d, bytes / 4));
}

void decode(Device& device, const DeviceSection* section, uint32_t d, uint32_t capacity, uint64_t,
            const double*, uint32_t* indices) {
  const uint64_t mark = device.mark();
  const uint32_t words = static_cast<uint32_t>((uint64_t{d} + 31) / 32);
  uint32_t* disordered = device.zeros<uint32_t>(1);
  uint32_t* seen = device.array<uint32_t>(words);
  launch_elementwise<read>(device, blocks_for(capacity), section, indices, disordered,
                           device.result());
  launch_elementwise<clear>(device, blocks_for(words), section, disordered, seen, words,
                            device.result());
  launch_elementwise<expect_distinct>(device, blocks_for(capacity), section, disordered, indices,
                                      seen, device.result());
  device.release(mark);
}

}  // namespace

extern const DeviceIndexCodec raw_index_device_codec;
const DeviceIndexCodec raw_index_device_codec = {
    kRawIndex, "RawIndex", true, section_capacity, nullptr, encode, most_count, decode};

}  // namespace cuda
}  // namespace deepreduce
