#include "select/sum.h"

#include "support/half.h"
#include "support/prefetch.h"

namespace deepreduce {

Sum::Sum(Context& context, const dr_codec& codec, const dr_encoding& encoding)
    : d(encoding.d),
      kernels(select_kernels(context.simd)),
      encoding_(encoding),
      has_momentum_(codec.memory.id == kMomentumCorrection),
      momentum_(static_cast<float>(codec.memory.parameters[0])),
      converted_(encoding.dtype == DR_FLOAT32 ? nullptr
                                              : context.arena.array<float>(kSelectBlock)) {}

bool Sum::finite() const {
  if (encoding_.finite != 0) return true;
  const uint32_t n = static_cast<uint32_t>(d);
  switch (encoding_.dtype) {
    case DR_FLOAT16:
      return kernels.finite_half(static_cast<const uint16_t*>(encoding_.gradient), n, 0x7C00);
    case DR_BFLOAT16:
      return kernels.finite_half(static_cast<const uint16_t*>(encoding_.gradient), n, 0x7F80);
    case DR_FLOAT64:
      return kernels.finite_double(static_cast<const double*>(encoding_.gradient), n);
    default:
      return kernels.finite_float(static_cast<const uint32_t*>(encoding_.gradient), n);
  }
}

const float* Sum::gradient(uint64_t start, uint32_t n) const {
  switch (encoding_.dtype) {
    case DR_FLOAT16:
      kernels.from_float16(static_cast<const uint16_t*>(encoding_.gradient) + start, n, converted_);
      break;
    case DR_BFLOAT16:
      kernels.from_bfloat16(static_cast<const uint16_t*>(encoding_.gradient) + start, n,
                            converted_);
      break;
    case DR_FLOAT64:
      kernels.from_double(static_cast<const double*>(encoding_.gradient) + start, n, converted_);
      break;
    default:
      return static_cast<const float*>(encoding_.gradient) + start;
  }
  return converted_;
}

float Sum::gradient_at(const dr_encoding& encoding, uint64_t i) {
  switch (encoding.dtype) {
    case DR_FLOAT16:
      return float16_to_float(static_cast<const uint16_t*>(encoding.gradient)[i]);
    case DR_BFLOAT16:
      return bfloat16_to_float(static_cast<const uint16_t*>(encoding.gradient)[i]);
    case DR_FLOAT64:
      return static_cast<float>(static_cast<const double*>(encoding.gradient)[i]);
    default:
      return static_cast<const float*>(encoding.gradient)[i];
  }
}

float Sum::preview(uint64_t i) const {
  const float number = gradient_at(encoding_, i);
  if (encoding_.residual == nullptr) return number;
  return encoding_.residual[i] + number +
         (has_momentum_ ? momentum_ * encoding_.velocity[i] : 0.0f);
}

void Sum::prefetch_preview(uint64_t i) const {
  const uint64_t size = encoding_.dtype == DR_FLOAT64 ? 8 : encoding_.dtype == DR_FLOAT32 ? 4 : 2;
  prefetch(static_cast<const uint8_t*>(encoding_.gradient) + size * i);
  if (encoding_.residual == nullptr) return;
  prefetch(encoding_.residual + i);
  if (has_momentum_) prefetch(encoding_.velocity + i);
}

const float* Sum::whole() const {
  if (encoding_.residual != nullptr) return encoding_.residual;
  return encoding_.dtype == DR_FLOAT32 ? static_cast<const float*>(encoding_.gradient) : nullptr;
}

const float* Sum::add(uint64_t start, uint32_t n) {
  const float* addend = gradient(start, n);
  if (encoding_.residual == nullptr) return addend;
  float* sum = encoding_.residual + start;
  if (has_momentum_) {
    kernels.add_momentum(sum, encoding_.velocity + start, addend, momentum_, n);
  } else {
    kernels.add(sum, addend, n);
  }
  return sum;
}

uint32_t Sum::add_collect(uint64_t start, uint32_t n, uint32_t limit, uint32_t* indices,
                          float* kept) {
  const uint32_t base = static_cast<uint32_t>(start);
  if (encoding_.residual == nullptr || has_momentum_)
    return kernels.collect(add(start, n), n, base, limit, indices, kept);
  return kernels.add_collect(encoding_.residual + start, gradient(start, n), n, base, limit,
                             indices, kept);
}

}  // namespace deepreduce
