// The least squares of FitPoly: one block per segment. Some threads compute the products of a tile.
// Others add the products of the previous tile, one thread per lane of a sum, in the order of the
// host. Then one block per side determines the step of the coefficients.
#include "cuda/algorithms.cuh"
#include "cuda/value/fit_poly.cuh"

namespace deepreduce {
namespace cuda {
namespace {

constexpr uint32_t kTile = 256, kSums = kMostTerms + 1;  // the last sum is the sum of squares
constexpr uint32_t kAdders = 96, kMomentThreads = kAdders + kTile;
constexpr uint32_t kRow = kTile + kLanes;  // so rows of products start in different banks
static_assert(kSums * kLanes <= kAdders, "one thread a lane of each sum");

__device__ void sum_moments(const float* magnitudes, PolyArrays arrays, int degree, double* fits,
                            double* totals) {
  __shared__ double products[2][kSums][kRow];
  __shared__ double lanes[kSums][kLanes];
  __shared__ Recurrence recurrence;
  const uint32_t side = blockIdx.x / arrays.most, s = blockIdx.x % arrays.most, tid = threadIdx.x;
  if (s >= arrays.head->side[side].segments) return;
  const uint32_t place = side * arrays.most + s, start = arrays.starts[place],
                 n = segment_end(arrays, side, s) - start;
  const float* y = magnitudes + arrays.head->side[side].start + start;
  if (tid == 0) recurrence = recurrence_of(n, degree);
  __syncthreads();
  const int usable = recurrence.degree;
  const double inverse = 1.0 / n;
  const uint32_t tiles = (n - 1) / kTile + 1;
  double sum = 0.0;
  for (uint32_t tile = 0; tile <= tiles; ++tile) {
    if (tid >= kAdders) {
      const uint32_t e = tid - kAdders;
      const uint64_t i = uint64_t{tile} * kTile + e;
      if (i < n) {
        double (*row)[kRow] = products[tile % 2];
        const double value = y[i], x = point_offset(static_cast<uint32_t>(i), n) * inverse;
        row[0][e] = value;
        double before = 1.0, now = x;
        for (int j = 1; j <= usable; ++j) {
          row[j][e] = value * now;
          const double next = next_gram(x, now, recurrence.beta[j], before);
          before = now;
          now = next;
        }
        row[kSums - 1][e] = value * value;
      }
    } else if (tid < kSums * kLanes && tile > 0) {
      const uint32_t first = (tile - 1) * kTile, filled = smaller(kTile, n - first);
      const double* row = products[(tile - 1) % 2][tid / kLanes];
      if (filled == kTile) {  // a constant number of steps
        for (uint32_t i = 0; i < kTile; i += kLanes) sum += row[i + tid % kLanes];
      } else {
        for (uint32_t i = tid % kLanes; i < filled; i += kLanes) sum += row[i];
      }
    }
    __syncthreads();
  }
  if (tid < kSums * kLanes) lanes[tid / kLanes][tid % kLanes] = sum;
  __syncthreads();
  if (tid >= kSums) return;
  const double moment = fold_lanes(lanes[tid]);
  if (tid == kSums - 1) {
    totals[place] = moment;
  } else {
    fits[uint64_t{place} * kMostTerms + tid] =
        static_cast<int>(tid) <= usable ? moment / recurrence.norm[tid] : 0.0;
  }
}

// One block per side: adds the sums of its segments in the order of the host, then computes the
// coefficients.
__device__ void quantize(PolyArrays arrays, int degree, const double* fits, const double* totals) {
  __shared__ double squares[kThreads];
  __shared__ double total_chunk[kThreads];
  __shared__ uint32_t columns[kMostTerms];
  __shared__ uint32_t used, lengths;
  __shared__ int exponent;
  PolySide& side = arrays.head->side[blockIdx.x];
  const uint32_t terms = static_cast<uint32_t>(degree) + 1, segments = side.segments,
                 all = segments * terms, tid = threadIdx.x;
  const uint64_t place = uint64_t{blockIdx.x} * arrays.most;
  double total = 0.0, fitted = 0.0;
  for (uint32_t base = 0; base < all; base += kThreads) {
    const uint32_t i = base + tid;
    const double fit = i < all ? fits[(place + i / terms) * kMostTerms + i % terms] : 0.0;
    squares[tid] = fit * fit;  // zeros change no sum
    total_chunk[tid] = i < segments ? totals[place + i] : 0.0;
    __syncthreads();
    if (tid == 0)
      for (uint32_t at = 0; at < kThreads; ++at) fitted += squares[at];
    if (tid == 32 && base < segments)
      for (uint32_t at = 0; at < kThreads; ++at) total += total_chunk[at];
    __syncthreads();
  }
  if (tid == 32) total_chunk[0] = total;
  __syncthreads();
  if (tid < kMostTerms) columns[tid] = 0;
  if (tid == 0) {
    used = lengths = 0;
    exponent = side_exponent(total_chunk[0], fitted, all);
  }
  __syncthreads();
  for (uint32_t i = tid; i < all; i += kThreads) {
    const uint64_t at = (place + i / terms) * kMostTerms + i % terms;
    const int64_t coefficient = quantized(fits[at], exponent);
    arrays.coefficients[at] = coefficient;
    atomicOr(columns + i % terms, static_cast<uint32_t>(bits_without_sign(coefficient)));
    if (coefficient != 0) atomicOr(&used, 1u << i % terms);
  }
  for (uint32_t s = tid; s + 1 < segments; s += kThreads)
    atomicOr(&lengths, arrays.starts[place + s + 1] - arrays.starts[place + s]);
  __syncthreads();
  if (tid < kMostTerms) side.columns[tid] = columns[tid];
  if (tid != 0) return;
  side.exponent = exponent;
  side.used = used;
  side.lengths = lengths;
}

}  // namespace

void fit_segments(Device& device, const float* magnitudes, const PolyArrays& arrays, int degree) {
  const uint64_t mark = device.mark();
  double* fits = device.array<double>(uint64_t{2} * arrays.most * kMostTerms);
  double* totals = device.array<double>(uint64_t{2} * arrays.most);
  launch<sum_moments, kMomentThreads>(device, 2 * arrays.most, kMomentThreads, 0, magnitudes,
                                      arrays, degree, fits, totals);
  launch<quantize>(device, 2, kThreads, 0, arrays, degree, fits, totals);
  device.release(mark);
}

}  // namespace cuda
}  // namespace deepreduce
