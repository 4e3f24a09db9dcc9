#include "select/select.h"

#include <cmath>

#include "api/arguments.h"
#include "select/element.h"
#include "select/largest.h"
#include "select/random.h"
#include "select/sum.h"
#include "support/half.h"
#include "support/prefetch.h"
#include "support/random.h"

namespace deepreduce {
namespace {

Selection select_all(Arena& arena, Sum& sum) {
  sum.accumulate();
  const float* values = sum.whole();
  if (values == nullptr) {
    float* converted = arena.array<float>(sum.d);
    sum.read([=](const float* block, uint32_t n, uint32_t start) {
      std::memcpy(converted + start, block, uint64_t{4} * n);
    });
    values = converted;
  }
  return {static_cast<uint32_t>(sum.d), nullptr, values};
}

Selection select_random(Arena& arena, Sum& sum, uint32_t k, uint64_t key) {
  sum.accumulate();
  const uint32_t d = static_cast<uint32_t>(sum.d), words = (d + 63) / 64;
  uint64_t* chosen = arena.zeros<uint64_t>(words);
  const RandomPermutation permutation(key, d);
  for (uint32_t i = 0; i < k; ++i) {
    const uint32_t at = permutation(i);
    chosen[at / 64] |= uint64_t{1} << at % 64;
  }
  uint32_t* indices = arena.array<uint32_t>(k);
  float* values = arena.array<float>(k);
  uint32_t count = 0;
  for (uint32_t word = 0; word < words; ++word)
    for (uint64_t bits = chosen[word]; bits != 0; bits &= bits - 1)
      indices[count++] = 64 * word + static_cast<uint32_t>(__builtin_ctzll(bits));
  for (uint32_t i = 0; i < k; ++i) values[i] = sum.at(indices[i]);
  return {k, indices, values};
}

Selection select_above(Arena& arena, Sum& sum, float threshold) {
  const uint32_t limit = float_bits(std::fabs(threshold)) + 1;
  uint32_t count = 0, found = 0;
  sum.accumulate([&](const float* values, uint32_t n, uint32_t) {
    count += sum.kernels.count(values, n, limit);
  });
  // There is room for a block more: a program may change its gradient during the call.
  const uint64_t room = uint64_t{count} + kSelectBlock + kCollectSlack;
  uint32_t* indices = arena.array<uint32_t>(room);
  float* kept = arena.array<float>(room);
  sum.read([&](const float* values, uint32_t n, uint32_t start) {
    if (found > count) return;
    found += sum.kernels.collect(values, n, start, limit, indices + found, kept + found);
  });
  if (found != count)
    invalid_argument(
        "gradient: expected the %u elements above the threshold that were counted, got %s; do not "
        "change it during the call",
        count, found < count ? "fewer" : "more");
  return {count, indices, kept};
}

Selection select_largest_of_chunks(Arena& arena, Sum& sum, uint32_t chunk) {
  const uint64_t most = (sum.d + chunk - 1) / chunk;
  uint32_t* indices = arena.array<uint32_t>(most);
  float* kept = arena.array<float>(most);
  // best: magnitude of indices[count], 0 if the chunk has had only zeros so far
  uint32_t count = 0, best = 0, left = chunk;
  sum.accumulate([&](const float* values, uint32_t n, uint32_t start) {
    for (uint32_t i = 0; i < n;) {
      const uint32_t end = i + std::min(left, n - i);  // a chunk may start in an earlier block
      const uint32_t largest = sum.kernels.largest(values + i, end - i);
      if (largest > best) {
        uint32_t at = i;
        // bounded, as a program may change its gradient during the call
        while (at + 1 < end && magnitude_bits(values[at]) != largest) ++at;
        best = largest;
        indices[count] = start + at;
        kept[count] = values[at];
      }
      left -= end - i;
      i = end;
      if (left == 0 || start + i == sum.d) {
        count += best != 0;
        best = 0;
        left = chunk;
      }
    }
  });
  return {count, indices, kept};
}

}  // namespace

void gather_accumulated(const dr_encoding& encoding, const uint32_t* indices, uint32_t count,
                        float* values) {
  for (uint32_t i = 0; i < count; ++i) {
    const uint64_t at = indices == nullptr ? i : indices[i];
    values[i] =
        encoding.residual != nullptr ? encoding.residual[at] : Sum::gradient_at(encoding, at);
  }
}

bool accumulate_and_select(Context& context, const dr_codec& codec, dr_encoding& encoding,
                           Selection& selection) {
  check_selection(codec);
  Sum sum(context, codec, encoding);
  if (!sum.finite()) return false;
  const dr_stage& sparsifier = codec.sparsifier;
  const dr_position& at = encoding.position;
  switch (sparsifier.id) {
    case kTopK:
      selection = select_largest(context, sum, kept_count(sparsifier, sum.d), encoding.threshold);
      break;
    case kRandomK:  // rank 0 on all ranks, so that they select the same indices
      selection = select_random(context.arena, sum, kept_count(sparsifier, sum.d),
                                random_key(at.seed, at.step, at.tensor, 0, Purpose::selection));
      break;
    case kThreshold:
      selection = select_above(context.arena, sum, static_cast<float>(sparsifier.parameters[0]));
      break;
    case kChunkTopK:
      selection = select_largest_of_chunks(context.arena, sum,
                                           static_cast<uint32_t>(sparsifier.parameters[0]));
      break;
    default:
      selection = select_all(context.arena, sum);
  }
  return true;
}

void check_given(const uint32_t* indices, uint64_t count, uint64_t d, uint64_t start) {
  if (count > d)
    invalid_argument("indices: expected at most d = %llu, got %llu",
                     static_cast<unsigned long long>(d), static_cast<unsigned long long>(count));
  if (count == 0) return;
  bool ascending = true;
  for (uint64_t i = 1; i < count; ++i) ascending &= indices[i] > indices[i - 1];
  if (!ascending) {
    uint64_t i = 1;
    while (indices[i] > indices[i - 1]) ++i;
    invalid_argument("indices: expected ascending distinct ones, got %u followed by %u",
                     indices[i - 1], indices[i]);
  }
  if (indices[0] < start)
    invalid_argument("indices: expected at least %llu, got %u",
                     static_cast<unsigned long long>(start), indices[0]);
  if (indices[count - 1] >= start + d)
    invalid_argument("indices: expected less than %s = %llu, got %u",
                     start == 0 ? "d" : "start + d", static_cast<unsigned long long>(start + d),
                     indices[count - 1]);
}

bool accumulate_and_take(Context& context, const dr_codec& codec, dr_encoding& encoding,
                         const uint32_t* given, uint32_t count, Selection& selection) {
  check_selection(codec);
  Sum sum(context, codec, encoding);
  if (!sum.finite()) return false;
  sum.accumulate();
  float* values = context.arena.array<float>(count);
  for (uint32_t i = 0; i < count; ++i) values[i] = sum.at(given[i]);
  selection = {count, given, values};
  return true;
}

void remember_rest(Context& context, const dr_codec& codec, dr_encoding& encoding,
                   const Selection& sent) {
  float* residual = encoding.residual;
  float* velocity = encoding.velocity;
  if (residual == nullptr) return;
  const SelectKernels& kernels = select_kernels(context.simd);
  float weight = 1.0f;
  if (codec.memory.id == kLowPass) {
    weight = static_cast<float>(codec.memory.parameters[0]);
    const Sum sum(context, codec, encoding);
    for (uint64_t start = 0; weight != 1 && start < encoding.d; start += kSelectBlock) {
      const uint32_t n =
          static_cast<uint32_t>(std::min<uint64_t>(kSelectBlock, encoding.d - start));
      kernels.subtract(residual + start, sum.gradient(start, n), 1.0f - weight, n);
    }
  }
  if (sent.indices == nullptr) {
    kernels.subtract(residual, sent.values, weight, sent.count);
    if (velocity != nullptr) std::memset(velocity, 0, uint64_t{4} * sent.count);
    return;
  }
  for (uint32_t j = 0; j < sent.count; ++j) {
    prefetch_ahead(residual, sent.indices, j, sent.count);
    const uint32_t i = sent.indices[j];
    residual[i] = without(residual[i], weight, sent.values[j]);
    if (velocity != nullptr) velocity[i] = 0.0f;
  }
}

}  // namespace deepreduce
