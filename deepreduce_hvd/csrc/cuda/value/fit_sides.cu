// Sorting for the curve fits: one stable radix sort of (compact key, position), so that the order
// equals that of the host.
#include "cuda/value/fit_sides.cuh"

#include "cuda/algorithms.cuh"

namespace deepreduce {
namespace cuda {
namespace {

struct KeyRange {
  // of keys within a side; ~least is stored, so that zeros are valid initial values
  uint32_t least_complement, most, negatives;
};

__device__ void measure_keys(const float* values, const uint32_t* count, KeyRange* range) {
  __shared__ KeyRange of_block;
  uint32_t least_complement = 0, most = 0, negatives = 0;
  if (threadIdx.x == 0) of_block = {0, 0, 0};
  for (uint32_t i = grid_index(); i < *count; i += grid_stride()) {
    const uint32_t key = side_key(values[i]), within = key_within_side(key);
    least_complement = larger(least_complement, ~within);
    most = larger(most, within);
    negatives += key >> 31;
  }
  __syncthreads();
  atomicMax(&of_block.least_complement, least_complement);
  atomicMax(&of_block.most, most);
  atomicAdd(&of_block.negatives, negatives);
  __syncthreads();
  if (threadIdx.x != 0) return;
  atomicMax(&range->least_complement, of_block.least_complement);
  atomicMax(&range->most, of_block.most);
  atomicAdd(&range->negatives, of_block.negatives);
}

// Elements beyond the count come last: they have the largest key, and the sort is stable.
__device__ void make_keys(const float* values, const uint32_t* count_at, uint32_t capacity,
                          const KeyRange* range, uint32_t* keys, uint32_t* positions) {
  const uint32_t count = *count_at, least = ~range->least_complement;
  const SortBits bits = sort_bits(least, range->most);
  for (uint32_t i = grid_index(); i < capacity; i += grid_stride()) {
    keys[i] = i < count ? compact_key(side_key(values[i]), least, bits.span) >> bits.dropped
                        : (1u << kMostSortedBits) - 1;
    positions[i] = i;
  }
}

__device__ void take_magnitudes(const float* values, const uint32_t* order,
                                const uint32_t* count_at, const KeyRange* range, float* magnitudes,
                                uint32_t* counts) {
  const uint32_t count = *count_at;
  for (uint32_t j = grid_index(); j < count; j += grid_stride())
    magnitudes[j] = magnitude_of_key(side_key(values[order[j]]));
  if (grid_index() == 0) {
    counts[0] = count - range->negatives;
    counts[1] = range->negatives;
  }
}

}  // namespace

SortedSides sort_sides(Device& device, const float* values, const uint32_t* count,
                       uint32_t capacity, uint32_t* order) {
  uint32_t* counts = device.array<uint32_t>(2);
  float* magnitudes = device.array<float>(capacity);
  const uint64_t mark = device.mark();
  KeyRange* range = device.zeros<KeyRange>(1);
  uint32_t* keys = device.array<uint32_t>(capacity);
  uint32_t* sorted_keys = device.array<uint32_t>(capacity);
  uint32_t* positions = device.array<uint32_t>(capacity);
  launch<measure_keys>(device, blocks_for(capacity, 8), kThreads, 0, values, count, range);
  launch_elementwise<make_keys>(device, blocks_for(capacity), values, count, capacity, range, keys,
                                positions);
  sort_pairs(device, keys, sorted_keys, positions, order, capacity, 0, kMostSortedBits);
  launch_elementwise<take_magnitudes>(device, blocks_for(capacity), values, order, count, range,
                                      magnitudes, counts);
  device.release(mark);
  return {counts, magnitudes};
}

}  // namespace cuda
}  // namespace deepreduce
