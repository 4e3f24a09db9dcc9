// What the benchmarks of single stages share: memory as a training step finds it, a clock, the
// median, the best SIMD level.
#ifndef DEEPREDUCE_BENCHMARKS_TIMING_H
#define DEEPREDUCE_BENCHMARKS_TIMING_H

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <vector>

#include "base.h"

// One block of memory that every call starts anew, touched beforehand: a training step finds its
// scratch memory so.
struct Pool {
  explicit Pool(size_t size) : memory(size, 1) {}
  std::vector<char> memory;
  size_t used = 0;
};

inline void* allocate(void* user, size_t bytes) {
  Pool& pool = *static_cast<Pool*>(user);
  const size_t at = (pool.used + 63) / 64 * 64;
  if (at + bytes > pool.memory.size()) return nullptr;
  pool.used = at + bytes;
  return pool.memory.data() + at;
}

template <class Work>
double nanoseconds(Work work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count();
}

inline double median(std::vector<double> times) {
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2];
}

inline deepreduce::Simd best_simd() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq"))
    return deepreduce::Simd::avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2"))
    return deepreduce::Simd::avx2;
#endif
  return deepreduce::Simd::scalar;
}

#endif
