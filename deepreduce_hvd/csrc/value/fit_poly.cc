// FitPoly: fits sorted values by piecewise least squares polynomials.
#include <algorithm>

#include "support/bits.h"
#include "value/fit_curve.h"

namespace deepreduce {
namespace {

struct Segment {
  uint32_t start, length;
  Farthest farthest;
};

struct Side {
  uint32_t count, segment_count;
  Segment* segments;
  int64_t* coefficients;  // (segment_count, degree + 1) multiples of 2^exponent, orthonormal basis
  int exponent;
};

double bits_per_value(const double*) { return 16; }

// Whether segment a is split after segment b.
bool splits_later(const Segment& a, const Segment& b) {
  return a.farthest.distance != b.farthest.distance ? a.farthest.distance < b.farthest.distance
                                                    : a.start > b.start;
}

void find_segments(Simd simd, const float* y, uint32_t wanted, int degree, Side& side) {
  const uint32_t fewest = static_cast<uint32_t>(degree) + 1;
  Segment* const heap = side.segments;
  uint32_t& size = side.segment_count;
  size = 0;
  const auto add = [&](uint32_t start, uint32_t length) {
    heap[size++] = {start, length, farthest_from_chord(simd, y + start, length, fewest)};
    std::push_heap(heap, heap + size, splits_later);
  };
  add(0, side.count);
  while (size < wanted && heap[0].farthest.distance > 0.0) {
    std::pop_heap(heap, heap + size, splits_later);
    const Segment split = heap[--size];
    add(split.start, split.farthest.position);
    add(split.start + split.farthest.position, split.length - split.farthest.position);
  }
  std::sort(heap, heap + size,
            [](const Segment& a, const Segment& b) { return a.start < b.start; });
}

void fit_side(Context& context, const float* y, int degree, Side& side) {
  const uint32_t terms = static_cast<uint32_t>(degree) + 1,
                 total_terms = side.segment_count * terms;
  double* fits = context.arena.zeros<double>(total_terms);
  side.coefficients = context.arena.array<int64_t>(total_terms);
  double total = 0.0, fitted = 0.0;
  for (uint32_t s = 0; s < side.segment_count; ++s) {
    const Segment& segment = side.segments[s];
    const Recurrence recurrence = recurrence_of(segment.length, degree);
    double* fit = fits + s * terms;
    total += fit_moments(context.simd, y + segment.start, segment.length, recurrence, fit);
    for (int j = 0; j <= recurrence.degree; ++j) {
      fit[j] = fit[j] / recurrence.norm[j];
      fitted += fit[j] * fit[j];
    }
  }
  side.exponent = side_exponent(total, fitted, total_terms);
  for (uint32_t i = 0; i < total_terms; ++i)
    side.coefficients[i] = quantized(fits[i], side.exponent);
}

void evaluate_side(Simd simd, const Side& side, int degree, float sign, float* out) {
  for (uint32_t s = 0; s < side.segment_count; ++s) {
    const Segment& segment = side.segments[s];
    double powers[kMaxDegree + 1];
    const int usable = segment_powers(side.coefficients + s * static_cast<uint32_t>(degree + 1),
                                      side.exponent, segment.length, degree, powers);
    evaluate_polynomial(simd, powers, usable, segment.length, sign, out + segment.start);
  }
}

void write(const Side (&sides)[2], int degree, ByteWriter& section) {
  const int terms = degree + 1;
  uint64_t magnitudes[kMaxDegree + 1] = {};
  bool used[kMaxDegree + 1] = {};
  uint64_t longest = 0, fields = 0, segment_count = 0;
  for (const Side& side : sides) {
    for (uint32_t s = 0; s < side.segment_count; ++s) {
      if (s + 1 < side.segment_count) {
        longest |= side.segments[s].length;
        ++fields;
      }
      for (int j = 0; j < terms; ++j) {
        const int64_t q = side.coefficients[s * terms + j];
        magnitudes[j] |= bits_without_sign(q);
        used[j] |= q != 0;
      }
    }
    segment_count += side.segment_count;
  }
  const unsigned length_width = bit_length(longest);
  unsigned widths[kMaxDegree + 1];
  uint64_t bits = fields * length_width;
  section.put(sides[0].count);
  for (const Side& side : sides) section.put(static_cast<uint16_t>(side.segment_count));
  for (const Side& side : sides) section.put(static_cast<int16_t>(side.exponent));
  section.put(static_cast<uint8_t>(degree));
  section.put(static_cast<uint8_t>(length_width));
  for (int j = 0; j < terms; ++j) {
    widths[j] = column_width(used[j], magnitudes[j]);
    bits += segment_count * widths[j];
    section.put(static_cast<uint8_t>(widths[j]));
  }
  BitWriter writer(section.extend((bits + 7) / 8));
  for (const Side& side : sides)
    for (uint32_t s = 0; s + 1 < side.segment_count; ++s)
      writer.put(side.segments[s].length, length_width);
  for (const Side& side : sides)
    for (uint32_t i = 0; i < side.segment_count * static_cast<uint32_t>(terms); ++i) {
      const unsigned width = widths[i % static_cast<uint32_t>(terms)];
      writer.put(field_of(side.coefficients[i], width), width);
    }
  writer.finish();
}

void encode(Context& context, ValueEncoding& encoding, ByteWriter& section) {
  const auto [degree, segments] = poly_settings(encoding.parameters);
  if (encoding.count == 0) return;
  const SortedSides sorted = sort_sides(context, encoding.values, encoding.count, encoding.order);
  Side sides[2];
  for (int s = 0; s < 2; ++s) {
    Side& side = sides[s];
    side = {sorted.counts[s], 0, nullptr, nullptr, 0};
    if (side.count == 0) continue;
    float* y = sorted.side(s);
    const uint32_t wanted = segments > 0 ? segments : choose_segments(y, side.count, degree);
    side.segments = context.arena.array<Segment>(wanted);
    find_segments(context.simd, y, wanted, degree, side);
    fit_side(context, y, degree, side);
    // in place, because the fit does not need y any more
    evaluate_side(context.simd, side, degree, s == 0 ? 1.0f : -1.0f, y);
  }
  write(sides, degree, section);
  restore_order(sorted.magnitudes, encoding.order, encoding.count, encoding.decoded);
}

void decode(Context& context, ByteReader& section, uint32_t count, float* values) {
  if (count == 0) return section.expect_end();
  Side sides[2];
  const uint32_t positives = section.get<uint32_t>();
  if (positives > count)
    corrupt_payload("%s: expected at most %u positive values, got %u", section.section(), count,
                    positives);
  sides[0].count = positives;
  sides[1].count = count - positives;
  for (Side& side : sides) side.segment_count = section.get<uint16_t>();
  for (Side& side : sides) side.exponent = section.get<int16_t>();
  const int degree = section.get<uint8_t>();
  if (!poly_degree_is_valid(degree))
    corrupt_payload("%s: expected a degree of 1 to %d, got %d", section.section(), kMaxDegree,
                    degree);
  const uint32_t terms = static_cast<uint32_t>(degree) + 1;
  unsigned widths[kMaxDegree + 1];
  const unsigned length_width = section.get<uint8_t>();
  unsigned widest = length_width;
  for (uint32_t j = 0; j < terms; ++j) {
    widths[j] = section.get<uint8_t>();
    widest = widths[j] > widest ? widths[j] : widest;
  }
  if (widest > kMaxWidth)
    corrupt_payload("%s: expected fields of at most %u bits, got %u", section.section(), kMaxWidth,
                    widest);
  for (const Side& side : sides) {
    if (!poly_segments_are_valid(side.segment_count, side.count))
      corrupt_payload("%s: expected %u to %u segments for %u values, got %u", section.section(),
                      smaller(side.count, 1u), smaller(side.count, kMaxSegments), side.count,
                      side.segment_count);
    if (!poly_exponent_is_valid(side.exponent, side.count))
      corrupt_payload("%s: expected an exponent of %d to %d for %u values, got %d",
                      section.section(), side.count == 0 ? 0 : kLowestExponent,
                      side.count == 0 ? 0 : kHighestExponent, side.count, side.exponent);
  }

  const uint64_t bytes = section.remaining();
  BitReader reader(section.take(bytes), bytes, section.section());
  for (Side& side : sides) {
    side.segments = context.arena.array<Segment>(side.segment_count);
    uint32_t start = 0;
    for (uint32_t s = 0; s < side.segment_count; ++s) {
      const uint32_t rest = side.count - start;
      const bool last = s + 1 == side.segment_count;
      const uint32_t length = last ? rest : reader.get(length_width);
      if (length == 0 || (!last && length >= rest))
        corrupt_payload("%s: expected segments that fill %u values, got one of %u with %u left",
                        section.section(), side.count, length, rest);
      side.segments[s] = {start, length, {}};
      start += length;
    }
  }
  for (Side& side : sides) {
    side.coefficients = context.arena.array<int64_t>(uint64_t{side.segment_count} * terms);
    for (uint32_t i = 0; i < side.segment_count * terms; ++i) {
      const uint32_t j = i % terms;
      side.coefficients[i] = coefficient_of(reader.get(widths[j]), widths[j]);
      if (j >= side.segments[i / terms].length && side.coefficients[i] != 0)
        corrupt_payload("%s: expected coefficients of 0 above degree %u, got %lld of degree %u",
                        section.section(), side.segments[i / terms].length - 1,
                        static_cast<long long>(side.coefficients[i]), j);
    }
  }
  reader.expect_end();
  evaluate_side(context.simd, sides[0], degree, 1.0f, values);
  evaluate_side(context.simd, sides[1], degree, -1.0f, values + positives);
}

}  // namespace

extern const ValueCodec fit_poly_codec;
const ValueCodec fit_poly_codec = {kFitPoly, "FitPoly", true, bits_per_value, encode, decode};

}  // namespace deepreduce
