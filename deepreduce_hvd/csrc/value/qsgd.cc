// QSGD: stochastic quantisation in buckets.
#include <cfloat>
#include <cmath>

#include "bits.h"
#include "codecs.h"
#include "half.h"
#include "random.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace deepreduce {
namespace {

constexpr uint32_t kLargestBucket = 32768;
constexpr unsigned kCodes = 256;

struct Settings {
  unsigned bits;
  uint32_t bucket;
  bool l2;
  float levels;  // s of the paper
};

float levels_of(unsigned bits) { return bits == 1 ? 1.0f : static_cast<float>((1u << (bits - 1)) - 1); }

double bits_a_value(const double* parameters) { return parameters[0] + 32.0 / parameters[1]; }

Settings settings_from(const double* parameters) {
  if (!(parameters[0] >= 1 && parameters[0] <= 8) || !(parameters[1] >= 8 && parameters[1] <= kLargestBucket))
    invalid_argument("QSGD: expected 1 to 8 bits in buckets of 8 to 32768, got %g and %g", parameters[0], parameters[1]);
  const unsigned bits = static_cast<unsigned>(parameters[0]);
  const uint32_t bucket = static_cast<uint32_t>(parameters[1]);
  if (bucket % 8 != 0) invalid_argument("QSGD bucket: expected a multiple of 8, got %u", bucket);
  return {bits, bucket, parameters[2] != 0, levels_of(bits)};
}

float largest_magnitude(const float* values, uint32_t n) {
  uint32_t largest = 0;  // magnitudes compare as their bits do
  for (uint32_t i = 0; i < n; ++i) {
    const uint32_t magnitude = float_bits(values[i]) & 0x7FFFFFFFu;
    largest = magnitude > largest ? magnitude : largest;
  }
  return bits_float(largest);
}

// The order of summation is part of the format's bytes: 8 lanes, then halves.
float euclidean_norm(const float* values, uint32_t n) {
  double lanes[8] = {};
  uint32_t i = 0;
  for (; i + 8 <= n; i += 8)
    for (uint32_t lane = 0; lane < 8; ++lane) lanes[lane] += static_cast<double>(values[i + lane]) * values[i + lane];
  for (uint32_t lane = 0; i + lane < n; ++lane) lanes[lane] += static_cast<double>(values[i + lane]) * values[i + lane];
  for (uint32_t half = 4; half > 0; half /= 2)
    for (uint32_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  const double norm = std::sqrt(lanes[0]);
  return norm > FLT_MAX ? FLT_MAX : static_cast<float>(norm);
}

// One element's code; the GPU runs the same function.
DR_HOST_DEVICE inline uint8_t quantise(float value, float norm, float levels, unsigned sign_shift, float uniform) {
  const float magnitude = bits_float(float_bits(value) & 0x7FFFFFFFu);
  const int level = static_cast<int>((magnitude / norm) * levels + uniform);  // not negative: truncation is floor
  const int largest = static_cast<int>(levels);
  const uint32_t sign = float_bits(value) >> 31;
  return static_cast<uint8_t>((level < largest ? level : largest) | static_cast<int>(sign << sign_shift));
}

DR_HOST_DEVICE inline uint8_t quantise_sign(float value, float norm, float uniform) {
  const int code = static_cast<int>((value / norm + 1.0f) * 0.5f + uniform);
  return static_cast<uint8_t>(code < 1 ? code : 1);
}

inline __attribute__((always_inline)) void quantise_all(const float* values, uint32_t n, float norm, const Settings& settings,
                                                        uint64_t key, uint32_t first, uint8_t* codes) {
  const float levels = settings.levels;
  const unsigned shift = settings.bits - 1;
  if (settings.bits == 1) {
    for (uint32_t i = 0; i < n; ++i) codes[i] = quantise_sign(values[i], norm, random_uniform(key, first + i));
  } else {
    for (uint32_t i = 0; i < n; ++i) codes[i] = quantise(values[i], norm, levels, shift, random_uniform(key, first + i));
  }
}

// codes -> bits, 8 codes to `bits` bytes; n padded to a multiple of 8 with codes of 0, `out` has room for 8 more bytes.
inline void pack_scalar(const uint8_t* codes, uint32_t n, unsigned bits, uint8_t* out) {
  for (uint32_t i = 0; i < n; i += 8, out += bits) {
    uint64_t word = 0;
    for (unsigned j = 0; j < 8; ++j) word |= static_cast<uint64_t>(codes[i + j]) << (j * bits);
    std::memcpy(out, &word, 8);
  }
}

inline void expand_scalar(const uint8_t* packed, uint32_t n, unsigned bits, const float* table, float* values) {
  const uint64_t mask = (1u << bits) - 1;
  for (uint32_t i = 0; i < n; i += 8, packed += bits) {
    uint64_t word;
    std::memcpy(&word, packed, 8);
    for (unsigned j = 0; j < 8; ++j) values[i + j] = table[(word >> (j * bits)) & mask];
  }
}

struct Kernels {
  float (*largest)(const float*, uint32_t);
  void (*quantise)(const float*, uint32_t, float, const Settings&, uint64_t, uint32_t, uint8_t*);
  void (*pack)(const uint8_t*, uint32_t, unsigned, uint8_t*);
};

void quantise_plain(const float* values, uint32_t n, float norm, const Settings& settings, uint64_t key, uint32_t first, uint8_t* codes) {
  quantise_all(values, n, norm, settings, key, first, codes);
}

#if defined(__x86_64__)
#define DR_AVX2 __attribute__((target("avx2,bmi2")))
#define DR_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi2")))

DR_AVX2 float largest_avx2(const float* values, uint32_t n) {
  const __m256i mask = _mm256_set1_epi32(0x7FFFFFFF);
  __m256i largest = _mm256_setzero_si256();
  uint32_t i = 0;
  for (; i + 8 <= n; i += 8)
    largest = _mm256_max_epu32(largest, _mm256_and_si256(mask, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + i))));
  uint32_t lanes[8];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), largest);
  uint32_t result = float_bits(largest_magnitude(values + i, n - i));
  for (const uint32_t lane : lanes) result = lane > result ? lane : result;
  return bits_float(result);
}

