// One pass collects the elements that could be among the k largest: those above a guess a little below the k-th magnitude. A
// radix select over these candidates finds the k-th exactly. A guess that turns out wrong costs a pass over the sum: first with a
// guess from a sample, and when that misleads too, with the exact threshold from histograms of all elements.
#include "select_largest.h"

#include <cmath>

#include "half.h"
#include "random.h"

namespace deepreduce {
namespace {

constexpr uint32_t kSamples = 1u << 16;
constexpr uint32_t kSpareCandidates = 1u << 14;
constexpr uint32_t kSmallestNonZero = 1;
constexpr float kBelowRemembered = 0.97f;  // thresholds drift by less from one step to the next

uint32_t magnitude(float value) { return float_bits(value) & 0x7FFFFFFFu; }

class Candidates {
 public:
  Candidates(Arena& arena, const SelectKernels& kernels, uint32_t capacity)
      : capacity_(capacity), kernels_(kernels), indices_(arena.array<uint32_t>(uint64_t{capacity} + kSelectBlock + kCollectSlack)),
        values_(arena.array<float>(uint64_t{capacity} + kSelectBlock + kCollectSlack)) {}

  void collect(const float* values, uint32_t n, uint32_t start, uint32_t limit) {
    if (count <= capacity_) count += kernels_.collect(values, n, start, limit, indices_ + count, values_ + count);
  }
  // Of those from `from` on, keeps those above `bits` and the first `ties` equal to it.
  void keep(uint32_t from, uint32_t bits, uint32_t& ties) {
    uint32_t kept = from;
    for (uint32_t i = from; i < count; ++i) {
      const uint32_t one = magnitude(values_[i]);
      const bool tie = one == bits && ties > 0;
      indices_[kept] = indices_[i];
      values_[kept] = values_[i];
      kept += one > bits || tie;
      ties -= tie;
    }
    count = kept;
  }
  // All that can matter are here.
  bool enough(uint32_t k, uint32_t limit) const { return count <= capacity_ && (count >= k || limit <= kSmallestNonZero); }
  const float* values() const { return values_; }
  Selection selection() const { return {count, indices_, values_}; }

  uint32_t count = 0;

 private:
  const uint32_t capacity_;
  const SelectKernels& kernels_;
  uint32_t* indices_;
  float* values_;
};

struct Kth {
  uint32_t bits;  // the k-th largest magnitude; 0 when there are fewer than k non-zero elements
  uint32_t ties;  // how many of that magnitude are among the k
};

// `visit(f)` calls f(const float* values, uint32_t n) over all elements, as often as it is asked.
template <class Visit>
Kth find_kth(Arena& arena, uint32_t k, Visit visit) {
  uint32_t* histogram = arena.array<uint32_t>(2048);
  uint32_t prefix = 0, decided = 0, rest = k;
  for (const unsigned shift : {20u, 10u, 0u}) {
    const uint32_t digits = shift == 20 ? 0x7FF : 0x3FF;
    std::fill(histogram, histogram + 2048, 0u);
    visit([=](const float* values, uint32_t n) {
      for (uint32_t i = 0; i < n; ++i) {
        const uint32_t bits = magnitude(values[i]);
        if ((bits & decided) == prefix) ++histogram[(bits >> shift) & digits];
      }
    });
    uint32_t digit = digits;
    for (; digit > 0 && histogram[digit] < rest; --digit) rest -= histogram[digit];
    prefix |= digit << shift;
    decided |= digits << shift;
  }
  return {prefix, prefix == 0 ? 0 : rest};
}

// A limit that probably leaves a few more than k candidates, from a sample with one element of each of kSamples equal parts.
uint32_t sampled_limit(Arena& arena, const Sum& sum, uint32_t k) {
  uint32_t* sample = arena.array<uint32_t>(kSamples);
  for (uint64_t j = 0; j < kSamples; ++j) {  // a random place in each part: patterns with a period would fool a stride
    const uint64_t from = j * sum.d / kSamples, to = (j + 1) * sum.d / kSamples;
    sample[j] = magnitude(sum.at(from + random_below(0, static_cast<uint32_t>(j), static_cast<uint32_t>(to - from))));
  }
  const double expected = static_cast<double>(k) * kSamples / static_cast<double>(sum.d);
  const double rank = expected + 4 * std::sqrt(expected) + 2;
  if (rank >= kSamples) return kSmallestNonZero;
  uint32_t* at = sample + static_cast<uint32_t>(rank);
  std::nth_element(sample, at, sample + kSamples, [](uint32_t a, uint32_t b) { return a > b; });
  return std::max(*at, kSmallestNonZero);
}

}  // namespace

Selection select_largest(Context& context, Sum& sum, uint32_t k, float& threshold) {
  const uint32_t d = static_cast<uint32_t>(sum.d);
  const uint32_t capacity = static_cast<uint32_t>(std::min<uint64_t>(d, 2 * uint64_t{k} + kSpareCandidates));
  Candidates candidates(context.arena, sum.kernels, capacity);
  uint32_t limit = capacity == d ? kSmallestNonZero : 0;  // 0: nothing known
  if (threshold > 0 && std::isfinite(threshold)) limit = std::max(magnitude(threshold * kBelowRemembered), kSmallestNonZero);
  if (limit != 0) {
    sum.accumulate([&](const float* values, uint32_t n, uint32_t start) { candidates.collect(values, n, start, limit); });
  } else {
    sum.accumulate();
  }
  if (limit == 0 || !candidates.enough(k, limit)) {
    limit = capacity == d ? kSmallestNonZero : sampled_limit(context.arena, sum, k);
    candidates.count = 0;
    sum.read([&](const float* values, uint32_t n, uint32_t start) { candidates.collect(values, n, start, limit); });
  }
  Kth kth;
  if (candidates.enough(k, limit)) {
    kth = find_kth(context.arena, k, [&](auto visit) { visit(candidates.values(), candidates.count); });
    uint32_t ties = kth.ties;
    candidates.keep(0, kth.bits, ties);
  } else {
    kth = find_kth(context.arena, k, [&](auto visit) { sum.read([&](const float* values, uint32_t n, uint32_t) { visit(values, n); }); });
    uint32_t ties = kth.ties;
    candidates.count = 0;
    sum.read([&](const float* values, uint32_t n, uint32_t start) {
      const uint32_t from = candidates.count;
      candidates.collect(values, n, start, std::max(kth.bits, kSmallestNonZero));
      candidates.keep(from, kth.bits, ties);  // block by block: there may be more ties than room
    });
  }
  threshold = bits_float(std::max(kth.bits, kSmallestNonZero));
  return candidates.selection();
}

}  // namespace deepreduce
