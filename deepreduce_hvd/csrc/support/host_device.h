// Marks inline functions that host and CUDA devices share.
#ifndef DEEPREDUCE_HOST_DEVICE_H
#define DEEPREDUCE_HOST_DEVICE_H

#ifdef __CUDACC__
#define DR_HOST_DEVICE __host__ __device__
#else
#define DR_HOST_DEVICE
#endif

// An inline function of one element, which the loops of each SIMD level contain.
#define DR_ELEMENT DR_HOST_DEVICE inline __attribute__((always_inline))

namespace deepreduce {

// std::max and std::min are not available on the device.
template <class T>
DR_HOST_DEVICE constexpr T larger(T a, T b) {
  return a > b ? a : b;
}
template <class T>
DR_HOST_DEVICE constexpr T smaller(T a, T b) {
  return a < b ? a : b;
}

}  // namespace deepreduce

#endif