DR_AVX2 void quantise_avx2(const float* values, uint32_t n, float norm, const Settings& settings, uint64_t key, uint32_t first, uint8_t* codes) {
  quantise_all(values, n, norm, settings, key, first, codes);
}

DR_AVX512 void quantise_avx512(const float* values, uint32_t n, float norm, const Settings& settings, uint64_t key, uint32_t first, uint8_t* codes) {
  quantise_all(values, n, norm, settings, key, first, codes);
}

DR_AVX2 void pack_avx2(const uint8_t* codes, uint32_t n, unsigned bits, uint8_t* out) {
  const uint64_t mask = 0x0101010101010101ull * ((1u << bits) - 1);
  for (uint32_t i = 0; i < n; i += 8, out += bits) {
    uint64_t eight;
    std::memcpy(&eight, codes + i, 8);
    const uint64_t word = _pext_u64(eight, mask);
    std::memcpy(out, &word, 8);
  }
}
#endif

Kernels kernels_for(Simd simd) {
#if defined(__x86_64__)
  if (simd == Simd::avx512) return {largest_avx2, quantise_avx512, pack_avx2};
  if (simd == Simd::avx2) return {largest_avx2, quantise_avx2, pack_avx2};
#endif
  static_cast<void>(simd);
  return {largest_magnitude, quantise_plain, pack_scalar};
}

// code -> value for a norm; the multiple of the norm is rounded to float32 first.
void fill_table(float norm, unsigned bits, float* table) {
  const float levels = levels_of(bits);
  if (bits == 1) {
    table[0] = -1.0f * norm;
    table[1] = norm;
    return;
  }
  const unsigned half = 1u << (bits - 1);
  for (unsigned level = 0; level < half; ++level) {
    const float multiple = static_cast<float>(level) / levels;
    table[level] = multiple * norm;
    table[half + level] = -multiple * norm;
  }
}

