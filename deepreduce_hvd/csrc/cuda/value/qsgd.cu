// QSGD: a team of threads computes the norm of each bucket. Then tiles of codes are packed in
// shared memory and copied to the section in whole words.
#include "cuda/codecs.cuh"
#include "cuda/value/packed_codes.cuh"
#include "value/qsgd_element.h"
#include "value/qsgd_settings.h"

namespace deepreduce {
namespace cuda {
namespace {

constexpr uint32_t kLanes = 8, kTile = kCodeTile;

// Computes the largest magnitude, or, in teams of 8, the Euclidean norm. The order of its sum
// affects the bytes.
template <bool l2, uint32_t team>
__device__ void find_norms(const float* values, const uint32_t* count_at, uint32_t bucket,
                           float* norms, uint8_t* section) {
  static_assert(!l2 || team == kLanes, "eight lanes are part of the format's bytes");
  const uint32_t count = *count_at, buckets = qsgd_buckets(count, bucket),
                 lane = threadIdx.x % team;
  const uint32_t warp_first = (grid_index() / 32) * (32 / team), step = grid_stride() / team;
  for (uint32_t base = warp_first; base < buckets; base += step) {  // warps stay together
    const uint32_t b = base + threadIdx.x % 32 / team;
    const uint64_t first = uint64_t{b} * bucket;
    const uint32_t n =
        b < buckets ? static_cast<uint32_t>(smaller<uint64_t>(bucket, count - first)) : 0;
    double squares = 0.0;
    uint32_t largest = 0;  // magnitudes compare like their bits
    for (uint32_t i = lane; i < n; i += team) {
      const float value = values[first + i];
      if (l2) {
        squares += static_cast<double>(value) * value;
      } else {
        largest = larger(largest, magnitude_bits(value));
      }
    }
    for (uint32_t half = team / 2; half > 0; half /= 2) {
      if (l2) {
        squares += __shfl_xor_sync(0xFFFFFFFFu, squares, half);
      } else {
        largest = larger(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, half));
      }
    }
    if (lane != 0 || n == 0) continue;
    const float norm = l2 ? qsgd_euclidean_norm(squares) : bits_float(largest);
    norms[b] = norm;
    uint8_t* out = section + kQSGDHead + uint64_t{4} * b;
    for (int byte = 0; byte < 4; ++byte)
      out[byte] = static_cast<uint8_t>(float_bits(norm) >> 8 * byte);
  }
}

__device__ float decoded_of(uint8_t code, float norm, unsigned bits, float levels) {
  return bits == 1 ? qsgd_sign_value(code, norm) : qsgd_value(code, norm, levels, bits - 1);
}

__device__ void quantize(const float* values, const uint32_t* count_at, const uint64_t* key_at,
                         unsigned bits, uint32_t bucket, const float* norms, uint8_t* section,
                         uint64_t* section_bytes, float* decoded) {
  __shared__ uint8_t codes[kTile];
  __shared__ uint8_t packed[kTile];
  const uint32_t count = *count_at;
  const uint64_t key = *key_at;
  const float levels = qsgd_levels(bits);
  const uint64_t code_bytes = packed_bytes(count, bits), head = qsgd_head_bytes(count, bucket);
  if (grid_index() == 0) {
    section[0] = static_cast<uint8_t>(bits);
    section[1] = static_cast<uint8_t>(bucket);
    section[2] = static_cast<uint8_t>(bucket >> 8);
    *section_bytes = head + code_bytes;
  }
  for (uint64_t first = uint64_t{blockIdx.x} * kTile; first < count;
       first += uint64_t{gridDim.x} * kTile) {
    for (uint32_t e = threadIdx.x; e < kTile; e += kThreads) {
      uint8_t code = 0;
      if (first + e < count) {
        const uint32_t i = static_cast<uint32_t>(first) + e;
        const float norm = norms[i / bucket], value = values[i], uniform = random_uniform(key, i);
        if (norm > 0)
          code = bits == 1 ? qsgd_sign_code(value, norm, uniform)
                           : qsgd_code(value, norm, levels, bits - 1, uniform);
        decoded[i] = decoded_of(code, norm, bits, levels);
      }
      codes[e] = code;
    }
    write_codes(codes, packed, bits, first / 8 * bits, code_bytes, section + head);
  }
}

__device__ void read(const DeviceSection* section, float* values, dr_cuda_result* result) {
  if (skipped(section, result)) return;
  const uint32_t count = section->count;
  const uint8_t* data = section->data;
  const bool first_thread = grid_index() == 0;
  if (section->bytes < kQSGDHead) {
    if (first_thread) refuse(result, Refused::value_section_bytes, kQSGDHead, section->bytes);
    return;
  }
  const unsigned bits = data[0];
  const uint32_t bucket = data[1] | static_cast<uint32_t>(data[2]) << 8;
  if (!qsgd_is_valid(bits, bucket)) {
    if (first_thread)
      refuse(result, Refused::qsgd_head, kLargestBucket, bits + 256 * uint64_t{bucket});
    return;
  }
  const uint64_t code_bytes = packed_bytes(count, bits), head = qsgd_head_bytes(count, bucket);
  if (section->bytes != head + code_bytes) {
    if (first_thread)
      refuse(result, Refused::value_section_bytes, head + code_bytes, section->bytes);
    return;
  }
  if (first_thread) expect_zero_padding(data + head, uint64_t{count} * bits, result);
  const float levels = qsgd_levels(bits);
  const uint32_t groups = count / 8 + (count % 8 != 0);
  for (uint32_t group = grid_index(); group < groups; group += grid_stride()) {
    const uint32_t i = 8 * group;  // a bucket holds whole groups
    const float norm = bits_float(load_u32(data + kQSGDHead + uint64_t{4} * (i / bucket)));
    if (!qsgd_norm_is_valid(float_bits(norm))) refuse(result, Refused::norm, 0, float_bits(norm));
    uint64_t codes = load_bits(data + head, code_bytes, uint64_t{8} * group * bits);
    for (uint32_t j = i; j < i + 8; ++j, codes >>= bits)
      if (j < count)
        values[j] =
            decoded_of(static_cast<uint8_t>(codes & ((1u << bits) - 1)), norm, bits, levels);
  }
}

uint64_t section_capacity(uint32_t capacity, const double* parameters) {
  const QSGDSettings settings = qsgd_settings(parameters);
  return qsgd_head_bytes(capacity, settings.bucket) + packed_bytes(capacity, settings.bits);
}

// `team`: threads of a bucket.
template <bool l2, uint32_t team>
void find_all_norms(Device& device, const DeviceValueEncoding& encoding, uint32_t bucket,
                    float* norms) {
  const uint32_t buckets = qsgd_buckets(encoding.capacity, bucket);
  launch<find_norms<l2, team>>(device, blocks_for(uint64_t{buckets} * team), kThreads, 0,
                               encoding.values, encoding.count, bucket, norms,
                               encoding.section.data);
}

void encode(Device& device, DeviceValueEncoding& encoding) {
  const QSGDSettings settings = qsgd_settings(encoding.parameters);
  const uint64_t mark = device.mark();
  const uint32_t buckets = qsgd_buckets(encoding.capacity, settings.bucket);
  float* norms = device.array<float>(buckets);
  if (settings.l2)
    find_all_norms<true, kLanes>(device, encoding, settings.bucket, norms);
  else if (settings.bucket < 256)
    find_all_norms<false, kLanes>(device, encoding, settings.bucket, norms);
  else
    find_all_norms<false, 32>(device, encoding, settings.bucket, norms);
  launch<quantize>(device, blocks_for(encoding.capacity, 8), kThreads, 0, encoding.values,
                   encoding.count, encoding.key, settings.bits, settings.bucket, norms,
                   encoding.section.data, encoding.section.bytes, encoding.decoded);
  device.release(mark);
}

void decode(Device& device, const DeviceSection* section, uint32_t capacity, uint64_t,
            float* values) {
  launch_elementwise<read>(device, blocks_for(capacity, 8), section, values, device.result());
}

}  // namespace

extern const DeviceValueCodec qsgd_device_codec;
const DeviceValueCodec qsgd_device_codec = {
    kQSGD, "QSGD", false, qsgd_bits_per_value, section_capacity, encode, most_codes, decode};

}  // namespace cuda
}  // namespace deepreduce
