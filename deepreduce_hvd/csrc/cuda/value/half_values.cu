// Float16 and BFloat16: two bytes per value, rounded to nearest even, saturating.
#include "cuda/codecs.cuh"
#include "value/half_format.h"

namespace deepreduce {
namespace cuda {
namespace {

template <class Format>
__device__ void write(const float* values, const uint32_t* count, uint16_t* section,
                      uint64_t* bytes, float* decoded) {
  for (uint32_t i = grid_index(); i < *count; i += grid_stride()) {
    const uint16_t half = Format::narrow(values[i]);
    section[i] = half;
    decoded[i] = Format::widen(half);
  }
  if (grid_index() == 0) *bytes = uint64_t{2} * *count;
}

template <class Format>
__device__ void read(const DeviceSection* section, float* values, dr_cuda_result* result) {
  if (skipped(section, result)) return;
  const uint32_t count = section->count;
  if (section->bytes != uint64_t{2} * count) {
    if (grid_index() == 0)
      refuse(result, Refused::value_section_bytes, uint64_t{2} * count, section->bytes);
    return;
  }
  for (uint32_t i = grid_index(); i < count; i += grid_stride()) {
    const uint8_t* at = section->data + uint64_t{2} * i;
    const uint16_t half = static_cast<uint16_t>(at[0] | at[1] << 8);
    if (!half_is_finite<Format>(half)) refuse(result, Refused::not_finite_half, 16, half);
    values[i] = Format::widen(half);
  }
}

double bits_per_value(const double*) { return 16; }

uint64_t section_capacity(uint32_t capacity, const double*) { return uint64_t{2} * capacity; }

template <class Format>
void encode(Device& device, DeviceValueEncoding& encoding) {
  launch_elementwise<write<Format>>(
      device, blocks_for(encoding.capacity), encoding.values, encoding.count,
      reinterpret_cast<uint16_t*>(encoding.section.data), encoding.section.bytes, encoding.decoded);
}

uint32_t most_count(uint64_t bytes) {
  return static_cast<uint32_t>(std::min<uint64_t>(UINT32_MAX, bytes / 2));
}

template <class Format>
void decode(Device& device, const DeviceSection* section, uint32_t capacity, uint64_t,
            float* values) {
  launch_elementwise<read<Format>>(device, blocks_for(capacity), section, values, device.result());
}

}  // namespace

extern const DeviceValueCodec float16_device_codec;
extern const DeviceValueCodec bfloat16_device_codec;
const DeviceValueCodec float16_device_codec = {kFloat16,
                                               "Float16",
                                               false,
                                               bits_per_value,
                                               section_capacity,
                                               encode<Float16Format>,
                                               most_count,
                                               decode<Float16Format>};
const DeviceValueCodec bfloat16_device_codec = {kBFloat16,
                                                "BFloat16",
                                                false,
                                                bits_per_value,
                                                section_capacity,
                                                encode<BFloat16Format>,
                                                most_count,
                                                decode<BFloat16Format>};

}  // namespace cuda
}  // namespace deepreduce
