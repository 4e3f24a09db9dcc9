#include "select.h"

#include <algorithm>
#include <cfloat>
#include <cmath>

#include "half.h"
#include "random.h"

namespace deepreduce {
namespace {

float load(const dr_encoding& encoding, uint64_t i) {
  switch (encoding.dtype) {
    case DR_FLOAT16: return float16_to_float(static_cast<const uint16_t*>(encoding.gradient)[i]);
    case DR_BFLOAT16: return bfloat16_to_float(static_cast<const uint16_t*>(encoding.gradient)[i]);
    case DR_FLOAT64: return static_cast<float>(static_cast<const double*>(encoding.gradient)[i]);
    default: return static_cast<const float*>(encoding.gradient)[i];
  }
}

float saturate(float value) { return std::min(std::max(value, -FLT_MAX), FLT_MAX); }

uint32_t kept_count(const dr_stage& sparsifier, uint64_t d) {
  const double ratio = sparsifier.parameters[0], fixed = sparsifier.parameters[1];
  const double wanted = fixed > 0 ? fixed : std::floor(ratio * static_cast<double>(d));
  return static_cast<uint32_t>(std::min(std::max(wanted, 1.0), static_cast<double>(d)));
}

}  // namespace

void gather_accumulated(const dr_encoding& encoding, const uint32_t* indices, uint32_t count, float* values) {
  for (uint32_t i = 0; i < count; ++i) {
    const uint64_t at = indices == nullptr ? i : indices[i];
    values[i] = encoding.residual != nullptr ? encoding.residual[at] : saturate(load(encoding, at));
  }
}

bool accumulate_and_select(Context& context, const dr_codec& codec, dr_encoding& encoding, Selection& selection) {
  const uint64_t d = encoding.d;
  for (uint64_t i = 0; i < d; ++i)
    if (!std::isfinite(load(encoding, i))) return false;
  const float momentum = static_cast<float>(codec.memory.parameters[0]);
  for (uint64_t i = 0; encoding.residual != nullptr && i < d; ++i) {
    float addend = load(encoding, i);
    if (codec.memory.id == kMomentumCorrection) {
      addend = saturate(momentum * encoding.velocity[i] + addend);
      encoding.velocity[i] = addend;
    }
    encoding.residual[i] = saturate(encoding.residual[i] + addend);
  }
  float* all = context.arena.array<float>(d);
  gather_accumulated(encoding, nullptr, static_cast<uint32_t>(d), all);
  if (codec.sparsifier.id == kNoneSparsifier) {
    selection = {static_cast<uint32_t>(d), nullptr, all};
    return true;
  }
  if (codec.sparsifier.id != kTopK) invalid_argument("sparsifier %d is not there yet", codec.sparsifier.id);
  uint32_t* indices = context.arena.array<uint32_t>(d);
  uint32_t count = 0;
  for (uint64_t i = 0; i < d; ++i)
    if (all[i] != 0) indices[count++] = static_cast<uint32_t>(i);
  const uint32_t k = std::min(kept_count(codec.sparsifier, d), count);
  std::nth_element(indices, indices + k, indices + count, [all](uint32_t a, uint32_t b) {
    const float x = std::fabs(all[a]), y = std::fabs(all[b]);
    return x != y ? x > y : a < b;
  });
  std::sort(indices, indices + k);
  float* values = context.arena.array<float>(k);
  for (uint32_t i = 0; i < k; ++i) values[i] = all[indices[i]];
  selection = {k, indices, values};
  return true;
}

void remember_rest(Context&, const dr_codec& codec, dr_encoding& encoding, const Selection& sent) {
  if (encoding.residual == nullptr) return;
  float weight = 1.0f;
  if (codec.memory.id == kLowPass) {
    weight = static_cast<float>(codec.memory.parameters[0]);
    const float rest = 1.0f - weight;
    for (uint64_t i = 0; i < encoding.d; ++i) encoding.residual[i] -= rest * load(encoding, i);
  }
  for (uint32_t j = 0; j < sent.count; ++j) {
    const uint32_t i = sent.indices == nullptr ? j : sent.indices[j];
    encoding.residual[i] -= weight * sent.values[j];
    if (codec.memory.id == kMomentumCorrection) encoding.velocity[i] = 0.0f;
  }
}

}  // namespace deepreduce
