// Error feedback and selection on the device: csrc/select/select.h, of which the host knows no
// result.
#ifndef DEEPREDUCE_CUDA_SELECT_CUH
#define DEEPREDUCE_CUDA_SELECT_CUH

#include "cuda/codecs.cuh"
#include "cuda/deepreduce_cuda.h"
#include "select/element.h"

namespace deepreduce {
namespace cuda {

// The numbers of a gradient's dtype.
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

// Calls work(Numbers<dtype>()).
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

// Where the accumulated gradient lies: kernels take it by value.
struct Accumulated {
  const void* gradient;
  const float* residual;  // null: the gradient is all
  int dtype;

  __device__ float gradient_at(uint64_t i) const {
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

inline Accumulated accumulated(const dr_cuda_encoding& encoding) {
  return {encoding.gradient, encoding.residual, encoding.dtype};
}

struct DeviceSelection {
  uint32_t capacity;        // host: *count is at most this
  uint32_t* count;          // 0 when the gradient is not finite
  const uint32_t* indices;  // (capacity,) ascending; null (host): all of 0 .. d - 1
  const float* values;      // (capacity,)
};

// Elements at a time of a block that goes over the gradient: each thread has kVectors times 4 that
// lie together.
constexpr uint32_t kVectors = 4, kTile = kThreads * 4 * kVectors;
inline uint32_t tiles_of(uint64_t d) { return static_cast<uint32_t>((d + kTile - 1) / kTile); }

// Sets result()->non_finite when the gradient has a NaN or an infinity; comes first, everything
// else heeds it.
void find_non_finite(Device&, const dr_cuda_encoding&);

// What of the sum is collected on the way: elements whose magnitude bits are at least *limit (which
// is at least 1). Those of a tile lie together in ascending order, at starts[tile], counts[tile] of
// them; tiles lie in any order. When *found exceeds the capacity, some are missing.
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
void accumulate(Device&, const dr_codec&, const dr_cuda_encoding&, const Candidates&);

// accumulates and selects, as accumulate_and_select of csrc/select/select.h. Arguments must have
// been checked.
DeviceSelection select(Device&, const dr_codec&, const dr_cuda_encoding&);

// The sparsifiers; each accumulates.
DeviceSelection select_largest(Device&, const dr_codec&, const dr_cuda_encoding&, uint32_t k);
DeviceSelection select_above(Device&, const dr_codec&, const dr_cuda_encoding&, float threshold);
DeviceSelection select_largest_of_chunks(Device&, const dr_codec&, const dr_cuda_encoding&,
                                         uint32_t chunk);
DeviceSelection select_random(Device&, const dr_codec&, const dr_cuda_encoding&, uint32_t k);

// values[i] = the accumulated gradient at indices[i] (null: at i), i < *count
void gather(Device&, const Accumulated&, const uint32_t* indices, const uint32_t* count,
            uint32_t capacity, float* values);

}  // namespace cuda
}  // namespace deepreduce
#endif
