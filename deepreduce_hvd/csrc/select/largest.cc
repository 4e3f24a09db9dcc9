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

constexpr uint64_t kSamples = 1u << 16, kSamplesToCheck = 1u << 11, kElementsASample = 16;
constexpr unsigned kDigitBits = 11;
// two histograms, used alternately: in a single one, each of a run of equal magnitudes would wait
// for the increment before it
constexpr uint32_t kPlaces = 1u << kDigitBits;
constexpr uint32_t kSpareCandidates = 1u << 14;
constexpr uint32_t kSmallestNonZero = 1;
// If the threshold falls by more from one step to the next and the sample does not show it, a
// second pass is needed. A smaller factor would give more candidates in every step.
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

// Magnitudes of gradient plus memory, before the gradient is added: at one random element of each
// of `count` equal parts, because a fixed stride could miss periodic patterns.
class Sample {
 public:
  Sample(Arena& arena, const Sum& sum, uint32_t k, uint64_t most)
      : count_(static_cast<uint32_t>(std::min(most, sum.d / kElementsASample))),
        magnitudes_(arena.array<uint32_t>(count_)),
        expected_(count_ == 0 ? 0.0
                              : static_cast<double>(k) * count_ / static_cast<double>(sum.d)) {
    if (count_ == 0) return;
    // Part j begins at floor(j d / count). Divisions would take most of the time.
    const uint32_t length = static_cast<uint32_t>(sum.d / count_),
                   surplus = static_cast<uint32_t>(sum.d % count_);
    uint32_t from = 0, carry = 0;
    for (uint32_t j = 0; j < count_; ++j) {
      carry += surplus;
      const uint32_t longer = carry >= count_;
      carry -= longer * count_;
      magnitudes_[j] = from + random_below(0, j, length + longer);
      from += length + longer;
    }
    for (uint32_t j = 0; j < count_; ++j) {
      if (j + kPrefetchAhead < count_) sum.prefetch_preview(magnitudes_[j + kPrefetchAhead]);
      magnitudes_[j] = magnitude_bits(sum.preview(magnitudes_[j]));
    }
  }

  // Whether a limit can be a little below the k-th magnitude of all elements.
  bool agrees(uint32_t limit) const {
    uint32_t larger = 0, reached = 0;
    for (uint32_t j = 0; j < count_; ++j) {
      larger += static_cast<int32_t>(magnitudes_[j]) > static_cast<int32_t>(limit);
      reached += static_cast<int32_t>(magnitudes_[j]) >= static_cast<int32_t>(limit);
    }
    return larger <= most_above() && reached > expected_ - deviation();
  }

  // Returns a limit with which there are almost certainly at least k candidates.
  uint32_t safe_limit() {
    const double rank = most_above();  // of an element of the sample, counted from the largest
    if (rank >= count_) return kSmallestNonZero;
    uint32_t* at = magnitudes_ + static_cast<uint32_t>(rank);
    std::nth_element(magnitudes_, at, magnitudes_ + count_,
                     [](uint32_t a, uint32_t b) { return a > b; });
    return std::max(*at, kSmallestNonZero);
  }

 private:
  double deviation() const { return 4 * std::sqrt(expected_); }
  double most_above() const { return std::floor(expected_ + deviation() + 2); }

  uint32_t count_;
  uint32_t* magnitudes_;
  double expected_;  // how many of the k largest elements are in the sample
};

}  // namespace

Selection select_largest(Context& context, Sum& sum, uint32_t k, float& threshold) {
  const uint32_t capacity =
      static_cast<uint32_t>(std::min<uint64_t>(sum.d, 2 * uint64_t{k} + kSpareCandidates));
  const bool known = threshold > 0 && std::isfinite(threshold);
  Candidates candidates(context.arena, sum.kernels, k, capacity);
  const uint32_t remembered = known ? magnitude_bits(threshold * kBelowRemembered) : 0;
  Sample sample(context.arena, sum, k, known ? kSamplesToCheck : kSamples);
  const bool trusts = remembered >= kSmallestNonZero && sample.agrees(remembered);
  candidates.start(trusts ? remembered : sample.safe_limit());
  sum.accumulate_collecting([&](const auto& collect) { candidates.append(collect); });
  const auto search_again = [&](uint32_t limit) {
    candidates.start(limit);
    sum.read([&](const float* values, uint32_t n, uint32_t start) {
      candidates.append([&](uint32_t least, uint32_t* indices, float* kept) {
        return sum.kernels.collect(values, n, start, least, indices, kept);
      });
    });
  };
  if (trusts && !candidates.enough()) search_again(sample.safe_limit());
  if (!candidates.enough()) search_again(kSmallestNonZero);
  threshold = bits_float(std::max(candidates.keep_largest(), kSmallestNonZero));
  return candidates.selection();
}

}  // namespace deepreduce
