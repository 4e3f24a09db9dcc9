// One pass collects candidates: the elements above a limit slightly below the k-th magnitude. The
// limit is estimated from the last step's threshold and from a sample. When the candidates outgrow
// their memory, all but the k largest so far are dropped, and the limit rises. At the end a radix
// select finds the exact k-th magnitude. Another pass is needed only if the limit was too high.
#include "select/largest.h"

#include <cmath>

#include "select/element.h"
#include "support/prefetch.h"
#include "support/random.h"

namespace deepreduce {
namespace {

constexpr uint64_t kSamples = 1u << 16, kSamplesToCheck = 1u << 13, kElementsASample = 16;
constexpr unsigned kDigitBits = 11;
// two histograms, used alternately: in a single one, each of a run of equal magnitudes would wait
// for the increment before it
constexpr uint32_t kPlaces = 1u << kDigitBits;
constexpr uint32_t kSpareCandidates = 1u << 14;
constexpr uint32_t kSmallestNonZero = 1;
// thresholds rarely fall by more from one step to the next
constexpr float kBelowRemembered = 0.97f;

}  // namespace

KthScratch::KthScratch(Arena& arena, uint64_t most)
    : histogram(arena.array<uint32_t>(2 * kPlaces)), rest(arena.array<uint32_t>(most)) {}

Kth find_kth(const SelectKernels& kernels, const float* values, uint32_t count, uint32_t k,
             uint32_t low, const KthScratch& scratch) {
  if (count < k || k == 0) return {0, 0};
  // the range of the k-th magnitude, [low, low + 2^width), is divided into 2^kDigitBits parts until
  // it is one number
  const uint32_t range = kernels.largest(values, count) - low;
  unsigned width = 0;
  while ((uint64_t{1} << width) <= range) ++width;
  uint32_t* histogram = scratch.histogram;
  uint32_t rank = k;  // of the k-th magnitude within the range, counted from the largest
  // Narrows the range among n magnitudes; returns how many of them are in it, now in scratch.rest.
  const auto narrow = [&](auto magnitude_at, uint32_t n) {
    const unsigned shift = width > kDigitBits ? width - kDigitBits : 0;
    std::fill(histogram, histogram + 2 * kPlaces, 0u);
    for (uint32_t i = 0; i < n; ++i)
      ++histogram[i % 2 * kPlaces + ((magnitude_at(i) - low) >> shift)];
    for (uint32_t place = 0; place < kPlaces; ++place)
      histogram[place] += histogram[kPlaces + place];
    uint32_t digit = (1u << (width - shift)) - 1;
    for (; histogram[digit] < rank; --digit) rank -= histogram[digit];
    low += digit << shift;
    width = shift;
    uint32_t inside = 0;
    // always writes, but advances only for those in the range: no branch to mispredict
    for (uint32_t i = 0; width > 0 && i < n; ++i) {
      const uint32_t one = magnitude_at(i);
      scratch.rest[inside] = one;
      inside += (one - low) >> width == 0;
    }
    return inside;
  };
  if (width > 0) {
    // a lower value is possible if a program changes its gradient during the call
    const uint32_t least = low;
    uint32_t rest =
        narrow([=](uint32_t i) { return std::max(magnitude_bits(values[i]), least); }, count);
    while (width > 0) rest = narrow([&](uint32_t i) { return scratch.rest[i]; }, rest);
  }
  return {low, rank};
}

namespace {

class Candidates {
 public:
  Candidates(Arena& arena, const SelectKernels& kernels, uint32_t k, uint32_t capacity)
      : k_(k),
        capacity_(capacity),
        kernels_(kernels),
        scratch_(arena, uint64_t{capacity} + kSelectBlock),
        indices_(arena.array<uint32_t>(uint64_t{capacity} + kSelectBlock + kCollectSlack)),
        values_(arena.array<float>(uint64_t{capacity} + kSelectBlock + kCollectSlack)) {}

