#include "select/kernels.h"

#include <cfloat>

#include "select/element.h"
#include "support/simd.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace deepreduce {
namespace {

// Signed, because every SIMD level can compare signed integers; the sign bit is 0.
DR_INLINE int32_t magnitude(float value) { return static_cast<int32_t>(magnitude_bits(value)); }

DR_INLINE int32_t signed_limit(uint32_t limit) {
  return limit > INT32_MAX ? INT32_MAX : static_cast<int32_t>(limit);
}

// The loops, written once; the compiler makes the vector code of each level from them.

// Whether no element is bad. Reads several parts in turn, because memory delivers several streams
// faster than one.
template <class Number, class IsBad>
DR_INLINE bool none_loop(const Number* numbers, uint32_t n, IsBad is_bad) {
  using Bits = decltype(is_bad(*numbers));
  constexpr uint32_t kParts = 8;
  const uint32_t part = n / kParts;
  Bits bad = 0;
  for (uint32_t i = 0; i < part; ++i)
    for (uint32_t j = 0; j < kParts; ++j) bad |= is_bad(numbers[j * part + i]);
  for (uint32_t i = kParts * part; i < n; ++i) bad |= is_bad(numbers[i]);
  return bad == 0;
}

DR_INLINE bool finite_float_loop(const uint32_t* numbers, uint32_t n) {
  return none_loop(numbers, n, [](uint32_t number) __attribute__((always_inline)) {
    return static_cast<uint32_t>((number & 0x7F800000u) == 0x7F800000u);
  });
}

DR_INLINE bool finite_half_loop(const uint16_t* numbers, uint32_t n, uint16_t exponent) {
  return none_loop(numbers, n, [=](uint16_t number) __attribute__((always_inline)) {
    return static_cast<uint16_t>((number & exponent) == exponent);
  });
}

DR_INLINE bool finite_double_loop(const double* numbers, uint32_t n) {
  return none_loop(numbers, n, [](double number) __attribute__((always_inline)) {
    return static_cast<uint32_t>((float_bits(static_cast<float>(number)) & 0x7F800000u) ==
                                 0x7F800000u);
  });
}

DR_INLINE void from_float16_loop(const uint16_t* numbers, uint32_t n, float* out) {
  for (uint32_t i = 0; i < n; ++i) out[i] = float16_to_float(numbers[i]);
}

DR_INLINE void from_bfloat16_loop(const uint16_t* numbers, uint32_t n, float* out) {
  for (uint32_t i = 0; i < n; ++i) out[i] = bfloat16_to_float(numbers[i]);
}

DR_INLINE void from_double_loop(const double* numbers, uint32_t n, float* out) {
  for (uint32_t i = 0; i < n; ++i) out[i] = static_cast<float>(numbers[i]);
}

DR_INLINE void add_loop(float* __restrict sum, const float* __restrict addend, uint32_t n) {
  for (uint32_t i = 0; i < n; ++i) sum[i] = next_sum(sum[i], addend[i]);
}

DR_INLINE void add_momentum_loop(float* __restrict sum, float* __restrict velocity,
                                 const float* __restrict addend, float momentum, uint32_t n) {
  for (uint32_t i = 0; i < n; ++i) {
    const float next = next_velocity(momentum, velocity[i], addend[i]);
    velocity[i] = next;
    sum[i] = next_sum(sum[i], next);
  }
}

DR_INLINE void subtract_loop(float* __restrict sum, const float* __restrict addend, float weight,
                             uint32_t n) {
  for (uint32_t i = 0; i < n; ++i) sum[i] = without(sum[i], weight, addend[i]);
}

DR_INLINE uint32_t count_loop(const float* values, uint32_t n, uint32_t limit) {
  const int32_t least = signed_limit(limit);
  uint32_t count = 0;
  for (uint32_t i = 0; i < n; ++i) count += magnitude(values[i]) >= least;
  return count;
}

DR_INLINE uint32_t largest_loop(const float* values, uint32_t n) {
  int32_t largest = 0;
  for (uint32_t i = 0; i < n; ++i)
    largest = magnitude(values[i]) > largest ? magnitude(values[i]) : largest;
  return static_cast<uint32_t>(largest);
}

DR_INLINE uint32_t collect_loop(const float* values, uint32_t from, uint32_t n, uint32_t base,
                                int32_t least, uint32_t* indices, float* kept, uint32_t count) {
  // always writes, but advances only for valid entries: no branch to mispredict
  for (uint32_t i = from; i < n; ++i) {
    indices[count] = base + i;
    kept[count] = values[i];
    count += magnitude(values[i]) >= least;
  }
  return count;
}

uint32_t collect_scalar(const float* values, uint32_t n, uint32_t base, uint32_t limit,
                        uint32_t* indices, float* kept) {
  const int32_t least = signed_limit(limit);
  uint32_t count = 0, i = 0;
  for (; i + 16 <= n; i += 16) {  // most groups are empty, which is quick to test
    uint32_t any = 0;
    for (uint32_t j = i; j < i + 16; ++j) any |= magnitude(values[j]) >= least;
    if (any != 0) count = collect_loop(values, i, i + 16, base, least, indices, kept, count);
  }
  return collect_loop(values, i, n, base, least, indices, kept, count);
}

uint32_t add_collect_scalar(float* sum, const float* addend, uint32_t n, uint32_t base,
                            uint32_t limit, uint32_t* indices, float* kept) {
  add_loop(sum, addend, n);
  return collect_scalar(sum, n, base, limit, indices, kept);
}

// One SIMD level: the loops above compiled for TARGET, and that level's own `collect`.
#define DR_SELECT_LEVEL(LEVEL, TARGET)                                                           \
  struct LEVEL {                                                                                 \
    TARGET static bool finite_float(const uint32_t* x, uint32_t n) {                             \
      return finite_float_loop(x, n);                                                            \
    }                                                                                            \
    TARGET static bool finite_half(const uint16_t* x, uint32_t n, uint16_t e) {                  \
      return finite_half_loop(x, n, e);                                                          \
    }                                                                                            \
    TARGET static bool finite_double(const double* x, uint32_t n) {                              \
      return finite_double_loop(x, n);                                                           \
    }                                                                                            \
    TARGET static void from_float16(const uint16_t* x, uint32_t n, float* out) {                 \
      from_float16_loop(x, n, out);                                                              \
    }                                                                                            \
    TARGET static void from_bfloat16(const uint16_t* x, uint32_t n, float* out) {                \
      from_bfloat16_loop(x, n, out);                                                             \
    }                                                                                            \
    TARGET static void from_double(const double* x, uint32_t n, float* out) {                    \
      from_double_loop(x, n, out);                                                               \
    }                                                                                            \
    TARGET static void add(float* sum, const float* x, uint32_t n) { add_loop(sum, x, n); }      \
    TARGET static void add_momentum(float* sum, float* velocity, const float* x, float momentum, \
                                    uint32_t n) {                                                \
      add_momentum_loop(sum, velocity, x, momentum, n);                                          \
    }                                                                                            \
    TARGET static void subtract(float* sum, const float* x, float weight, uint32_t n) {          \
      subtract_loop(sum, x, weight, n);                                                          \
    }                                                                                            \
    TARGET static uint32_t count(const float* x, uint32_t n, uint32_t limit) {                   \
      return count_loop(x, n, limit);                                                            \
    }                                                                                            \
    TARGET static uint32_t largest(const float* x, uint32_t n) { return largest_loop(x, n); }    \
  };                                                                                             \
  constexpr SelectKernels LEVEL##_kernels = {                                                    \
      LEVEL::finite_float,  LEVEL::finite_half, LEVEL::finite_double, LEVEL::from_float16,       \
      LEVEL::from_bfloat16, LEVEL::from_double, LEVEL::add,           LEVEL::add_momentum,       \
      LEVEL::subtract,      collect_##LEVEL,    add_collect_##LEVEL,  LEVEL::count,              \
      LEVEL::largest}

