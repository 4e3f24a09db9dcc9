// BFloat16: two bytes a value, rounded to nearest even, saturating.
#include "codecs.h"
#include "half.h"
#include "simd.h"

namespace deepreduce {
namespace {

constexpr uint16_t kExponent = 0x7F80u;  // all ones: NaN or Inf, which no encoder writes

double bits_a_value(const double*) { return 16; }

DR_INLINE void round_all(const float* __restrict values, uint32_t count, uint8_t* __restrict out, float* __restrict decoded) {
  for (uint32_t i = 0; i < count; ++i) {
    const uint16_t half = float_to_bfloat16(values[i]);
    std::memcpy(out + uint64_t{2} * i, &half, 2);
    decoded[i] = bfloat16_to_float(half);
  }
}

// Whether all are finite.
DR_INLINE bool widen_all(const uint8_t* __restrict halves, uint32_t count, float* __restrict values) {
  uint16_t not_finite = 0;
  for (uint32_t i = 0; i < count; ++i) {
    uint16_t half;
    std::memcpy(&half, halves + uint64_t{2} * i, 2);
    not_finite |= (half & kExponent) == kExponent;
    values[i] = bfloat16_to_float(half);
  }
  return not_finite == 0;
}

#define DR_KERNELS(level, attribute)                                                                      \
  attribute void round_##level(const float* values, uint32_t count, uint8_t* out, float* decoded) {       \
    round_all(values, count, out, decoded);                                                               \
  }                                                                                                       \
  attribute bool widen_##level(const uint8_t* halves, uint32_t count, float* values) { return widen_all(halves, count, values); }

DR_KERNELS(scalar, )
#if defined(__x86_64__)
DR_KERNELS(avx2, DR_AVX2)
DR_KERNELS(avx512, DR_AVX512)
#endif

void encode(Context& context, ValueEncoding& encoding, ByteWriter& section) {
  DR_CHOOSE(context.simd, round)(encoding.values, encoding.count, section.extend(uint64_t{2} * encoding.count), encoding.decoded);
}

void decode(Context& context, ByteReader& section, uint32_t count, float* values) {
  const uint8_t* halves = section.take(uint64_t{2} * count);
  section.expect_end();
  if (!DR_CHOOSE(context.simd, widen)(halves, count, values))
    corrupt_payload("%s: expected finite bfloat16 values, got NaN or Inf", section.section());
}

}  // namespace

extern const ValueCodec bfloat16_codec;
const ValueCodec bfloat16_codec = {kBFloat16, "BFloat16", false, bits_a_value, encode, decode};

}  // namespace deepreduce