  void start(uint32_t limit) {
    limit_ = lowest_ = limit;
    count_ = 0;
  }
  // Appends what collect(limit, indices, values) collects from the next block.
  template <class Collect>
  void append(Collect collect) {
    count_ += collect(limit_, indices_ + count_, values_ + count_);
    if (count_ > capacity_) {
      lowest_ = keep_largest();
      limit_ = lowest_ + 1;  // at ties, earlier elements win
    }
  }
  // Whether the candidates include the k largest.
  bool enough() const { return count_ >= k_ || limit_ <= kSmallestNonZero; }
  // Drops all but the k largest; returns the k-th magnitude, 0 if there are fewer than k.
  uint32_t keep_largest() {
    const Kth kth = find_kth(kernels_, values_, count_, k_, lowest_, scratch_);
    uint32_t kept = 0, ties = kth.ties;
    // always writes, but advances only for elements that stay: no branch to mispredict
    for (uint32_t i = 0; i < count_; ++i) {
      const uint32_t one = magnitude_bits(values_[i]);
      const bool tie = one == kth.bits && ties > 0;
      indices_[kept] = indices_[i];
      values_[kept] = values_[i];
      kept += one > kth.bits || tie;
      ties -= tie;
    }
    count_ = kept;
    return kth.bits;
  }
  Selection selection() const { return {count_, indices_, values_}; }

 private:
  const uint32_t k_, capacity_;
  const SelectKernels& kernels_;
  const KthScratch scratch_;
  uint32_t* indices_;
  float* values_;
  // lowest: no candidate is below it
  uint32_t count_ = 0, limit_ = kSmallestNonZero, lowest_ = kSmallestNonZero;
};

// Limits estimated from a sample of gradient plus memory: with `enough` there are almost certainly
// at least k candidates, with `too_few` almost certainly fewer.
struct Limits {
  uint32_t enough, too_few;
};

Limits sampled_limits(const Sum& sum, uint32_t k, uint64_t most, uint32_t* sample) {
  const uint64_t count = std::min(most, sum.d / kElementsASample);
  if (count == 0) return {kSmallestNonZero, UINT32_MAX};
  // one random element of each of `count` parts; a fixed stride could miss periodic patterns
  for (uint64_t j = 0; j < count; ++j) {
    const uint64_t from = j * sum.d / count, to = (j + 1) * sum.d / count;
    sample[j] = static_cast<uint32_t>(
        from + random_below(0, static_cast<uint32_t>(j), static_cast<uint32_t>(to - from)));
  }
  for (uint64_t j = 0; j < count; ++j) {
    if (j + kPrefetchAhead < count) sum.prefetch_preview(sample[j + kPrefetchAhead]);
    sample[j] = magnitude_bits(sum.preview(sample[j]));
  }
  const double expected =
      static_cast<double>(k) * static_cast<double>(count) / static_cast<double>(sum.d);
  const double deviation = 4 * std::sqrt(expected);
  // element of the sample with this rank, counted from the largest
  const auto ranked = [=](double rank) {
    uint32_t* at = sample + static_cast<uint64_t>(rank);
    std::nth_element(sample, at, sample + count, [](uint32_t a, uint32_t b) { return a > b; });
    return std::max(*at, kSmallestNonZero);
  };
  const double low = expected + deviation + 2, high = expected - deviation;
  return {low < static_cast<double>(count) ? ranked(low) : kSmallestNonZero,
          high >= 0 ? ranked(high) : UINT32_MAX};
}

}  // namespace

Selection select_largest(Context& context, Sum& sum, uint32_t k, float& threshold) {
  const uint32_t capacity =
      static_cast<uint32_t>(std::min<uint64_t>(sum.d, 2 * uint64_t{k} + kSpareCandidates));
  const bool known = threshold > 0 && std::isfinite(threshold);
  Candidates candidates(context.arena, sum.kernels, k, capacity);
  uint32_t* sample = context.arena.array<uint32_t>(kSamples);
  const Limits limits = sampled_limits(sum, k, known ? kSamplesToCheck : kSamples, sample);
  const uint32_t remembered = known ? magnitude_bits(threshold * kBelowRemembered) : 0;
  candidates.start(remembered >= limits.enough && remembered <= limits.too_few ? remembered
                                                                               : limits.enough);
  sum.accumulate_collecting([&](const auto& collect) { candidates.append(collect); });
  if (!candidates.enough()) {
    candidates.start(kSmallestNonZero);
    sum.read([&](const float* values, uint32_t n, uint32_t start) {
      candidates.append([&](uint32_t limit, uint32_t* indices, float* kept) {
        return sum.kernels.collect(values, n, start, limit, indices, kept);
      });
    });
  }
  threshold = bits_float(std::max(candidates.keep_largest(), kSmallestNonZero));
  return candidates.selection();
}

}  // namespace deepreduce