DR_SELECT_LEVEL(scalar, );

#if defined(__x86_64__)
// Appends the elements values[i] whose bit i of `mask` is 1; returns the new count.
DR_INLINE uint32_t append_masked(uint64_t mask, const float* values, uint32_t base,
                                 uint32_t* indices, float* kept, uint32_t count) {
  const uint32_t end = count + static_cast<uint32_t>(__builtin_popcountll(mask));
  // there are rarely more than two, so two are always written, without a branch to mispredict
  for (int j = 0; j < 2; ++j) {
    const uint32_t at = static_cast<uint32_t>(__builtin_ctzll(mask | uint64_t{1} << 63));
    indices[count] = base + at;
    kept[count++] = values[at];
    mask &= mask - 1;
  }
  for (; mask != 0; mask &= mask - 1) {
    const uint32_t at = static_cast<uint32_t>(__builtin_ctzll(mask));
    indices[count] = base + at;
    kept[count++] = values[at];
  }
  return end;
}

// Returns a mask of 64 bits: bit i is 1 if the magnitude of values[i] is at least `least`. Before
// that, it adds the addend to the values if `adds`.
template <bool adds>
DR_AVX2 DR_INLINE uint64_t mask_of_large_avx2(float* values, const float* addend, int32_t least) {
  const __m256i below = _mm256_set1_epi32(least - 1),
                magnitude_mask = _mm256_set1_epi32(0x7FFFFFFF);
  const __m256 lowest_sum = _mm256_set1_ps(-FLT_MAX), highest_sum = _mm256_set1_ps(FLT_MAX);
  uint64_t mask = 0;
  for (uint32_t j = 0; j < 64; j += 8) {
    __m256 value = _mm256_loadu_ps(values + j);
    if (adds) {  // as next_sum, also for NaN: these instructions return their second argument then
      value = _mm256_add_ps(value, _mm256_loadu_ps(addend + j));
      value = _mm256_min_ps(highest_sum, _mm256_max_ps(lowest_sum, value));
      _mm256_storeu_ps(values + j, value);
    }
    const __m256i bits = _mm256_and_si256(_mm256_castps_si256(value), magnitude_mask);
    const int eight = _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(bits, below)));
    mask |= static_cast<uint64_t>(eight) << j;
  }
  return mask;
}

