// LloydMax: the sign, and the number of one of a few levels fitted to the magnitudes.
#include "codecs.h"
#include "support/packed_codes.h"
#include "support/simd.h"
#include "value/lloyd_max_levels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace deepreduce {
namespace {

constexpr uint32_t kBlock = 1024;  // values that are packed at a time

// The smallest and the largest magnitude, as magnitude_bits.
struct Extent {
  uint32_t smallest, largest;
};

DR_INLINE Extent extent_of(const float* values, uint32_t n) {
  uint32_t smallest = INT32_MAX, largest = 0;
  for (uint32_t i = 0; i < n; ++i) {
    const uint32_t magnitude = magnitude_bits(values[i]);
    smallest = magnitude < smallest ? magnitude : smallest;
    largest = magnitude > largest ? magnitude : largest;
  }
  return {smallest, largest};
}

// Applies one threshold after another to a whole block, because such loops can be vectorized. n is
// at most kBlock.
DR_INLINE void quantize_all(const float* __restrict values, uint32_t n, unsigned bits,
                            const float* __restrict levels, const uint32_t* __restrict thresholds,
                            uint8_t* __restrict codes, float* __restrict decoded) {
  int32_t magnitudes[kBlock];
  uint32_t numbers[kBlock], found[kBlock];
  for (uint32_t i = 0; i < n; ++i) {
    magnitudes[i] = static_cast<int32_t>(magnitude_bits(values[i]));
    numbers[i] = 0;
    found[i] = float_bits(levels[0]);
  }
  for (uint32_t t = 0; t + 1 < lloyd_levels(bits); ++t) {
    const int32_t threshold = static_cast<int32_t>(thresholds[t]);
    const uint32_t level = float_bits(levels[t + 1]);
    for (uint32_t i = 0; i < n; ++i) {
      numbers[i] += magnitudes[i] >= threshold ? 1 : 0;
      found[i] = magnitudes[i] >= threshold ? level : found[i];
    }
  }
  for (uint32_t i = 0; i < n; ++i) {
    const uint32_t sign = float_bits(values[i]) >> 31;
    codes[i] = static_cast<uint8_t>(numbers[i] | sign << (bits - 1));
    decoded[i] = bits_float(found[i] | sign << 31);
  }
}

#define DR_KERNELS(level, attribute)                                                               \
  attribute Extent extent_##level(const float* values, uint32_t n) {                               \
    return extent_of(values, n);                                                                   \
  }                                                                                                \
  attribute void quantize_##level(const float* values, uint32_t n, unsigned bits,                  \
                                  const float* levels, const uint32_t* thresholds, uint8_t* codes, \
                                  float* decoded) {                                                \
    quantize_all(values, n, bits, levels, thresholds, codes, decoded);                             \
  }

DR_KERNELS(scalar, )
#if defined(__x86_64__)
DR_KERNELS(avx2, DR_AVX2)
DR_KERNELS(avx512, DR_AVX512)
#endif

// values[i] = table[codes[i]], for codes below the 2 * kLloydMostLevels entries of the table.
void look_up_scalar(const uint8_t* codes, uint32_t n, const float* table, float* values) {
  for (uint32_t i = 0; i < n; ++i) values[i] = table[codes[i]];
}
#if defined(__x86_64__)
static_assert(2 * kLloydMostLevels == 16, "the table fills one or two registers");
DR_AVX2 void look_up_avx2(const uint8_t* codes, uint32_t n, const float* table, float* values) {
  const __m256 first = _mm256_loadu_ps(table), second = _mm256_loadu_ps(table + 8);
  uint32_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256i eight =
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i)));
    const __m256 is_second = _mm256_castsi256_ps(_mm256_slli_epi32(eight, 28));
    _mm256_storeu_ps(values + i,
                     _mm256_blendv_ps(_mm256_permutevar8x32_ps(first, eight),
                                      _mm256_permutevar8x32_ps(second, eight), is_second));
  }
  look_up_scalar(codes + i, n - i, table, values + i);
}
DR_AVX512 void look_up_avx512(const uint8_t* codes, uint32_t n, const float* table, float* values) {
  const __m512 all = _mm512_loadu_ps(table);
  uint32_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m128i sixteen = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i));
    // all lanes; GCC 12 warns of uninitialized lanes in the forms without a mask
    _mm512_storeu_ps(values + i, _mm512_maskz_permutexvar_ps(
                                     0xFFFF, _mm512_maskz_cvtepu8_epi32(0xFFFF, sixteen), all));
  }
  look_up_scalar(codes + i, n - i, table, values + i);
}
#endif

