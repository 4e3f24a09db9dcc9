// QSGD: stochastic quantization in buckets.
#include "codecs.h"
#include "support/packed_codes.h"
#include "support/simd.h"
#include "value/qsgd_element.h"
#include "value/qsgd_settings.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace deepreduce {
namespace {

float largest_scalar(const float* values, uint32_t n) {
  uint32_t largest = 0;
  for (uint32_t i = 0; i < n; ++i) largest = larger(largest, magnitude_bits(values[i]));
  return bits_float(largest);
}

// The order of summation is part of the format, because it changes bytes: 8 lanes, then halves.
float euclidean_norm(const float* values, uint32_t n) {
  double lanes[8] = {};
  uint32_t i = 0;
  for (; i + 8 <= n; i += 8)
    for (uint32_t lane = 0; lane < 8; ++lane)
      lanes[lane] += static_cast<double>(values[i + lane]) * values[i + lane];
  for (uint32_t lane = 0; i + lane < n; ++lane)
    lanes[lane] += static_cast<double>(values[i + lane]) * values[i + lane];
  for (uint32_t half = 4; half > 0; half /= 2)
    for (uint32_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return qsgd_euclidean_norm(lanes[0]);
}

DR_INLINE void quantize_all(const float* values, uint32_t n, float norm, unsigned bits,
                            uint64_t key, uint32_t first, uint8_t* codes) {
  const float levels = qsgd_levels(bits);
  if (bits == 1) {
    for (uint32_t i = 0; i < n; ++i)
      codes[i] = qsgd_sign_code(values[i], norm, random_uniform(key, first + i));
  } else {
    for (uint32_t i = 0; i < n; ++i)
      codes[i] = qsgd_code(values[i], norm, levels, bits - 1, random_uniform(key, first + i));
  }
}

DR_INLINE void dequantize_all(const uint8_t* __restrict codes, uint32_t n, float norm,
                              unsigned bits, float* __restrict values) {
  const float levels = qsgd_levels(bits);
  if (bits == 1) {
    for (uint32_t i = 0; i < n; ++i) values[i] = qsgd_sign_value(codes[i], norm);
  } else {
    for (uint32_t i = 0; i < n; ++i) values[i] = qsgd_value(codes[i], norm, levels, bits - 1);
  }
}

#define DR_KERNELS(level, attribute)                                                             \
  attribute void quantize_##level(const float* values, uint32_t n, float norm, unsigned bits,    \
                                  uint64_t key, uint32_t first, uint8_t* codes) {                \
    quantize_all(values, n, norm, bits, key, first, codes);                                      \
  }                                                                                              \
  attribute void dequantize_##level(const uint8_t* codes, uint32_t n, float norm, unsigned bits, \
                                    float* values) {                                             \
    dequantize_all(codes, n, norm, bits, values);                                                \
  }

DR_KERNELS(scalar, )
#if defined(__x86_64__)
DR_KERNELS(avx2, DR_AVX2)
DR_KERNELS(avx512, DR_AVX512)

DR_AVX2 float largest_avx2(const float* values, uint32_t n) {
  const __m256i mask = _mm256_set1_epi32(0x7FFFFFFF);
  __m256i largest = _mm256_setzero_si256();
  uint32_t i = 0;
  for (; i + 8 <= n; i += 8)
    largest = _mm256_max_epu32(
        largest,
        _mm256_and_si256(mask, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + i))));
  uint32_t lanes[8];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), largest);
  uint32_t result = float_bits(largest_scalar(values + i, n - i));
  for (const uint32_t lane : lanes) result = lane > result ? lane : result;
  return bits_float(result);
}

constexpr auto largest_avx512 = largest_avx2;
#endif

void encode(Context& context, ValueEncoding& encoding, ByteWriter& section) {
  const QSGDSettings settings = qsgd_settings(encoding.parameters);
  const auto largest = DR_CHOOSE(context.simd, largest);
  const auto quantize = DR_CHOOSE(context.simd, quantize);
  const auto dequantize = DR_CHOOSE(context.simd, dequantize);
  const uint32_t count = encoding.count;
  const uint32_t buckets = qsgd_buckets(count, settings.bucket);
  const uint64_t code_bytes = packed_bytes(count, settings.bits);
  const uint64_t head = qsgd_head_bytes(count, settings.bucket);
  uint8_t* out = section.extend(head + code_bytes + 8);
  const uint16_t bucket_field = static_cast<uint16_t>(settings.bucket);
  out[0] = static_cast<uint8_t>(settings.bits);
  std::memcpy(out + 1, &bucket_field, 2);
  uint8_t* packed = out + head;
  uint8_t* codes = context.arena.array<uint8_t>(settings.bucket + 8);
  for (uint32_t b = 0; b < buckets; ++b) {
    const uint32_t first = b * settings.bucket;
    const uint32_t n = count - first < settings.bucket ? count - first : settings.bucket;
    const float* values = encoding.values + first;
    const float norm = settings.l2 ? euclidean_norm(values, n) : largest(values, n);
    std::memcpy(out + kQSGDHead + uint64_t{4} * b, &norm, 4);
    if (norm > 0) {
      quantize(values, n, norm, settings.bits, encoding.key, first, codes);
    } else {
      std::memset(codes, 0, n);
    }
    std::memset(codes + n, 0, 8);
    pack_codes(context.simd, codes, (n + 7) / 8 * 8, settings.bits, packed);
    dequantize(codes, n, norm, settings.bits, encoding.decoded + first);
    packed += packed_bytes(n, settings.bits);
  }
  section.shrink_to(head + code_bytes);
}

void decode(Context& context, ByteReader& section, uint32_t count, float* values) {
  const unsigned bits = section.get<uint8_t>();
  const uint32_t bucket = section.get<uint16_t>();
  if (!qsgd_is_valid(bits, bucket))
    corrupt_payload(
        "%s: expected 1 to 8 bits in buckets of a multiple of 8 up to 32768, got %u and %u",
        section.section(), bits, bucket);
  const uint32_t buckets = qsgd_buckets(count, bucket);
  const uint8_t* norms = section.take(uint64_t{4} * buckets);
  const uint8_t* packed = section.take(packed_bytes(count, bits));
  section.expect_end();
  expect_zero_padding(packed, uint64_t{count} * bits, section.section());
  const auto dequantize = DR_CHOOSE(context.simd, dequantize);
  uint8_t* codes = context.arena.array<uint8_t>(bucket);
  const uint8_t* end = packed + packed_bytes(count, bits);
  for (uint32_t b = 0; b < buckets; ++b) {
    float norm;
    std::memcpy(&norm, norms + uint64_t{4} * b, 4);
    if (!qsgd_norm_is_valid(float_bits(norm)))
      corrupt_payload("%s: expected finite norms of at least 0, got %g", section.section(),
                      static_cast<double>(norm));
    const uint32_t first = b * bucket;
    const uint32_t n = count - first < bucket ? count - first : bucket;
    unpack_codes(context.simd, packed, end, n, bits, codes);
    dequantize(codes, n, norm, bits, values + first);
    packed += packed_bytes(n, bits);
  }
}

}  // namespace

extern const ValueCodec qsgd_codec;
const ValueCodec qsgd_codec = {kQSGD, "QSGD", false, qsgd_bits_per_value, encode, decode};

}  // namespace deepreduce
