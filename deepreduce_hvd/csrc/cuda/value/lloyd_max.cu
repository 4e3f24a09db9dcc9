// LloydMax: blocks count magnitudes in bins, one block fits the levels, and tiles of codes are
// packed in shared memory.
#include "cuda/codecs.cuh"
#include "cuda/value/packed_codes.cuh"
#include "value/lloyd_max_levels.h"

namespace deepreduce {
namespace cuda {
namespace {

constexpr uint32_t kEach = 16;  // values per thread in kernels whose blocks add to one place

// What the kernels of an encoder share; it starts as zeros.
struct Fit {
  uint64_t within[kLloydBins];  // sums of the lower bits of the magnitudes in each bin
  uint32_t counts[kLloydBins];
  uint32_t largest;
  uint32_t has_zeros;  // 1 if any magnitude is 0
  float levels[kLloydMostLevels];
  uint32_t thresholds[kLloydMostLevels];
};

__device__ void find_extent(const float* values, const uint32_t* count_at, Fit* fit) {
  const uint32_t count = *count_at;
  uint32_t most = 0;  // magnitudes compare like their bits
  bool zeros = false;
  for (uint64_t i = grid_index(); i < count; i += grid_stride()) {
    const uint32_t magnitude = magnitude_bits(values[i]);
    most = larger(most, magnitude);
    zeros = zeros || magnitude == 0;
  }
  if (zeros) atomicMax(&fit->has_zeros, 1u);
  for (uint32_t half = 16; half > 0; half /= 2)
    most = larger(most, __shfl_xor_sync(0xFFFFFFFFu, most, half));
  if (threadIdx.x % 32 == 0 && most != 0) atomicMax(&fit->largest, most);
}

// The sums of one tile fit into 32 bits. Shared memory has no atomic addition of 64 bits, only a
// loop, which is slow because most values are in a few bins.
static_assert(uint64_t{kThreads} * kEach * kLloydWithin <= UINT32_MAX, "sums of a tile overflow");
__device__ void count_bins(const float* values, const uint32_t* count_at, Fit* fit) {
  __shared__ uint32_t within[kLloydBins];
  __shared__ uint32_t counts[kLloydBins];
  constexpr uint64_t tile = uint64_t{kThreads} * kEach;
  const uint32_t count = *count_at, lowest = lloyd_first_bin(fit->largest);
  for (uint64_t start = blockIdx.x * tile; start < count; start += gridDim.x * tile) {
    for (uint32_t b = threadIdx.x; b < kLloydBins; b += kThreads) within[b] = counts[b] = 0;
    __syncthreads();
    const uint64_t end = start + tile < count ? start + tile : count;
    for (uint64_t i = start + threadIdx.x; i < end; i += kThreads) {
      const uint32_t magnitude = magnitude_bits(values[i]);
      const uint32_t place = (magnitude >> kLloydBinShift) - lowest;
      if (place < kLloydBins) {
        atomicAdd(counts + place, 1u);
        atomicAdd(within + place, magnitude & kLloydWithin);
      }
    }
    __syncthreads();
    for (uint32_t b = threadIdx.x; b < kLloydBins; b += kThreads) {
      if (counts[b] == 0) continue;
      atomicAdd(fit->counts + b, counts[b]);
      atomic_add(fit->within + b, uint64_t{within[b]});
    }
    __syncthreads();
  }
}

// Fits the levels, in one block. Sums of floats have one order: one thread adds them.
__device__ void fit_levels(const uint32_t* count_at, unsigned bits, Fit* fit, uint8_t* section,
                           uint64_t* section_bytes) {
  __shared__ LloydTables tables;
  const uint32_t count = *count_at, number = lloyd_levels(bits);
  const uint32_t first = lloyd_first_bin(fit->largest);
  for (uint32_t b = threadIdx.x; b < kLloydBins; b += blockDim.x) {
    const uint64_t counted = fit->counts[b];
    const double sum = lloyd_sum(first + b, counted, fit->within[b]);
    tables.counted[b + 1] = counted;
    tables.summed[b + 1] = sum;
    tables.means[b] = lloyd_mean(first + b, counted, sum);
    tables.roots[b + 1] = lloyd_root(first + b, counted);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    uint64_t counted = 0;
    tables.first = first;
    tables.lowest = 0;
    tables.summed[0] = 0.0;
    for (uint32_t b = 1; b <= kLloydBins; ++b) {
      counted += tables.counted[b];
      tables.summed[b] = tables.summed[b - 1] + tables.summed[b];
    }
    tables.counted[0] = count - counted;  // magnitudes below the first bin
    for (uint32_t b = 1; b <= kLloydBins; ++b) tables.counted[b] += tables.counted[b - 1];
  } else if (threadIdx.x == 32) {
    tables.roots[0] = 0.0;
    for (uint32_t b = 1; b <= kLloydBins; ++b)
      tables.roots[b] = tables.roots[b - 1] + tables.roots[b];
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (count == 0) {
    *section_bytes = 0;
    return;
  }
  const bool has_zeros = fit->has_zeros != 0 && lloyd_keeps_zeros(number);
  lloyd_fit(tables, number, has_zeros, fit->levels, fit->thresholds);
  section[0] = static_cast<uint8_t>(bits);
  for (uint32_t i = 0; i < 4 * number; ++i)
    section[1 + i] = static_cast<uint8_t>(float_bits(fit->levels[i / 4]) >> 8 * (i % 4));
  *section_bytes = lloyd_head_bytes(bits) + packed_bytes(count, bits);
}

__device__ void quantize(const float* values, const uint32_t* count_at, unsigned bits,
                         const Fit* fit, uint8_t* section, float* decoded) {
  __shared__ uint8_t codes[kCodeTile];
  __shared__ uint8_t packed[kCodeTile];
  const uint32_t count = *count_at, number = lloyd_levels(bits);
  const uint64_t code_bytes = packed_bytes(count, bits);
  for (uint64_t first = uint64_t{blockIdx.x} * kCodeTile; first < count;
       first += uint64_t{gridDim.x} * kCodeTile) {
    for (uint32_t e = threadIdx.x; e < kCodeTile; e += kThreads) {
      uint32_t code = 0;
      if (first + e < count) {
        const float value = values[first + e];
        const uint32_t magnitude = magnitude_bits(value), sign = float_bits(value) >> 31;
        for (uint32_t t = 0; t + 1 < number; ++t) code += magnitude >= fit->thresholds[t] ? 1 : 0;
        decoded[first + e] = bits_float(float_bits(fit->levels[code]) | sign << 31);
        code |= sign << (bits - 1);
      }
      codes[e] = static_cast<uint8_t>(code);
    }
    write_codes(codes, packed, bits, first / 8 * bits, code_bytes,
                section + lloyd_head_bytes(bits));
  }
}

__device__ void read(const DeviceSection* section, float* values, dr_cuda_result* result) {
  if (skipped(section, result)) return;
  const uint32_t count = section->count;
  const uint8_t* data = section->data;
  const bool first_thread = grid_index() == 0;
  if (count == 0) {
    if (first_thread && section->bytes != 0)
      refuse(result, Refused::value_section_bytes, 0, section->bytes);
    return;
  }
  const unsigned bits = section->bytes == 0 ? 0 : data[0];
  if (bits < 1 || bits > kLloydMostBits) {
    if (first_thread) refuse(result, Refused::lloyd_bits, kLloydMostBits, bits);
    return;
  }
  const uint64_t code_bytes = packed_bytes(count, bits), head = lloyd_head_bytes(bits);
  if (section->bytes != head + code_bytes) {
    if (first_thread)
      refuse(result, Refused::value_section_bytes, head + code_bytes, section->bytes);
    return;
  }
  const uint32_t number = lloyd_levels(bits);
  if (first_thread) {
    uint32_t last = 0;
    for (uint32_t i = 0; i < number; ++i) {
      const uint32_t level = load_u32(data + 1 + 4 * i);
      if (!lloyd_level_is_valid(level, last)) refuse(result, Refused::lloyd_level, 0, level);
      last = level;
    }
    expect_zero_padding(data + head, uint64_t{count} * bits, result);
  }
  const uint32_t groups = count / 8 + (count % 8 != 0), sign = 1u << (bits - 1);
  for (uint32_t group = grid_index(); group < groups; group += grid_stride()) {
    uint64_t codes = load_bits(data + head, code_bytes, uint64_t{8} * group * bits);
    for (uint32_t j = 8 * group; j < 8 * group + 8; ++j, codes >>= bits) {
      if (j >= count) continue;
      const uint32_t code = static_cast<uint32_t>(codes) & (2 * sign - 1);
      const uint32_t level = load_u32(data + 1 + 4 * (code & (sign - 1)));
      values[j] = bits_float(level | (code & sign ? 0x80000000u : 0u));
    }
  }
}

uint64_t section_capacity(uint32_t capacity, const double* parameters) {
  const unsigned bits = lloyd_max_bits(parameters);
  return lloyd_head_bytes(bits) + packed_bytes(capacity, bits);
}

void encode(Device& device, DeviceValueEncoding& encoding) {
  const unsigned bits = lloyd_max_bits(encoding.parameters);
  const uint64_t mark = device.mark();
  Fit* fit = device.zeros<Fit>(1);
  launch<find_extent>(device, blocks_for(encoding.capacity, kEach), kThreads, 0, encoding.values,
                      encoding.count, fit);
  launch<count_bins>(device, blocks_for(encoding.capacity, kEach), kThreads, 0, encoding.values,
                     encoding.count, fit);
  launch<fit_levels>(device, 1, kThreads, 0, encoding.count, bits, fit, encoding.section.data,
                     encoding.section.bytes);
  launch<quantize>(device, blocks_for(encoding.capacity, 8), kThreads, 0, encoding.values,
                   encoding.count, bits, fit, encoding.section.data, encoding.decoded);
  device.release(mark);
}

void decode(Device& device, const DeviceSection* section, uint32_t capacity, uint64_t,
            float* values) {
  launch_elementwise<read>(device, blocks_for(capacity, 8), section, values, device.result());
}

}  // namespace

extern const DeviceValueCodec lloyd_max_device_codec;
const DeviceValueCodec lloyd_max_device_codec = {
    kLloydMax,        "LloydMax", false,      lloyd_max_bits_per_value,
    section_capacity, encode,     most_codes, decode};

}  // namespace cuda
}  // namespace deepreduce
