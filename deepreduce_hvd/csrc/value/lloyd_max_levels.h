// The levels of LloydMax: bins of magnitudes, and Lloyd's method on them, shared by host and
// device.
#ifndef DEEPREDUCE_VALUE_LLOYD_MAX_LEVELS_H
#define DEEPREDUCE_VALUE_LLOYD_MAX_LEVELS_H

#include <cmath>

#include "support/bits.h"
#include "support/half.h"

namespace deepreduce {

constexpr unsigned kLloydMostBits = 4;
constexpr uint32_t kLloydMostLevels = 1u << (kLloydMostBits - 1);
// A bin has all magnitudes with the same exponent and the same first five bits of the significand.
constexpr uint32_t kLloydBins = 512, kLloydBinShift = 18;
constexpr uint32_t kLloydWithin = (1u << kLloydBinShift) - 1;
constexpr int kLloydIterations = 8;

DR_HOST_DEVICE inline uint32_t lloyd_levels(unsigned bits) { return 1u << (bits - 1); }

// Returns the number of bytes before the codes.
DR_HOST_DEVICE inline uint64_t lloyd_head_bytes(unsigned bits) {
  return 1 + uint64_t{4} * lloyd_levels(bits);
}

inline double lloyd_max_bits_per_value(const double* parameters) { return parameters[0]; }

inline unsigned lloyd_max_bits(const double* parameters) {
  if (!(parameters[0] >= 1 && parameters[0] <= kLloydMostBits))
    invalid_argument("LloydMax bits: expected 1 to %u, got %g", kLloydMostBits, parameters[0]);
  return static_cast<unsigned>(parameters[0]);
}

// Whether a level may follow `last` in a section: finite, and not smaller.
DR_HOST_DEVICE inline bool lloyd_level_is_valid(uint32_t level_bits, uint32_t last_bits) {
  return level_bits < 0x7F800000u && level_bits >= last_bits;  // not negative, so bits compare
}

// Returns the first bin that is counted, for the bits of the largest magnitude.
DR_HOST_DEVICE inline uint32_t lloyd_first_bin(uint32_t largest) {
  const uint32_t bin = largest >> kLloydBinShift;
  return bin < kLloydBins ? 0 : bin - (kLloydBins - 1);
}

// Returns a unit in the last place of the magnitudes in a bin.
DR_HOST_DEVICE inline double lloyd_unit(uint32_t bin) {
  const uint32_t exponent = bin >> 5;
  const uint64_t bits = uint64_t{1023 - 150 + (exponent == 0 ? 1 : exponent)} << 52;
  double unit;
  memcpy(&unit, &bits, 8);
  return unit;
}

// Returns the sum of `count` magnitudes in a bin; `within` is the sum of their lower bits.
DR_HOST_DEVICE inline double lloyd_sum(uint32_t bin, uint64_t count, uint64_t within) {
  const uint64_t start = static_cast<uint64_t>((bin & 31) + (bin < 32 ? 0 : 32)) << kLloydBinShift;
  return static_cast<double>(count * start + within) * lloyd_unit(bin);
}

DR_HOST_DEVICE inline double lloyd_mean(uint32_t bin, uint64_t count, double sum) {
  return count > 0 ? sum / static_cast<double>(count) : bits_float(bin << kLloydBinShift);
}

// Returns a bin's weight in the choice of the initial ranges: the square root of count * width.
DR_HOST_DEVICE inline double lloyd_root(uint32_t bin, uint64_t count) {
  return std::sqrt(static_cast<double>(count) * (lloyd_unit(bin) * (1u << kLloydBinShift)));
}

// What Lloyd's method needs to know of the bins from `lowest` on, the first that is not empty.
// counted[b], summed[b] and roots[b] are sums over all bins before b.
struct LloydTables {
  uint32_t first, lowest;
  uint64_t counted[kLloydBins + 1];  // with the magnitudes below the first bin
  double summed[kLloydBins + 1];
  double roots[kLloydBins + 1];
  double means[kLloydBins];
};

// Returns the first position in [at, end) whose number is not below `target`, or `end`.
DR_HOST_DEVICE inline uint32_t lloyd_search(const double* numbers, uint32_t at, uint32_t end,
                                            double factor, double target) {
  while (at < end) {
    const uint32_t middle = (at + end) / 2;
    if (numbers[middle] * factor < target) {
      at = middle + 1;
    } else {
      end = middle;
    }
  }
  return at;
}

// Whether the lowest of `number` levels is 0 if some magnitudes are 0. With fewer levels, it would
// cost too much accuracy.
DR_HOST_DEVICE inline bool lloyd_keeps_zeros(uint32_t number) { return number >= 4; }

// Fits `number` levels. A magnitude has level i if its bits reach i of the number - 1 thresholds.
// With `has_zeros`, the lowest level is 0. One level has the smallest possible error. More levels
// are not always close to it: with heavy tails, the error can be several times as large.
DR_HOST_DEVICE inline void lloyd_fit(const LloydTables& tables, uint32_t number, bool has_zeros,
                                     float* levels, uint32_t* thresholds) {
  uint32_t ends[kLloydMostLevels + 1];
  double fitted[kLloydMostLevels] = {};
  ends[0] = tables.lowest;
  ends[number] = kLloydBins;
  for (int iteration = 0; iteration < kLloydIterations; ++iteration) {
    for (uint32_t i = 1; i < number; ++i)
      ends[i] = iteration == 0 ? lloyd_search(tables.roots, tables.lowest, kLloydBins, number,
                                              tables.roots[kLloydBins] * i)
                               : lloyd_search(tables.means, tables.lowest, kLloydBins, 1.0,
                                              (fitted[i - 1] + fitted[i]) / 2);
    // zeros may be in bin 0, which then is below all thresholds
    for (uint32_t i = 1; i < number; ++i)
      if (has_zeros && tables.first == 0 && ends[i] == 0) ends[i] = 1;
    for (uint32_t i = has_zeros ? 1 : 0; i < number; ++i) {
      const uint64_t before = i == 0 ? 0 : tables.counted[ends[i]];
      const uint64_t count = tables.counted[ends[i + 1]] - before;
      if (count > 0)
        fitted[i] =
            (tables.summed[ends[i + 1]] - tables.summed[ends[i]]) / static_cast<double>(count);
      if (i > 0) fitted[i] = larger(fitted[i], fitted[i - 1]);
    }
  }
  for (uint32_t i = 0; i < number; ++i) levels[i] = static_cast<float>(fitted[i]);
  for (uint32_t i = 1; i < number; ++i)
    thresholds[i - 1] = (tables.first + ends[i]) << kLloydBinShift;
}

}  // namespace deepreduce
#endif
