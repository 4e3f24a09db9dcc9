// FitPoly: reads and writes the fields of the section, and computes the values from them. The
// header determines the position of every field.
#include "cuda/value/fit_poly.cuh"

#include "cuda/algorithms.cuh"
#include "support/bits.h"

namespace deepreduce {
namespace cuda {
namespace {

__device__ void start_sides(const float* magnitudes, const uint32_t* counts, PolyHead* head,
                            int degree, uint32_t segments) {
  if (grid_index() >= 2) return;
  const uint32_t s = grid_index(), count = counts[s], start = s == 0 ? 0 : counts[0];
  uint32_t wanted = segments;
  if (segments == 0 && count != 0) wanted = choose_segments(magnitudes + start, count, degree);
  head->side[s] = {start, count, count == 0 ? 0 : wanted, 0, 0, {}, 0, 0};
}

__device__ uint32_t length_fields(const PolySide& side) {
  return side.segments == 0 ? 0 : side.segments - 1;
}

__device__ void put_bytes(uint8_t* to, uint32_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) to[i] = static_cast<uint8_t>(value >> 8 * i);
}

// Runs in one thread: writes the widths and the bytes before the fields.
__device__ void write_head(PolyHead* head, int degree, uint8_t* section, uint64_t* bytes) {
  if (grid_index() != 0) return;
  const PolySide& first = head->side[0];
  const PolySide& second = head->side[1];
  *bytes = 0;
  if (first.count + second.count == 0) return;
  const uint32_t terms = static_cast<uint32_t>(degree) + 1;
  head->degree = static_cast<uint32_t>(degree);
  head->length_width = bit_length(first.lengths | second.lengths);
  head->row_width = 0;
  put_bytes(section, first.count, 4);
  for (int s = 0; s < 2; ++s) {
    put_bytes(section + 4 + 2 * s, head->side[s].segments, 2);
    put_bytes(section + 8 + 2 * s, static_cast<uint32_t>(head->side[s].exponent), 2);
  }
  section[12] = static_cast<uint8_t>(degree);
  section[13] = static_cast<uint8_t>(head->length_width);
  for (uint32_t j = 0; j < terms; ++j) {
    const unsigned width = column_width(((first.used | second.used) >> j & 1u) != 0,
                                        first.columns[j] | second.columns[j]);
    head->width[j] = width;
    head->row_width += width;
    section[kPolyHead + j] = static_cast<uint8_t>(width);
  }
  const uint64_t bits =
      uint64_t{length_fields(first) + length_fields(second)} * head->length_width +
      uint64_t{first.segments + second.segments} * head->row_width;
  *bytes = kPolyHead + terms + (bits + 7) / 8;
}

// The words must start as zeros; `value` is below 2^width.
__device__ void put_field(uint32_t* words, uint64_t bit, unsigned width, uint32_t value) {
  if (width == 0) return;
  const uint64_t shifted = uint64_t{value} << bit % 32;
  atomicOr(words + bit / 32, static_cast<uint32_t>(shifted));
  if (bit % 32 + width > 32) atomicOr(words + bit / 32 + 1, static_cast<uint32_t>(shifted >> 32));
}

// Return the positions of the bits of a segment's length (the last segment of a side has none) and
// coefficients, relative to the first field.
__device__ uint64_t length_bit(const PolyHead& head, uint32_t side, uint32_t s) {
  return uint64_t{(side == 0 ? 0 : length_fields(head.side[0])) + s} * head.length_width;
}
__device__ uint64_t coefficients_bit(const PolyHead& head, uint32_t side, uint32_t s) {
  return uint64_t{length_fields(head.side[0]) + length_fields(head.side[1])} * head.length_width +
         uint64_t{(side == 0 ? 0 : head.side[0].segments) + s} * head.row_width;
}

// One thread per segment: writes its fields, and computes the powers that they represent.
__device__ void write_segments(PolyArrays arrays, uint32_t* words) {
  const PolyHead& head = *arrays.head;
  for (uint32_t place = grid_index(); place < 2 * arrays.most; place += grid_stride()) {
    const uint32_t side = place / arrays.most, s = place % arrays.most,
                   segments = head.side[side].segments;
    if (s >= segments) continue;
    const uint32_t length = segment_end(arrays, side, s) - arrays.starts[place];
    const uint64_t fields = 8 * (kPolyHead + head.degree + 1);
    const int64_t* coefficients = arrays.coefficients + uint64_t{place} * kMostTerms;
    if (s + 1 < segments)
      put_field(words, fields + length_bit(head, side, s), head.length_width, length);
    uint64_t bit = fields + coefficients_bit(head, side, s);
    for (uint32_t j = 0; j <= head.degree; bit += head.width[j], ++j)
      put_field(words, bit, head.width[j], field_of(coefficients[j], head.width[j]));
    segment_powers(coefficients, head.side[side].exponent, length, static_cast<int>(head.degree),
                   arrays.powers + uint64_t{place} * kMostTerms);
  }
}

// Evaluates the polynomials: values in sorted order, each written to the position given by `order`.
// section: null when encoding.
__device__ void evaluate(PolyArrays arrays, const DeviceSection* section,
                         const dr_cuda_result* result, const uint32_t* order, float* out) {
  if (section != nullptr && skipped(section, result)) return;
  const PolyHead& head = *arrays.head;
  const uint32_t positives = head.side[0].count, count = positives + head.side[1].count;
  for (uint32_t at = grid_index(); at < count; at += grid_stride()) {
    const uint32_t side = at < positives ? 0 : 1, mine = at - head.side[side].start;
    const uint32_t* starts = arrays.starts + side * arrays.most;
    // the last segment that starts at or before it
    uint32_t low = 0, high = head.side[side].segments;
    while (high - low > 1) {
      const uint32_t middle = low + (high - low) / 2;
      (starts[middle] <= mine ? low : high) = middle;
    }
    const uint32_t n = segment_end(arrays, side, low) - starts[low];
    const double* powers = arrays.powers + uint64_t{side * arrays.most + low} * kMostTerms;
    const double x = point_offset(mine - starts[low], n) * (1.0 / n);
    int j = static_cast<int>(smaller(head.degree, n - 1));
    double value = powers[j];
    while (--j >= 0) value = horner(value, x, powers[j]);
    out[order == nullptr ? at : order[at]] =
        static_cast<float>(to_value(value, side == 0 ? 1.0 : -1.0));
  }
}

// Runs in one thread: reads everything before the fields. Returns false if it is refused.
__device__ bool read_head(const DeviceSection* section, PolyHead& head, dr_cuda_result* result) {
  const uint32_t count = section->count;
  const uint8_t* data = section->data;
  const auto no = [&](Refused what, uint64_t expected, uint64_t got) {
    refuse(result, what, expected, got);
    return false;
  };
  if (section->bytes < kPolyHead)
    return no(Refused::value_section_bytes, kPolyHead, section->bytes);
  const uint32_t positives = load_u32(data);
  if (positives > count) return no(Refused::positives, count, positives);
  head.degree = data[12];
  if (!poly_degree_is_valid(static_cast<int>(head.degree)))
    return no(Refused::degree, kMaxDegree, head.degree);
  const uint32_t terms = head.degree + 1;
  const uint64_t fields_at = kPolyHead + terms;
  if (section->bytes < fields_at)
    return no(Refused::value_section_bytes, fields_at, section->bytes);
  head.length_width = data[13];
  unsigned widest = head.length_width;
  head.row_width = 0;
  for (uint32_t j = 0; j < terms; ++j) {
    head.width[j] = data[kPolyHead + j];
    head.row_width += head.width[j];
    widest = larger(widest, head.width[j]);
  }
  if (widest > kMaxWidth) return no(Refused::field_width, kMaxWidth, widest);
  for (uint32_t s = 0; s < 2; ++s) {
    const uint32_t mine = s == 0 ? positives : count - positives,
                   segments = load_u32(data + 4 + 2 * s) & 0xFFFFu;
    const uint32_t raw = load_u32(data + 8 + 2 * s) & 0xFFFFu;
    const int exponent = static_cast<int16_t>(raw);
    if (!poly_segments_are_valid(segments, mine)) return no(Refused::segments, mine, segments);
    if (!poly_exponent_is_valid(exponent, mine))
      return no(Refused::exponent, kHighestExponent, raw);
    head.side[s] = {s == 0 ? 0 : positives, mine, 0, segments, exponent, {}, 0, 0};
  }
  const uint64_t bits = coefficients_bit(head, 1, head.side[1].segments),
                 bytes = fields_at + (bits + 7) / 8;
  if (section->bytes != bytes) return no(Refused::value_section_bytes, bytes, section->bytes);
  return expect_zero_padding(data + fields_at, bits, result);
}

__device__ uint32_t field_at(const DeviceSection* section, const PolyHead& head, uint64_t bit,
                             unsigned width) {
  const uint64_t before = kPolyHead + head.degree + 1;
  return static_cast<uint32_t>(load_bits(section->data + before, section->bytes - before, bit) &
                               ((uint64_t{1} << width) - 1));
}

// Runs in one block: reads the head, and where segments start.
__device__ void read_starts(const DeviceSection* section, PolyArrays arrays,
                            dr_cuda_result* result) {
  __shared__ uint64_t shared[33];
  if (block_skipped(section, result)) return;
  PolyHead& head = *arrays.head;
  bool good = true;
  if (threadIdx.x == 0) {
    if (section->count != 0) {
      good = read_head(section, head, result);
    } else {
      head = PolyHead{};
      if (section->bytes != 0) refuse(result, Refused::value_section_bytes, 0, section->bytes);
    }
  }
  if (!__syncthreads_and(good)) return;
  for (uint32_t side = 0; side < 2; ++side) {
    const PolySide& mine = head.side[side];
    uint64_t start = 0;
    for (uint32_t base = 0; base < mine.segments; base += kThreads) {
      const uint32_t s = base + threadIdx.x;
      const bool has_field = s < length_fields(mine);
      const uint64_t length =
          has_field ? field_at(section, head, length_bit(head, side, s), head.length_width) : 0;
      uint64_t total;
      const uint64_t before = start + block_exclusive_sum(length, shared, &total);
      if (has_field && (length == 0 || before + length >= mine.count))
        refuse(result, Refused::segment_length, mine.count, length);
      if (s < mine.segments) arrays.starts[side * arrays.most + s] = static_cast<uint32_t>(before);
      start += total;
      __syncthreads();
    }
  }
}

// One thread per segment.
__device__ void read_coefficients(const DeviceSection* section, PolyArrays arrays,
                                  dr_cuda_result* result) {
  if (skipped(section, result)) return;
  const PolyHead& head = *arrays.head;
  for (uint32_t place = grid_index(); place < 2 * arrays.most; place += grid_stride()) {
    const uint32_t side = place / arrays.most, s = place % arrays.most;
    if (s >= head.side[side].segments) continue;
    const uint32_t length = segment_end(arrays, side, s) - arrays.starts[place];
    int64_t coefficients[kMostTerms];
    uint64_t bit = coefficients_bit(head, side, s);
    for (uint32_t j = 0; j <= head.degree; bit += head.width[j], ++j) {
      coefficients[j] = coefficient_of(field_at(section, head, bit, head.width[j]), head.width[j]);
      if (j >= length && coefficients[j] != 0)
        refuse(result, Refused::high_coefficient, length - 1, j);
    }
    segment_powers(coefficients, head.side[side].exponent, length, static_cast<int>(head.degree),
                   arrays.powers + uint64_t{place} * kMostTerms);
  }
}

PolyArrays poly_arrays(Device& device, uint32_t most) {
  const uint64_t places = uint64_t{2} * most;
  PolyHead* head = device.array<PolyHead>(1);
  uint32_t* starts = device.array<uint32_t>(places);
  int64_t* coefficients = device.array<int64_t>(places * kMostTerms);
  return {head, starts, coefficients, device.array<double>(places * kMostTerms), most};
}

// Returns the maximum number of segments of a side: each one has all its terms, unless there is
// only one.
uint32_t most_segments(uint32_t capacity, const PolySettings& settings) {
  const uint32_t wanted = settings.segments == 0 ? kMaxSegments : settings.segments;
  return std::max(1u, std::min(wanted, capacity / static_cast<uint32_t>(settings.degree + 1)));
}

double bits_per_value(const double*) { return 16; }

uint64_t section_capacity(uint32_t capacity, const double* parameters) {
  const PolySettings settings = poly_settings(parameters);
  if (capacity == 0) return 0;
  const uint64_t terms = static_cast<uint64_t>(settings.degree) + 1,
                 segments = uint64_t{2} * most_segments(capacity, settings);
  return kPolyHead + terms + (segments * kMaxWidth * (1 + terms) + 7) / 8;
}

void encode(Device& device, DeviceValueEncoding& encoding) {
  const auto [degree, segments] = poly_settings(encoding.parameters);
  const uint64_t mark = device.mark();
  const SortedSides sorted =
      sort_sides(device, encoding.values, encoding.count, encoding.capacity, encoding.order);
  const PolyArrays arrays =
      poly_arrays(device, most_segments(encoding.capacity, {degree, segments}));
  launch_elementwise<start_sides>(device, 1, sorted.magnitudes, sorted.counts, arrays.head, degree,
                                  segments);
  find_segments(device, sorted.magnitudes, arrays, encoding.capacity, degree);
  fit_segments(device, sorted.magnitudes, arrays, degree);
  device.zero(encoding.section.data, encoding.section.capacity + kSectionSlack);
  launch_elementwise<write_head>(device, 1, arrays.head, degree, encoding.section.data,
                                 encoding.section.bytes);
  launch_elementwise<write_segments>(device, blocks_for(uint64_t{2} * arrays.most), arrays,
                                     reinterpret_cast<uint32_t*>(encoding.section.data));
  launch_elementwise<evaluate>(device, blocks_for(encoding.capacity), arrays, nullptr,
                               device.result(), encoding.order, encoding.decoded);
  device.release(mark);
}

uint32_t most_count(uint64_t bytes) { return bytes == 0 ? 0 : UINT32_MAX; }

void decode(Device& device, const DeviceSection* section, uint32_t capacity, uint64_t,
            float* values) {
  const uint64_t mark = device.mark();
  const PolyArrays arrays = poly_arrays(device, std::max(1u, std::min(capacity, kMaxSegments)));
  launch<read_starts>(device, 1, kThreads, 0, section, arrays, device.result());
  launch_elementwise<read_coefficients>(device, blocks_for(uint64_t{2} * arrays.most), section,
                                        arrays, device.result());
  launch_elementwise<evaluate>(device, blocks_for(capacity), arrays, section, device.result(),
                               nullptr, values);
  device.release(mark);
}

}  // namespace

extern const DeviceValueCodec fit_poly_device_codec;
const DeviceValueCodec fit_poly_device_codec = {
    kFitPoly, "FitPoly", true, bits_per_value, section_capacity, encode, most_count, decode};

}  // namespace cuda
}  // namespace deepreduce
