// Error feedback and selection on the device, like csrc/select/select.h. The host does not know the
// results.
#ifndef DEEPREDUCE_CUDA_SELECT_CUH
#define DEEPREDUCE_CUDA_SELECT_CUH

#include "cuda/codecs.cuh"
#include "cuda/encode.cuh"
#include "select/element.h"

namespace deepreduce {
namespace cuda {

// The element type of a gradient of this dtype, and its conversion to float.
template <int dtype>
struct Numbers;
template <>
struct Numbers<DR_FLOAT32> {
  using Storage = float;
  DR_HOST_DEVICE static float to_float(float number) { return number; }
};
template <>
struct Numbers<DR_FLOAT16> {
  using Storage = uint16_t;
  DR_HOST_DEVICE static float to_float(uint16_t number) { return float16_to_float(number); }
};
template <>
struct Numbers<DR_BFLOAT16> {
  using Storage = uint16_t;
  DR_HOST_DEVICE static float to_float(uint16_t number) { return bfloat16_to_float(number); }
};
template <>
struct Numbers<DR_FLOAT64> {
  using Storage = double;
  DR_HOST_DEVICE static float to_float(double number) { return static_cast<float>(number); }
};

// Calls work(Numbers<dtype>()) for a dtype that is known at run time.
template <class Work>
void with_numbers(int dtype, Work work) {
  switch (dtype) {
    case DR_FLOAT16:
      return work(Numbers<DR_FLOAT16>());
    case DR_BFLOAT16:
      return work(Numbers<DR_BFLOAT16>());
    case DR_FLOAT64:
      return work(Numbers<DR_FLOAT64>());
    default:
      return work(Numbers<DR_FLOAT32>());
  }
}

// The accumulated gradient. Kernels take it by value.
struct Accumulated {
  const Inputs* inputs;
  const float* residual;  // null if there is no memory: only the gradient counts
  int dtype;

  __device__ float gradient_at(uint64_t i) const {
    const void* gradient = inputs->gradient;
    switch (dtype) {
      case DR_FLOAT16:
        return float16_to_float(static_cast<const uint16_t*>(gradient)[i]);
      case DR_BFLOAT16:
        return bfloat16_to_float(static_cast<const uint16_t*>(gradient)[i]);
      case DR_FLOAT64:
        return static_cast<float>(static_cast<const double*>(gradient)[i]);
      default:
        return static_cast<const float*>(gradient)[i];
    }
  }
  __device__ float at(uint64_t i) const {
    return residual != nullptr ? residual[i] : gradient_at(i);
  }
};

inline Accumulated accumulated(const Encoding& encoding) {
  return {encoding.inputs, encoding.residual, encoding.dtype};
}

struct DeviceSelection {
  uint32_t capacity;        // host: *count is at most this
  uint32_t* count;          // 0 if the gradient is not finite
  const uint32_t* indices;  // (capacity,) ascending; null (host): all indices 0 .. d - 1
  const float* values;      // (capacity,)
};

// The tile of a block that runs over the gradient: each thread has kVectors groups of 4 adjacent
// elements.
constexpr uint32_t kVectors = 4, kTile = kThreads * 4 * kVectors;
inline uint32_t tiles_of(uint64_t d) { return static_cast<uint32_t>((d + kTile - 1) / kTile); }

// Sets result()->non_finite if the gradient has NaN or Inf. It runs first, and everything else
// depends on its result.
void find_non_finite(Device&, const Encoding&);

// Elements of the sum that are collected while it is computed: those with magnitude bits of at
// least *limit (which is at least 1). The elements of a tile are adjacent and in ascending order:
// counts[tile] elements from starts[tile] on. Tiles have any order. If *found exceeds the capacity,
// some elements are missing.
struct Candidates {
  uint32_t* limit;    // null: nothing is collected
  uint32_t* indices;  // (capacity,)
  float* values;      // (capacity,)
  uint32_t capacity;
  uint32_t* found;
  uint32_t* starts;  // (tiles,)
  uint32_t* counts;  // (tiles,)
};

// Adds the gradient to the memory.
void accumulate(Device&, const dr_codec&, const Encoding&, const Candidates&);

// Accumulates and selects, like accumulate_and_select in csrc/select/select.h. Arguments must be
// checked before.
DeviceSelection select(Device&, const dr_codec&, const Encoding&);

// The sparsifiers. Each one also accumulates.
DeviceSelection select_largest(Device&, const dr_codec&, const Encoding&, uint32_t k);
DeviceSelection select_above(Device&, const dr_codec&, const Encoding&, float threshold);
DeviceSelection select_largest_of_chunks(Device&, const dr_codec&, const Encoding&, uint32_t chunk);
DeviceSelection select_random(Device&, const dr_codec&, const Encoding&, uint32_t k);

// values[i] = the accumulated gradient at indices[i] (null: at i), for i < *count
void gather(Device&, const Accumulated&, const uint32_t* indices, const uint32_t* count,
            uint32_t capacity, float* values);

}  // namespace cuda
}  // namespace deepreduce
#endif