DR_AVX2 uint32_t collect_avx2(const float* values, uint32_t n, uint32_t base, uint32_t limit,
                              uint32_t* indices, float* kept) {
  const int32_t least = signed_limit(limit);
  uint32_t count = 0, i = 0;
  for (; i + 64 <= n; i += 64) {
    const uint64_t mask = mask_of_large_avx2<false>(const_cast<float*>(values + i), nullptr, least);
    count = append_masked(mask, values + i, base + i, indices, kept, count);
  }
  return collect_loop(values, i, n, base, least, indices, kept, count);
}

DR_AVX2 uint32_t add_collect_avx2(float* sum, const float* addend, uint32_t n, uint32_t base,
                                  uint32_t limit, uint32_t* indices, float* kept) {
  const int32_t least = signed_limit(limit);
  uint32_t count = 0, i = 0;
  for (; i + 64 <= n; i += 64) {
    const uint64_t mask = mask_of_large_avx2<true>(sum + i, addend + i, least);
    count = append_masked(mask, sum + i, base + i, indices, kept, count);
  }
  add_loop(sum + i, addend + i, n - i);
  return collect_loop(sum, i, n, base, least, indices, kept, count);
}

// As mask_of_large_avx2. Does not use compress instructions: at usual densities, a store for every
// 16 elements takes longer than tests of 64 bits.
template <bool adds>
DR_AVX512 DR_INLINE uint64_t mask_of_large_avx512(float* values, const float* addend,
                                                  int32_t least) {
  const __m512i lowest = _mm512_set1_epi32(least), magnitude_mask = _mm512_set1_epi32(0x7FFFFFFF);
  const __m512 lowest_sum = _mm512_set1_ps(-FLT_MAX), highest_sum = _mm512_set1_ps(FLT_MAX);
  uint64_t mask = 0;
  for (uint32_t j = 0; j < 64; j += 16) {
    __m512 value = _mm512_loadu_ps(values + j);
    if (adds) {  // as next_sum, also for NaN: these instructions return their second argument then
      value = _mm512_add_ps(value, _mm512_loadu_ps(addend + j));
      // all lanes; GCC 12 warns of uninitialized lanes in the forms without a mask
      value = _mm512_maskz_max_ps(0xFFFF, lowest_sum, value);
      value = _mm512_maskz_min_ps(0xFFFF, highest_sum, value);
      _mm512_storeu_ps(values + j, value);
    }
    const __m512i bits = _mm512_and_si512(_mm512_castps_si512(value), magnitude_mask);
    mask |= static_cast<uint64_t>(_mm512_cmpge_epi32_mask(bits, lowest)) << j;
  }
  return mask;
}

DR_AVX512 uint32_t collect_avx512(const float* values, uint32_t n, uint32_t base, uint32_t limit,
                                  uint32_t* indices, float* kept) {
  const int32_t least = signed_limit(limit);
  uint32_t count = 0, i = 0;
  for (; i + 64 <= n; i += 64) {
    const uint64_t mask =
        mask_of_large_avx512<false>(const_cast<float*>(values + i), nullptr, least);
    count = append_masked(mask, values + i, base + i, indices, kept, count);
  }
  return collect_loop(values, i, n, base, least, indices, kept, count);
}

DR_AVX512 uint32_t add_collect_avx512(float* sum, const float* addend, uint32_t n, uint32_t base,
                                      uint32_t limit, uint32_t* indices, float* kept) {
  const int32_t least = signed_limit(limit);
  uint32_t count = 0, i = 0;
  for (; i + 64 <= n; i += 64) {
    const uint64_t mask = mask_of_large_avx512<true>(sum + i, addend + i, least);
    count = append_masked(mask, sum + i, base + i, indices, kept, count);
  }
  add_loop(sum + i, addend + i, n - i);
  return collect_loop(sum, i, n, base, least, indices, kept, count);
}

DR_SELECT_LEVEL(avx2, DR_AVX2);
DR_SELECT_LEVEL(avx512, DR_AVX512);
#endif

}  // namespace

const SelectKernels& select_kernels(Simd simd) {
#if defined(__x86_64__)
  if (simd == Simd::avx512) return avx512_kernels;
  if (simd == Simd::avx2) return avx2_kernels;
#endif
  (void)simd;
  return scalar_kernels;
}

}  // namespace deepreduce
