// Function multiversioning: one loop, always inlined, compiled once per SIMD level and selected at
// run time.
#ifndef DEEPREDUCE_SIMD_H
#define DEEPREDUCE_SIMD_H

#include "base.h"

#define DR_INLINE inline __attribute__((always_inline))

// Attributes of a function compiled for a SIMD level, and the selection among name_scalar,
// name_avx2 and name_avx512.
#if defined(__x86_64__)
#define DR_AVX2 __attribute__((target("avx2,bmi,bmi2,popcnt")))
#define DR_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi,bmi2,popcnt")))
#define DR_CHOOSE(simd, name) \
  ((simd) == Simd::avx512 ? name##_avx512 : (simd) == Simd::avx2 ? name##_avx2 : name##_scalar)
#else
#define DR_AVX2
#define DR_AVX512
#define DR_CHOOSE(simd, name) ((void)(simd), name##_scalar)
#endif

#endif
