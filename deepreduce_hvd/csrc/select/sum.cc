#include "select/sum.h"

#include "support/half.h"

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
  for (uint64_t start = 0; start < d; start += kSelectBlock) {
    const uint32_t n = length(start);
    bool good;
    switch (encoding_.dtype) {
      case DR_FLOAT16:
        good = kernels.finite_half(static_cast<const uint16_t*>(encoding_.gradient) + start, n,
                                   0x7C00);
        break;
      case DR_BFLOAT16:
        good = kernels.finite_half(static_cast<const uint16_t*>(encoding_.gradient) + start, n,
                                   0x7F80);
        break;
      case DR_FLOAT64:
        good = kernels.finite_double(static_cast<const double*>(encoding_.gradient) + start, n);
        break;
      default:
        good = kernels.finite_float(static_cast<const uint32_t*>(encoding_.gradient) + start, n);
    }
    if (!good) return false;
  }
  return true;
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

}  // namespace deepreduce