// Whole groups of 8 straight, the rest through a padded copy.
void expand(const uint8_t* packed, uint32_t n, unsigned bits, const float* table, float* values) {
  const uint64_t bytes = packed_bytes(n, bits);
  // a group reads 8 bytes though it owns `bits` of them
  const uint32_t whole = bytes < 8 ? 0 : static_cast<uint32_t>((bytes - 8) / bits + 1);
  const uint32_t straight = (whole < n / 8 ? whole : n / 8) * 8;
  expand_scalar(packed, straight, bits, table, values);
  for (uint32_t i = straight; i < n; i += 8) {
    uint8_t padded[8] = {};
    float eight[8];
    const uint64_t at = uint64_t{i} / 8 * bits;
    std::memcpy(padded, packed + at, bytes - at < 8 ? bytes - at : 8);
    expand_scalar(padded, 8, bits, table, eight);
    std::memcpy(values + i, eight, sizeof(float) * (n - i < 8 ? n - i : 8));
  }
}

void encode(Context& context, ValueEncoding& encoding, ByteWriter& section) {
  const Settings settings = settings_from(encoding.parameters);
  const Kernels kernels = kernels_for(context.simd);
  const uint32_t count = encoding.count;
  const uint32_t buckets = (count + settings.bucket - 1) / settings.bucket;
  const uint64_t code_bytes = packed_bytes(count, settings.bits);
  const uint64_t head = 3 + uint64_t{4} * buckets;
  uint8_t* out = section.extend(head + code_bytes + 8);
  const uint16_t bucket_field = static_cast<uint16_t>(settings.bucket);
  out[0] = static_cast<uint8_t>(settings.bits);
  std::memcpy(out + 1, &bucket_field, 2);
  uint8_t* packed = out + head;
  uint8_t* codes = context.arena.array<uint8_t>(settings.bucket + 8);
  float table[kCodes];
  for (uint32_t b = 0; b < buckets; ++b) {
    const uint32_t first = b * settings.bucket;
    const uint32_t n = count - first < settings.bucket ? count - first : settings.bucket;
    const float* values = encoding.values + first;
    const float norm = settings.l2 ? euclidean_norm(values, n) : kernels.largest(values, n);
    std::memcpy(out + 3 + uint64_t{4} * b, &norm, 4);
    if (norm > 0) {
      kernels.quantise(values, n, norm, settings, encoding.key, first, codes);
    } else {
      std::memset(codes, 0, n);
    }
    std::memset(codes + n, 0, 8);
    kernels.pack(codes, (n + 7) / 8 * 8, settings.bits, packed);
    fill_table(norm, settings.bits, table);
    for (uint32_t i = 0; i < n; ++i) encoding.decoded[first + i] = table[codes[i]];
    packed += packed_bytes(n, settings.bits);
  }
  section.shrink_to(head + code_bytes);
}

void decode(Context&, ByteReader& section, uint32_t count, float* values) {
  const unsigned bits = section.get<uint8_t>();
  const uint32_t bucket = section.get<uint16_t>();
  if (bits < 1 || bits > 8 || bucket < 8 || bucket > kLargestBucket || bucket % 8 != 0)
    corrupt_payload("%s: expected 1 to 8 bits in buckets of a multiple of 8 up to 32768, got %u and %u", section.section(), bits, bucket);
  const uint32_t buckets = static_cast<uint32_t>((uint64_t{count} + bucket - 1) / bucket);
  const uint8_t* norms = section.take(uint64_t{4} * buckets);
  const uint8_t* packed = section.take(packed_bytes(count, bits));
  section.expect_end();
  const unsigned last_bits = static_cast<unsigned>(uint64_t{count} * bits % 8);
  if (last_bits != 0 && (packed[packed_bytes(count, bits) - 1] >> last_bits) != 0)
    corrupt_payload("%s: expected zero padding and the end of the bits", section.section());
  float table[kCodes];
  for (uint32_t b = 0; b < buckets; ++b) {
    float norm;
    std::memcpy(&norm, norms + uint64_t{4} * b, 4);
    if (float_bits(norm) >= 0x7F800000u) corrupt_payload("%s: expected finite norms of at least 0", section.section());
    fill_table(norm, bits, table);
    const uint32_t first = b * bucket;
    const uint32_t n = count - first < bucket ? count - first : bucket;
    expand(packed, n, bits, table, values + first);
    packed += packed_bytes(n, bits);
  }
}

}  // namespace

extern const ValueCodec qsgd_codec;
const ValueCodec qsgd_codec = {kQSGD, "QSGD", false, bits_a_value, encode, decode};

}  // namespace deepreduce
