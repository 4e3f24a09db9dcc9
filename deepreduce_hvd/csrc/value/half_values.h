// Float16 and BFloat16: two bytes per value, rounded to nearest even, saturating.
#ifndef DEEPREDUCE_VALUE_HALF_VALUES_H
#define DEEPREDUCE_VALUE_HALF_VALUES_H

#include "codecs.h"
#include "support/simd.h"
#include "value/half_format.h"

namespace deepreduce {

template <class Format>
struct HalfValues {
  static constexpr ValueCodec codec(int id, const char* name) {
    return {id, name, false, bits_per_value, encode, decode};
  }

 private:
  static double bits_per_value(const double*) { return 16; }

  static void encode(Context& context, ValueEncoding& encoding, ByteWriter& section) {
    DR_CHOOSE(context.simd, narrow)(encoding.values, encoding.count,
                                    section.extend(uint64_t{2} * encoding.count), encoding.decoded);
  }

  static void decode(Context& context, ByteReader& section, uint32_t count, float* values) {
    const uint8_t* halves = section.take(uint64_t{2} * count);
    section.expect_end();
    if (!DR_CHOOSE(context.simd, widen)(halves, count, values))
      corrupt_payload("%s: expected finite %s values, got NaN or Inf", section.section(),
                      Format::kName);
  }

  static DR_INLINE void narrow_all(const float* __restrict values, uint32_t count,
                                   uint8_t* __restrict out, float* __restrict decoded) {
    for (uint32_t i = 0; i < count; ++i) {
      const uint16_t half = Format::narrow(values[i]);
      std::memcpy(out + uint64_t{2} * i, &half, 2);
      decoded[i] = Format::widen(half);
    }
  }

  // Converts all values; returns whether all are finite, since no encoder writes NaN or Inf.
  static DR_INLINE bool widen_all(const uint8_t* __restrict halves, uint32_t count,
                                  float* __restrict values) {
    uint16_t not_finite = 0;
    for (uint32_t i = 0; i < count; ++i) {
      uint16_t half;
      std::memcpy(&half, halves + uint64_t{2} * i, 2);
      not_finite |= !half_is_finite<Format>(half);
      values[i] = Format::widen(half);
    }
    return not_finite == 0;
  }

#define DR_KERNELS(level, attribute)                                                          \
  attribute static void narrow_##level(const float* values, uint32_t count, uint8_t* out,     \
                                       float* decoded) {                                      \
    narrow_all(values, count, out, decoded);                                                  \
  }                                                                                           \
  attribute static bool widen_##level(const uint8_t* halves, uint32_t count, float* values) { \
    return widen_all(halves, count, values);                                                  \
  }

  DR_KERNELS(scalar, )
#if defined(__x86_64__)
  DR_KERNELS(avx2, DR_AVX2)
  DR_KERNELS(avx512, DR_AVX512)
#endif
#undef DR_KERNELS
};

}  // namespace deepreduce
#endif
