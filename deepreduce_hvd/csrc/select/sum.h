// The accumulated gradient, block by block: the first pass makes it, later passes read it.
#ifndef DEEPREDUCE_SELECT_SUM_H
#define DEEPREDUCE_SELECT_SUM_H

#include <algorithm>

#include "codecs.h"
#include "select/kernels.h"

namespace deepreduce {

class Sum {
 public:
  Sum(Context& context, const dr_codec& codec, const dr_encoding& encoding);

  // Whether the gradient has neither NaN nor Inf.
  bool finite() const;

  // Calls visit(const float* values, uint32_t n, uint32_t start) for every block in order.
  // accumulate must be called exactly once, before any read: it also adds the gradient to the
  // memory.
  template <class Visit>
  void accumulate(Visit visit) {
    for (uint64_t start = 0; start < d; start += kSelectBlock) {
      const uint32_t n = length(start);
      visit(add(start, n), n, static_cast<uint32_t>(start));
    }
  }
  // Instead of accumulate: calls visit(collect) for every block in order. Each time, visit must
  // call collect(limit, indices, kept) once, which adds the gradient to the memory, and collects
  // elements of the sum as SelectKernels::collect does.
  template <class Visit>
  void accumulate_collecting(Visit visit) {
    for (uint64_t start = 0; start < d; start += kSelectBlock)
      visit([&](uint32_t limit, uint32_t* indices, float* kept) {
        return add_collect(start, length(start), limit, indices, kept);
      });
  }
  void accumulate() {
    if (encoding_.residual != nullptr) accumulate([](const float*, uint32_t, uint32_t) {});
  }
  template <class Visit>
  void read(Visit visit) const {
    for (uint64_t start = 0; start < d; start += kSelectBlock) {
      const uint32_t n = length(start);
      visit(block(start, n), n, static_cast<uint32_t>(start));
    }
  }

  // Before accumulate: the future value of one element, without saturation.
  float preview(uint64_t i) const;
  // Prefetches what preview(i) reads.
  void prefetch_preview(uint64_t i) const;
  // After accumulate: the value of one element.
  float at(uint64_t i) const {
    return encoding_.residual != nullptr ? encoding_.residual[i] : gradient_at(encoding_, i);
  }
  // The whole sum as (d,) float32 if it is in memory in this form, else null.
  const float* whole() const;
  // The gradient's elements [start, start + n) as float32, n <= kSelectBlock; valid until the next
  // call.
  const float* gradient(uint64_t start, uint32_t n) const;
  static float gradient_at(const dr_encoding& encoding, uint64_t i);

  const uint64_t d;
  const SelectKernels& kernels;

 private:
  uint32_t length(uint64_t start) const {
    return static_cast<uint32_t>(std::min<uint64_t>(kSelectBlock, d - start));
  }
  const float* block(uint64_t start, uint32_t n) const {
    return encoding_.residual != nullptr ? encoding_.residual + start : gradient(start, n);
  }
  const float* add(uint64_t start, uint32_t n);
  uint32_t add_collect(uint64_t start, uint32_t n, uint32_t limit, uint32_t* indices, float* kept);

  const dr_encoding& encoding_;
  bool has_momentum_;
  float momentum_;
  float* converted_;  // (kSelectBlock,)
};

}  // namespace deepreduce
#endif
