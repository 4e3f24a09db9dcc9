// The floating-point environment of a thread.
#ifndef DEEPREDUCE_FLOATING_POINT_H
#define DEEPREDUCE_FLOATING_POINT_H

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace deepreduce {

// Sets the default environment until the end of a block. Frameworks run their threads with
// denormals flushed to zero; the payload must not depend on that.
class DefaultFloatingPoint {
 public:
  DefaultFloatingPoint() : saved_(control()) { set_control(kDefault); }
  ~DefaultFloatingPoint() { set_control(saved_); }
  DefaultFloatingPoint(const DefaultFloatingPoint&) = delete;
  DefaultFloatingPoint& operator=(const DefaultFloatingPoint&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr uint64_t kDefault = 0x1F80;
  static uint64_t control() { return _mm_getcsr(); }
  static void set_control(uint64_t word) { _mm_setcsr(static_cast<unsigned>(word)); }
#elif defined(__aarch64__)
  static constexpr uint64_t kDefault = 0;
  static uint64_t control() {
    uint64_t word;
    __asm__ volatile("mrs %0, fpcr" : "=r"(word) : : "memory");
    return word;
  }
  static void set_control(uint64_t word) {
    __asm__ volatile("msr fpcr, %0" : : "r"(word) : "memory");
  }
#else
  static constexpr uint64_t kDefault = 0;
  static uint64_t control() { return kDefault; }
  static void set_control(uint64_t) {}
#endif

  uint64_t saved_;
};

}  // namespace deepreduce
#endif
