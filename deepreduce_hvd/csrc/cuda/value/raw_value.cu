// RawValue: float32 values without compression.
#include "cuda/codecs.cuh"

namespace deepreduce {
namespace cuda {
namespace {

__device__ void write(const float* values, const uint32_t* count, float* section, uint64_t* bytes,
                      float* decoded) {
  for (uint32_t i = grid_index(); i < *count; i += grid_stride())
    section[i] = decoded[i] = values[i];
  if (grid_index() == 0) *bytes = uint64_t{4} * *count;
}

__device__ void read(const DeviceSection* section, float* values, dr_cuda_result* result) {
  if (skipped(section, result)) return;
  const uint32_t count = section->count;
  if (section->bytes != uint64_t{4} * count) {
    if (grid_index() == 0)
      refuse(result, Refused::value_section_bytes, uint64_t{4} * count, section->bytes);
    return;
  }
  for (uint32_t i = grid_index(); i < count; i += grid_stride())
    values[i] = bits_float(load_u32(section->data + uint64_t{4} * i));
}

double bits_per_value(const double*) { return 32; }

uint64_t section_capacity(uint32_t capacity, const double*) { return uint64_t{4} * capacity; }

void encode(Device& device, DeviceValueEncoding& encoding) {
  launch_elementwise<write>(device, blocks_for(encoding.capacity), encoding.values, encoding.count,
                            reinterpret_cast<float*>(encoding.section.data), encoding.section.bytes,
                            encoding.decoded);
}

uint32_t most_count(uint64_t bytes) {
  return static_cast<uint32_t>(std::min<uint64_t>(UINT32_MAX, bytes / 4));
}

void decode(Device& device, const DeviceSection* section, uint32_t capacity, uint64_t,
            float* values) {
  launch_elementwise<read>(device, blocks_for(capacity), section, values, device.result());
}

}  // namespace

extern const DeviceValueCodec raw_value_device_codec;
const DeviceValueCodec raw_value_device_codec = {
    kRawValue, "RawValue", false, bits_per_value, section_capacity, encode, most_count, decode};

}  // namespace cuda
}  // namespace deepreduce
