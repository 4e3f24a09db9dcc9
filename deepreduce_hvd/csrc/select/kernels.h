// The inner loops of selection, one table per SIMD level. All levels compute the same bits.
#ifndef DEEPREDUCE_SELECT_KERNELS_H
#define DEEPREDUCE_SELECT_KERNELS_H

#include "base.h"

namespace deepreduce {

// Elements per block of a pass. A block of gradient, state and intermediate results fits in the
// level-1 cache.
constexpr uint32_t kSelectBlock = 2048;
// `collect` and `add_collect` may write this many entries past the last valid one.
constexpr uint32_t kCollectSlack = 16;

// "bits" below: the bits of a float without its sign; as integers they have the order of
// magnitudes.
struct SelectKernels {
  // Whether there is no NaN or Inf; for double: also after conversion to float.
  bool (*finite_float)(const uint32_t* numbers, uint32_t n);
  bool (*finite_half)(const uint16_t* numbers, uint32_t n, uint16_t exponent);
  bool (*finite_double)(const double* numbers, uint32_t n);
  void (*from_float16)(const uint16_t* numbers, uint32_t n, float* out);
  void (*from_bfloat16)(const uint16_t* numbers, uint32_t n, float* out);
  void (*from_double)(const double* numbers, uint32_t n, float* out);
  // sum = saturate(sum + addend)
  void (*add)(float* sum, const float* addend, uint32_t n);
  // velocity = saturate(momentum * velocity + addend); sum = saturate(sum + velocity)
  void (*add_momentum)(float* sum, float* velocity, const float* addend, float momentum,
                       uint32_t n);
  // sum = saturate(sum - weight * addend)
  void (*subtract)(float* sum, const float* addend, float weight, uint32_t n);
  // Collects elements with bits >= limit, in order: base + position, and value. Returns their
  // number.
  uint32_t (*collect)(const float* values, uint32_t n, uint32_t base, uint32_t limit,
                      uint32_t* indices, float* kept);
  // `add`, and `collect` of the sum, in one pass.
  uint32_t (*add_collect)(float* sum, const float* addend, uint32_t n, uint32_t base,
                          uint32_t limit, uint32_t* indices, float* kept);
  uint32_t (*count)(const float* values, uint32_t n, uint32_t limit);
  uint32_t (*largest)(const float* values, uint32_t n);
};

const SelectKernels& select_kernels(Simd simd);

}  // namespace deepreduce
#endif
