// The order mapping: ceil(log2 count) bits per entry. So 8 entries fill whole bytes, which one
// thread writes.
#include "cuda/codecs.cuh"
#include "support/bits.h"

namespace deepreduce {
namespace cuda {
namespace {

constexpr uint32_t kGroup = 8;

__device__ void write_groups(const uint32_t* order, const uint32_t* count_at, uint8_t* section,
                             uint64_t* bytes) {
  const uint32_t count = *count_at;
  const unsigned width = bit_width_of(count);
  const uint64_t section_bytes = packed_bytes(count, width);
  if (grid_index() == 0) *bytes = section_bytes;
  const uint32_t groups = (count + kGroup - 1) / kGroup;
  for (uint32_t group = grid_index(); group < groups; group += grid_stride()) {
    uint64_t pending = 0, at = uint64_t{group} * width;
    unsigned filled = 0;
    for (uint32_t j = group * kGroup; j < group * kGroup + kGroup; ++j) {
      pending |= (j < count ? uint64_t{order[j]} : uint64_t{0}) << filled;
      filled += width;
      for (; filled >= 8; filled -= 8, pending >>= 8, ++at)
        if (at < section_bytes) section[at] = static_cast<uint8_t>(pending);
    }
  }
}

__device__ void read_entries(const DeviceSection* section, uint32_t* order, uint32_t* seen,
                             dr_cuda_result* result) {
  if (skipped(section, result)) return;
  const uint32_t count = section->count;
  const unsigned width = bit_width_of(count);
  const uint64_t bytes = packed_bytes(count, width);
  if (section->bytes != bytes) {
    if (grid_index() == 0) refuse(result, Refused::order_section_bytes, bytes, section->bytes);
    return;
  }
  if (grid_index() == 0) expect_zero_padding(section->data, uint64_t{count} * width, result);
  const uint64_t mask = (uint64_t{1} << width) - 1;
  for (uint32_t j = grid_index(); j < count; j += grid_stride()) {
    const uint32_t place =
        static_cast<uint32_t>(load_bits(section->data, bytes, uint64_t{j} * width) & mask);
    order[j] = place;
    const bool good = place < count &&
                      (atomicOr(seen + place / 32, 1u << (place % 32)) >> (place % 32) & 1u) == 0;
    if (!good) refuse(result, Refused::not_a_permutation, count, place);
  }
}

}  // namespace

uint64_t order_capacity(uint32_t capacity) {
  return packed_bytes(capacity, bit_width_of(capacity));
}

void write_order(Device& device, const uint32_t* order, const uint32_t* count, uint32_t capacity,
                 SectionOut section) {
  launch_elementwise<write_groups>(device, blocks_for(capacity / kGroup + 1), order, count,
                                   section.data, section.bytes);
}

void read_order(Device& device, const DeviceSection* section, uint32_t capacity, uint32_t* order) {
  const uint64_t mark = device.mark();
  uint32_t* seen = device.zeros<uint32_t>((uint64_t{capacity} + 31) / 32);
  launch_elementwise<read_entries>(device, blocks_for(capacity), section, order, seen,
                                   device.result());
  device.release(mark);
}

}  // namespace cuda
}  // namespace deepreduce
