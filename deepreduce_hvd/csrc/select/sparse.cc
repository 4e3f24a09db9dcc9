#include "select/sparse.h"

#include "select/element.h"
#include "select/largest.h"
#include "select/select.h"
#include "support/prefetch.h"

namespace deepreduce {
namespace {

// Calls work(place in `array`, value) for each element.
template <class Work>
void scatter(const uint32_t* indices, const float* values, uint64_t count, uint64_t start,
             float* array, Work work) {
  for (uint64_t i = 0; i < count; ++i) {
    prefetch_ahead(array, indices, i, count, start);
    work(array[indices[i] - start], values[i]);
  }
}

}  // namespace

void keep_largest(Context& context, const uint32_t* indices, const float* values, uint32_t count,
                  uint32_t k, uint32_t* new_indices, float* new_values) {
  if (k == 0 || k >= count) {
    std::memcpy(new_indices, indices, uint64_t{4} * count);
    std::memcpy(new_values, values, uint64_t{4} * count);
    return;
  }
  const Kth kth =
      find_kth(select_kernels(context.simd), values, count, k, 0, KthScratch(context.arena, count));
  uint32_t* rest_indices = context.arena.array<uint32_t>(uint64_t{count} - k + 1);
  float* rest_values = context.arena.array<float>(uint64_t{count} - k + 1);
  uint32_t kept = 0, dropped = 0, ties = kth.ties;
  // always writes to both, but advances only one: no branch to mispredict
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t one = magnitude_bits(values[i]);
    const bool tie = (one == kth.bits) & (ties > 0);
    const bool keeps = (one > kth.bits) | tie;
    new_indices[kept] = rest_indices[dropped] = indices[i];
    new_values[kept] = rest_values[dropped] = values[i];
    kept += keeps;
    dropped += !keeps;
    ties -= tie;
  }
  std::memcpy(new_indices + k, rest_indices, uint64_t{4} * dropped);
  std::memcpy(new_values + k, rest_values, uint64_t{4} * dropped);
}

void put_back(const dr_stage& memory, const uint32_t* indices, const float* values, uint64_t count,
              uint64_t start, float* residual, uint64_t d) {
  if (memory.id <= kNoMemory || memory.id > kMomentumCorrection)
    unknown_codec("memory id: expected 1 to 3, got %d", memory.id);
  check_given(indices, count, d, start);
  const float weight = memory.id == kLowPass ? static_cast<float>(memory.parameters[0]) : 1.0f;
  scatter(indices, values, count, start, residual, [=](float& rest, float value) {
    rest = value == 0 ? rest : next_sum(rest, weight * value);
  });
}

void add_sparse(const uint32_t* indices, const float* values, uint64_t count, uint64_t start,
                float scale, float* out, uint64_t d, Largest& caller_largest) {
  check_given(indices, count, d, start);
  Largest largest;  // a local, which cannot alias the sum
  scatter(indices, values, count, start, out,
          [&](float& sum, float value) { largest.take(sum += scale * value); });
  caller_largest.take(largest.magnitude());
}

}  // namespace deepreduce
