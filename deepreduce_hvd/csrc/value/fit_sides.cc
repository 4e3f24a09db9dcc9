// Sorting for the curve fits: a stable radix sort of (key, position), by only the bits in which
// keys differ.
#include "value/fit_sides.h"

#include <utility>

#include "support/prefetch.h"
#include "value/fit_element.h"

namespace deepreduce {
namespace {

constexpr uint32_t kMostBuckets = 1u << kMostDigitBits;
static_assert(3 * kMostDigitBits >= kMostSortedBits, "three digits hold any key");

// Converts the buckets' counts to starts.
void counts_to_starts(uint32_t* next) {
  uint32_t start = 0;
  for (uint32_t bucket = 0; bucket < kMostBuckets; ++bucket)
    start += std::exchange(next[bucket], start);
}

DR_INLINE SortedSides sort(Context& context, const float* values, uint32_t count, uint32_t* order) {
  uint32_t least = UINT32_MAX, most = 0, negatives = 0;
  // the values are read once, because a program may change its gradient during the call
  uint32_t* keys = context.arena.array<uint32_t>(count);
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t key = keys[i] = side_key(values[i]);
    const uint32_t within = key_within_side(key);
    least = within < least ? within : least;
    most = within > most ? within : most;
    negatives += key >> 31;
  }
  const auto [span, dropped] = sort_bits(least, most);
  const unsigned key_bits = span + 1 - dropped;
  const unsigned digits = (key_bits + kMostDigitBits - 1) / kMostDigitBits,
                 digit_bits = (key_bits + digits - 1) / digits;
  const uint32_t mask = (1u << digit_bits) - 1;

  // per digit: counts, then places
  uint32_t* next = context.arena.zeros<uint32_t>(uint64_t{3} * kMostBuckets);
  for (uint32_t i = 0; i < count; ++i) keys[i] = compact_key(keys[i], least, span);
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t key = keys[i] >> dropped;
    ++next[key & mask];
    ++next[kMostBuckets + ((key >> digit_bits) & mask)];
    if (digits == 3) ++next[2 * kMostBuckets + (key >> (2 * digit_bits))];
  }
  // The first pass reads the keys and the last one writes the result; between them the passes use
  // (key, position) pairs.
  uint64_t* entries[2] = {digits > 1 ? context.arena.array<uint64_t>(count) : nullptr,
                          digits > 2 ? context.arena.array<uint64_t>(count) : nullptr};
  float* magnitudes = context.arena.array<float>(count);
  const auto pass = [&](unsigned digit, auto read, auto write) {
    uint32_t* place = next + digit * kMostBuckets;
    counts_to_starts(place);
    const unsigned shift = 32 + dropped + digit * digit_bits;
    for (uint32_t i = 0; i < count; ++i) {
      const uint64_t entry = read(i);
      write(place[(entry >> shift) & mask]++, entry);
    }
  };
  const auto read_key = [=](uint32_t i) { return uint64_t{keys[i]} << 32 | i; };
  const auto read = [=](unsigned from) {
    return [array = entries[from]](uint32_t i) { return array[i]; };
  };
  const auto write = [=](unsigned to) {
    return [array = entries[to]](uint32_t at, uint64_t entry) { array[at] = entry; };
  };
  const auto write_result = [=](uint32_t at, uint64_t entry) {
    order[at] = static_cast<uint32_t>(entry);
    magnitudes[at] =
        magnitude_of_key((static_cast<uint32_t>(entry >> 32) & ((1u << span) - 1)) + least);
  };
  if (digits == 1) {
    pass(0, read_key, write_result);
  } else {
    pass(0, read_key, write(0));
    if (digits == 3) pass(1, read(0), write(1));
    pass(digits - 1, read(digits - 2), write_result);
  }
  return {{count - negatives, negatives}, magnitudes};
}

SortedSides sort_scalar(Context& context, const float* values, uint32_t count, uint32_t* order) {
  return sort(context, values, count, order);
}
#if defined(__x86_64__)
DR_AVX2 SortedSides sort_avx2(Context& context, const float* values, uint32_t count,
                              uint32_t* order) {
  return sort(context, values, count, order);
}
DR_AVX512 SortedSides sort_avx512(Context& context, const float* values, uint32_t count,
                                  uint32_t* order) {
  return sort(context, values, count, order);
}
#endif

}  // namespace

SortedSides sort_sides(Context& context, const float* values, uint32_t count, uint32_t* order) {
  return DR_CHOOSE(context.simd, sort)(context, values, count, order);
}

void restore_order(const float* sent, const uint32_t* order, uint32_t count, float* decoded) {
  for (uint32_t j = 0; j < count; ++j) {
    prefetch_ahead(decoded, order, j, count);
    decoded[order[j]] = sent[j];
  }
}

}  // namespace deepreduce