// Counts the magnitudes in bins and makes the tables for the fit. count is at least 1.
void make_tables(Context& context, const float* values, uint32_t count, uint32_t largest,
                 LloydTables& tables) {
  uint32_t* counts = context.arena.zeros<uint32_t>(kLloydBins);
  uint64_t* within = context.arena.zeros<uint64_t>(kLloydBins);
  tables.first = lloyd_first_bin(largest);
  uint32_t below = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t magnitude = magnitude_bits(values[i]);
    const uint32_t place = (magnitude >> kLloydBinShift) - tables.first;
    if (place < kLloydBins) {
      ++counts[place];
      within[place] += magnitude & kLloydWithin;
    } else {
      ++below;
    }
  }
  uint32_t b = 0;
  // The bin of the largest magnitude is not empty, unless a program changes its gradient meanwhile.
  while (b + 1 < kLloydBins && counts[b] == 0) ++b;
  tables.lowest = b;
  tables.counted[b] = below;
  tables.summed[b] = tables.roots[b] = 0.0;
  for (; b < kLloydBins; ++b) {
    const uint32_t bin = tables.first + b;
    const double sum = lloyd_sum(bin, counts[b], within[b]);
    tables.means[b] = lloyd_mean(bin, counts[b], sum);
    tables.counted[b + 1] = tables.counted[b] + counts[b];
    tables.summed[b + 1] = tables.summed[b] + sum;
    tables.roots[b + 1] = tables.roots[b] + lloyd_root(bin, counts[b]);
  }
}

void encode(Context& context, ValueEncoding& encoding, ByteWriter& section) {
  const unsigned bits = lloyd_max_bits(encoding.parameters);
  const uint32_t number = lloyd_levels(bits), count = encoding.count;
  if (count == 0) return;
  const auto quantize = DR_CHOOSE(context.simd, quantize);
  float levels[kLloydMostLevels];
  uint32_t thresholds[kLloydMostLevels];
  LloydTables* tables = context.arena.array<LloydTables>(1);
  const Extent extent = DR_CHOOSE(context.simd, extent)(encoding.values, count);
  make_tables(context, encoding.values, count, extent.largest, *tables);
  const bool has_zeros = extent.smallest == 0 && lloyd_keeps_zeros(number);
  lloyd_fit(*tables, number, has_zeros, levels, thresholds);
  const uint64_t head = lloyd_head_bytes(bits), code_bytes = packed_bytes(count, bits);
  uint8_t* out = section.extend(head + code_bytes + 8);
  out[0] = static_cast<uint8_t>(bits);
  std::memcpy(out + 1, levels, uint64_t{4} * number);
  uint8_t* packed = out + head;
  uint8_t* codes = context.arena.array<uint8_t>(kBlock + 8);
  for (uint32_t first = 0; first < count; first += kBlock) {
    const uint32_t n = smaller(kBlock, count - first);
    quantize(encoding.values + first, n, bits, levels, thresholds, codes, encoding.decoded + first);
    std::memset(codes + n, 0, 8);
    pack_codes(context.simd, codes, (n + 7) / 8 * 8, bits, packed);
    packed += packed_bytes(n, bits);
  }
  section.shrink_to(head + code_bytes);
}

void decode(Context& context, ByteReader& section, uint32_t count, float* values) {
  if (count == 0) return section.expect_end();
  const unsigned bits = section.get<uint8_t>();
  if (bits < 1 || bits > kLloydMostBits)
    corrupt_payload("%s: expected 1 to %u bits per value, got %u", section.section(),
                    kLloydMostBits, bits);
  const uint32_t number = lloyd_levels(bits);
  float table[2 * kLloydMostLevels] = {};
  std::memcpy(table, section.take(uint64_t{4} * number), uint64_t{4} * number);
  uint32_t last = 0;
  for (uint32_t i = 0; i < number; ++i) {
    if (!lloyd_level_is_valid(float_bits(table[i]), last))
      corrupt_payload("%s: expected finite levels of at least %g, in ascending order, got %g",
                      section.section(), static_cast<double>(bits_float(last)),
                      static_cast<double>(table[i]));
    last = float_bits(table[i]);
    table[number + i] = -table[i];
  }
  const uint8_t* packed = section.take(packed_bytes(count, bits));
  section.expect_end();
  expect_zero_padding(packed, uint64_t{count} * bits, section.section());
  const uint8_t* end = packed + packed_bytes(count, bits);
  uint8_t* codes = context.arena.array<uint8_t>(kBlock);
  const auto look_up = DR_CHOOSE(context.simd, look_up);
  for (uint32_t first = 0; first < count; first += kBlock) {
    const uint32_t n = smaller(kBlock, count - first);
    unpack_codes(context.simd, packed, end, n, bits, codes);
    look_up(codes, n, table, values + first);
    packed += packed_bytes(n, bits);
  }
}

}  // namespace

extern const ValueCodec lloyd_max_codec;
const ValueCodec lloyd_max_codec = {kLloydMax, "LloydMax", false, lloyd_max_bits_per_value,
                                    encode,    decode};

}  // namespace deepreduce
