// FitDExp: one block per side fits the curve. The host adds all values in order, in 8 lanes. So the
// block works on tiles: while some threads prepare a tile, others add up the previous tiles, with
// one thread per lane of each sum.
#include "cuda/algorithms.cuh"
#include "cuda/value/fit_sides.cuh"
#include "value/dexp_element.h"

namespace deepreduce {
namespace cuda {
namespace {

constexpr uint32_t kTile = 256, kRing = 4;  // tiles that are processed at a time
constexpr uint32_t kFitThreads = 256, kWarp = 32;
using Tile = double[kTile];
constexpr uint32_t kFitShared = 4 * kRing * sizeof(Tile);
constexpr int kIntegralSums = sums_of(4), kSingleSums = sums_of(1), kDoubleSums = sums_of(2);
constexpr int kFactorSums = 2 * kSingleSums + kDoubleSums, kCandidates = 3;

struct Points {
  const float* y;
  uint32_t n;
  double scale, step;
  __device__ double value(uint32_t i) const { return y[i] * scale; }
  __device__ double x(uint32_t i) const { return i * step; }
  __device__ uint32_t tiles() const { return (n - 1) / kTile + 1; }
  __device__ uint32_t filled(uint32_t tile) const { return smaller(kTile, n - tile * kTile); }
};

// Determines the row and the column of each sum. Column `row + 1` is the values.
__device__ void place_of(int sum, int& row, int& column) {
  for (row = 0; sum > row + 1; ++row) sum -= row + 2;
  column = sum;
}

// Computes sums of products of the columns SS, x, S, 1 and the values. S and SS are the first and
// second cumulative integrals, by trapezoids. Two separate warps compute the two chains of
// additions, one tile apart. Then one thread per lane adds products. All threads of the block must
// call it.
__device__ void integrate(const Points& points, double* folded) {
  Tile* values = dynamic_shared<Tile>();  // (kRing,) tiles per column
  Tile *trapezoids = values + kRing, *firsts = values + 2 * kRing, *seconds = values + 3 * kRing;
  __shared__ double lanes[kIntegralSums][kLanes];
  constexpr uint32_t kAdders = 4 * kWarp, kLoaders = kFitThreads - kAdders - 2 * kWarp;
  static_assert(kIntegralSums * kLanes <= kAdders, "one thread a lane of each sum");
  const uint32_t tid = threadIdx.x, tiles = points.tiles();
  const double half = 0.5 * points.step;
  // the running sum of a chain; the warp of the second integral also keeps the previous value of
  // the first
  double running = 0.0, before_running = 0.0;
  double sum = 0.0;
  int row = 0, column = 0;
  const uint32_t lane = tid % kLanes;
  place_of(static_cast<int>(tid / kLanes), row, column);
  for (uint32_t round = 0; round < tiles + 3; ++round) {
    if (tid >= kAdders + 2 * kWarp) {  // loads tile `round`
      for (uint32_t e = tid - kAdders - 2 * kWarp; round < tiles && e < points.filled(round);
           e += kLoaders) {
        const uint32_t i = round * kTile + e;
        const double z = points.value(i);
        values[round % kRing][e] = z;
        trapezoids[round % kRing][e] = i == 0 ? 0.0 : trapezoid(z, points.value(i - 1), half);
      }
    } else if (tid == kAdders + kWarp && round >= 1 && round - 1 < tiles) {  // the first integral
      const uint32_t tile = round - 1, filled = points.filled(tile);
      const double* __restrict__ in = trapezoids[tile % kRing];
      double* __restrict__ out = firsts[tile % kRing];
      for (uint32_t e = 0; e < filled; ++e) {
        running = running + in[e];
        out[e] = running;
      }
    } else if (tid == kAdders && round >= 2 && round - 2 < tiles) {  // the second integral
      const uint32_t tile = round - 2, filled = points.filled(tile);
      const double* __restrict__ in = firsts[tile % kRing];
      double* __restrict__ out = seconds[tile % kRing];
      for (uint32_t e = 0; e < filled; ++e) {
        running = running + trapezoid(in[e], before_running, half);
        before_running = in[e];
        out[e] = running;
      }
    } else if (tid < kIntegralSums * kLanes && round >= 3) {  // products
      const uint32_t tile = round - 3, filled = points.filled(tile);
      const auto column_at = [&](int which, uint32_t e) {
        return which == 0   ? seconds[tile % kRing][e]
               : which == 1 ? points.x(tile * kTile + e)
               : which == 2 ? firsts[tile % kRing][e]
                            : 1.0;
      };
      for (uint32_t e = lane; e < filled; e += kLanes)
        sum = sum +
              column_at(row, e) * (column > row ? values[tile % kRing][e] : column_at(column, e));
    }
    __syncthreads();
  }
  if (tid < kIntegralSums * kLanes) lanes[tid / kLanes][lane] = sum;
  __syncthreads();
  if (tid < kIntegralSums) folded[tid] = fold_lanes(lanes[tid]);
  __syncthreads();
}

// Computes sums of the products of the exponentials with the rates of up to three candidates:
// constant, single, double. All threads of the block must call it.
__device__ void sum_exponentials(const Points& points, const float (*rates)[2], double* folded) {
  // the exponentials of the candidates (two for the last one), then the values
  constexpr int kColumns = kCandidates + 2;
  Tile* columns = dynamic_shared<Tile>();  // (2, kColumns)
  __shared__ double lanes[kFactorSums][kLanes];
  const uint32_t tid = threadIdx.x, tiles = points.tiles(), lane = tid % kLanes;
  const int which = static_cast<int>(tid / kLanes);
  int row = 0, column = 0;
  place_of(which < 2 * kSingleSums ? which % kSingleSums : which - 2 * kSingleSums, row, column);
  const int first = which < 2 * kSingleSums ? which / kSingleSums : 2;
  const int left = first + row, right = column > row ? kCandidates + 1 : first + column;
  double sum = 0.0;
  for (uint32_t tile = 0; tile <= tiles; ++tile) {
    for (uint32_t e = tid; tile < tiles && e < points.filled(tile); e += kFitThreads) {
      const uint32_t i = tile * kTile + e;
      const double x = points.x(i);
      for (int c = 0; c < kCandidates; ++c)
        columns[tile % 2 * kColumns + c][e] = exponential(rates[c][0], x);
      columns[tile % 2 * kColumns + kCandidates][e] = exponential(rates[kCandidates - 1][1], x);
      columns[tile % 2 * kColumns + kCandidates + 1][e] = points.value(i);
    }
    if (tid < kFactorSums * kLanes && tile > 0) {
      const Tile* of = columns + (tile - 1) % 2 * kColumns;
      for (uint32_t e = lane; e < points.filled(tile - 1); e += kLanes)
        sum = sum + of[left][e] * of[right][e];
    }
    __syncthreads();
  }
  if (tid < kFactorSums * kLanes) lanes[which][lane] = sum;
  __syncthreads();
  if (tid < kFactorSums) folded[tid] = fold_lanes(lanes[tid]);
  __syncthreads();
}

// Computes the squared errors of the candidates. All threads of the block must call it.
__device__ void sum_errors(const Points& points, const Curve* curves, double* folded) {
  Tile* squares = dynamic_shared<Tile>();  // (2, kCandidates)
  __shared__ double lanes[kCandidates][kLanes];
  const uint32_t tid = threadIdx.x, tiles = points.tiles();
  double sum = 0.0;
  for (uint32_t tile = 0; tile <= tiles; ++tile) {
    for (uint32_t e = tid; tile < tiles && e < points.filled(tile); e += kFitThreads) {
      const uint32_t i = tile * kTile + e;
      for (int c = 0; c < kCandidates; ++c) {
        const double difference = height(curves[c], points.x(i)) - points.value(i);
        squares[tile % 2 * kCandidates + c][e] = difference * difference;
      }
    }
    if (tid < kCandidates * kLanes && tile > 0)
      for (uint32_t e = tid % kLanes; e < points.filled(tile - 1); e += kLanes)
        sum = sum + squares[(tile - 1) % 2 * kCandidates + tid / kLanes][e];
    __syncthreads();
  }
  if (tid < kCandidates * kLanes) lanes[tid / kLanes][tid % kLanes] = sum;
  __syncthreads();
  if (tid < kCandidates) folded[tid] = fold_lanes(lanes[tid]);
  __syncthreads();
}

// One block per side. Uses Jacquelin's integral equations. A constant and a single exponential are
// also candidates. The candidate with the smallest squared error wins; with equal errors, the first
// one in the order constant, single, double.
__device__ void fit_sides(const float* magnitudes, const uint32_t* counts, Curve* curves) {
  __shared__ double integrals[kIntegralSums];
  __shared__ double factors[kFactorSums];
  __shared__ double errors[kCandidates];
  __shared__ float rates[kCandidates][2];
  __shared__ Curve candidates[kCandidates];
  __shared__ bool valid[kCandidates];
  const uint32_t side = blockIdx.x, n = counts[side], tid = threadIdx.x;
  if (n == 0) {
    if (tid == 0) curves[side] = Curve{};
    return;
  }
  const float* y = magnitudes + (side == 0 ? 0 : counts[0]);
  const int exponent = scale_exponent(y[0]);
  const Points points{y, n, std::ldexp(1.0, -exponent), step_of(n)};
  integrate(points, integrals);
  if (tid == 0) {
    double solution[4], two[2];
    const double constant[1] = {0.0};
    valid[0] = round_rates<1>(constant, rates[0]);
    valid[1] = solve<4>(integrals, 2, solution) && round_rates<1>(solution, rates[1]);
    valid[2] = n >= 4 && solve<4>(integrals, 0, solution) && two_rates(solution, two) &&
               round_rates<2>(two, rates[2]);
    for (int c = 0; c < kCandidates; ++c)
      if (!valid[c]) rates[c][0] = rates[c][1] = 0.0f;
  }
  __syncthreads();
  sum_exponentials(points, rates, factors);
  if (tid == 0) {
    for (Curve& curve : candidates) curve = Curve{};
    valid[0] = valid[0] && curve_of<1>(factors, rates[0], candidates[0]);
    valid[1] = valid[1] && curve_of<1>(factors + kSingleSums, rates[1], candidates[1]);
    valid[2] = valid[2] && curve_of<2>(factors + 2 * kSingleSums, rates[2], candidates[2]);
  }
  __syncthreads();
  sum_errors(points, candidates, errors);
  if (tid != 0) return;
  Curve best{};
  double least = bits_float(0x7F800000u);
  for (int c = 0; c < kCandidates; ++c)
    if (valid[c] && errors[c] < least) {
      best = candidates[c];
      least = errors[c];
    }
  best.a = unscaled(best.a, exponent);
  best.c = unscaled(best.c, exponent);
  curves[side] = best;
}

__device__ void write(const uint32_t* counts, const Curve* curves, uint32_t* section,
                      uint64_t* bytes) {
  if (grid_index() != 0) return;
  const bool any = counts[0] + counts[1] != 0;
  *bytes = any ? kDExpBytes : 0;
  if (!any) return;
  section[0] = counts[0];
  memcpy(section + 1, curves, 2 * sizeof(Curve));
}

// Evaluates the curve: values in sorted order, each written to the position given by `order`.
// section: null when encoding.
__device__ void evaluate(const uint32_t* counts, const Curve* curves, const DeviceSection* section,
                         const dr_cuda_result* result, const uint32_t* order, float* out) {
  if (section != nullptr && skipped(section, result)) return;
  const uint32_t count = counts[0] + counts[1];
  const Curve both[2] = {curves[0], curves[1]};
  const double steps[2] = {step_of(counts[0]), step_of(counts[1])};
  for (uint32_t at = grid_index(); at < count; at += grid_stride()) {
    const uint32_t side = at < counts[0] ? 0 : 1, i = side == 0 ? at : at - counts[0];
    const double value = to_value(height(both[side], i * steps[side]), side == 0 ? 1.0 : -1.0);
    out[order == nullptr ? at : order[at]] = static_cast<float>(value);
  }
}

__device__ void read(const DeviceSection* section, uint32_t* counts, Curve* curves,
                     dr_cuda_result* result) {
  if (grid_index() != 0 || skipped(section, result)) return;
  const uint32_t count = section->count;
  const uint64_t bytes = count == 0 ? 0 : kDExpBytes;
  counts[0] = counts[1] = 0;
  curves[0] = curves[1] = Curve{};
  if (section->bytes != bytes)
    return refuse(result, Refused::value_section_bytes, bytes, section->bytes);
  if (count == 0) return;
  const uint32_t positives = load_u32(section->data);
  if (positives > count) return refuse(result, Refused::positives, count, positives);
  counts[0] = positives;
  counts[1] = count - positives;
  for (uint32_t s = 0; s < 2; ++s) {
    float numbers[4];
    for (uint32_t j = 0; j < 4; ++j) {
      const uint32_t bits = load_u32(section->data + 4 + 16 * s + 4 * j);
      numbers[j] = bits_float(bits);
      if (!is_finite(numbers[j])) return refuse(result, Refused::curve_not_finite, s, bits);
      if (counts[s] == 0 && bits != 0)
        return refuse(result, Refused::curve_without_values, s, bits);
    }
    curves[s] = {numbers[0], numbers[1], numbers[2], numbers[3]};
  }
}

double bits_per_value(const double*) { return 16; }

uint64_t section_capacity(uint32_t capacity, const double*) {
  return capacity == 0 ? 0 : kDExpBytes;
}

void encode(Device& device, DeviceValueEncoding& encoding) {
  const uint64_t mark = device.mark();
  const SortedSides sorted =
      sort_sides(device, encoding.values, encoding.count, encoding.capacity, encoding.order);
  Curve* curves = device.array<Curve>(2);
  launch<fit_sides>(device, 2, kFitThreads, kFitShared, sorted.magnitudes, sorted.counts, curves);
  launch_elementwise<write>(device, 1, sorted.counts, curves,
                            reinterpret_cast<uint32_t*>(encoding.section.data),
                            encoding.section.bytes);
  launch_elementwise<evaluate>(device, blocks_for(encoding.capacity), sorted.counts, curves,
                               nullptr, device.result(), encoding.order, encoding.decoded);
  device.release(mark);
}

uint32_t most_count(uint64_t bytes) { return bytes == 0 ? 0 : UINT32_MAX; }

void decode(Device& device, const DeviceSection* section, uint32_t capacity, uint64_t,
            float* values) {
  const uint64_t mark = device.mark();
  uint32_t* counts = device.array<uint32_t>(2);
  Curve* curves = device.array<Curve>(2);
  launch_elementwise<read>(device, 1, section, counts, curves, device.result());
  launch_elementwise<evaluate>(device, blocks_for(capacity), counts, curves, section,
                               device.result(), nullptr, values);
  device.release(mark);
}

}  // namespace

extern const DeviceValueCodec fit_dexp_device_codec;
const DeviceValueCodec fit_dexp_device_codec = {
    kFitDExp, "FitDExp", true, bits_per_value, section_capacity, encode, most_count, decode};

}  // namespace cuda
}  // namespace deepreduce
