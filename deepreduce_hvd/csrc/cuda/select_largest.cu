// TopK and Threshold. While the gradient is added to the memory, candidates are collected: the
// elements above a limit. The limit comes from a sample and is probably a little below the k-th
// magnitude. A radix select finds the exact k-th magnitude among the candidates, and the selected
// elements are written in the order of their tiles. If the sample was wrong, which only the device
// knows, the same kernels process all elements instead.
#include <cmath>

#include "cuda/algorithms.cuh"
#include "cuda/select.cuh"
#include "support/random.h"

namespace deepreduce {
namespace cuda {
namespace {

constexpr uint32_t kSamples = 1u << 16, kElementsASample = 16;
// bins of a sixteenth of an octave: the exponent and 4 bits of the mantissa
constexpr unsigned kSampleShift = 19;
constexpr uint32_t kSampleBins = 1u << (31 - kSampleShift);
constexpr uint32_t kSpareCandidates = 1u << 16;
constexpr uint32_t kSmallestNonZero = 1;
constexpr uint32_t kPickThreads = 1024, kCountBlocks = 1024;
constexpr int kPasses = 3;  // of the radix select
DR_HOST_DEVICE constexpr unsigned shift_of(int pass) {
  return 20u - 10u * static_cast<unsigned>(pass);
}
DR_HOST_DEVICE constexpr unsigned digits_of(int pass) { return pass == 0 ? 11 : 10; }
constexpr uint32_t kBins = 1u << 11;

// Initialized to zeros.
struct State {
  uint32_t limit;        // lower limit of the candidates
  uint32_t found;        // number of candidates
  uint32_t k, capacity;  // capacity of the candidates' arrays
  // the k-th magnitude so far, and how many elements with the same digits are among the k largest
  uint32_t bits, rest;
  uint32_t fewer;  // fewer than k elements are not zero: bits and rest are 0
  uint32_t selected;
  uint32_t sample_bins[kSampleBins], bins[kPasses][kBins];

  // Whether the candidates are not sufficient, so that all elements are needed.
  __device__ bool everything() const {
    return found > capacity || (found < k && limit > kSmallestNonZero);
  }
};

// All magnitudes above `bits` are selected, and the first `ties` magnitudes equal to it.
struct Kth {
  uint32_t bits, ties;
};

// Samples a random place in each of `samples` parts. A fixed stride would fail for periodic data.
__device__ void sample(Accumulated sum, const float* velocity, float momentum, uint32_t d,
                       uint32_t samples, State* state) {
  for (uint32_t j = grid_index(); j < samples; j += grid_stride()) {
    const uint64_t from = uint64_t{j} * d / samples, to = uint64_t{j + 1} * d / samples;
    const uint64_t at = from + random_below(0, j, static_cast<uint32_t>(to - from));
    float value = sum.gradient_at(at);
    if (sum.residual != nullptr)
      value = sum.residual[at] + value + (velocity != nullptr ? momentum * velocity[at] : 0.0f);
    const uint32_t bin = magnitude_bits(value) >> kSampleShift;
    // nothing reads the count of the last bin; zeros may be frequent, and their atomics would wait
    // for each other
    if (bin != 0) atomicAdd(state->sample_bins + bin, 1u);
  }
}

// Returns the bin, counted down from the last one, in which the running count reaches `rank` (from
// 1). *above: the number of elements in later bins. kPickThreads threads must call it. False if
// there are fewer elements in total.
__device__ bool bin_from_top(const uint32_t* bins, uint32_t count, uint32_t rank, uint32_t* bin,
                             uint32_t* above) {
  __shared__ uint32_t sums[33];
  __shared__ uint32_t answer[2];
  const uint32_t each = (count + kPickThreads - 1) / kPickThreads;
  const uint32_t first = threadIdx.x * each;  // counted down from the last bin
  uint32_t mine = 0, total;
  for (uint32_t i = first; i < first + each && i < count; ++i) mine += bins[count - 1 - i];
  uint32_t before = block_exclusive_sum(mine, sums, &total);
  if (before < rank && before + mine >= rank) {
    uint32_t i = first;
    for (; before + bins[count - 1 - i] < rank; ++i) before += bins[count - 1 - i];
    answer[0] = count - 1 - i;
    answer[1] = before;
  }
  __syncthreads();
  if (total < rank) return false;
  *bin = answer[0];
  *above = answer[1];
  return true;
}

__device__ void pick_limit(uint32_t rank, uint32_t k, uint32_t capacity, State* state) {
  uint32_t bin = 0, above;
  bin_from_top(state->sample_bins, kSampleBins, rank, &bin, &above);
  if (threadIdx.x != 0) return;
  const uint32_t limit = bin << kSampleShift;
  state->limit = limit < kSmallestNonZero ? kSmallestNonZero : limit;
  state->k = state->rest = k;
  state->capacity = capacity;
}

// Counts the digits after `shift` of the magnitudes that begin with the digits found so far.
__device__ void count_digits(Accumulated sum, uint32_t d, const float* candidates, State* state,
                             int pass, const dr_cuda_result* result) {
  __shared__ uint32_t counts[kBins];
  if (result->non_finite != 0 || state->fewer != 0) return;
  for (uint32_t bin = threadIdx.x; bin < kBins; bin += blockDim.x) counts[bin] = 0;
  __syncthreads();
  const bool everything = state->everything();
  const uint32_t n = everything ? d : state->found, upper = state->bits;
  const unsigned shift = shift_of(pass), digits = digits_of(pass);
  for (uint32_t i = grid_index(); i < n; i += grid_stride()) {
    const uint32_t bits = magnitude_bits(everything ? sum.at(i) : candidates[i]);
    if (bits >= kSmallestNonZero && (bits ^ upper) >> (shift + digits) == 0)
      atomicAdd(counts + (bits >> shift & ((1u << digits) - 1)), 1u);
  }
  __syncthreads();
  for (uint32_t bin = threadIdx.x; bin < kBins; bin += blockDim.x)
    if (counts[bin] != 0) atomicAdd(state->bins[pass] + bin, counts[bin]);
}

__device__ void pick_digit(State* state, int pass) {
  if (state->fewer != 0) return;
  const uint32_t rest = state->rest;
  uint32_t bin, above;
  const bool there = bin_from_top(state->bins[pass], 1u << digits_of(pass), rest, &bin, &above);
  __syncthreads();  // all threads have read the state
  if (threadIdx.x != 0) return;
  state->fewer = !there;
  state->bits = there ? state->bits | bin << shift_of(pass) : 0;
  state->rest = there ? rest - above : 0;
}

// The elements of a tile: its candidates, or all of them.
struct Run {
  const uint32_t* indices;  // null: start + i
  const float* values;      // null: sum.at(start + i)
  uint32_t start, count;
};

__device__ Run run_of(uint32_t tile, uint32_t d, const State* state, const Candidates& candidates) {
  if (state != nullptr && !state->everything()) {
    const uint32_t start = candidates.starts[tile];
    return {candidates.indices + start, candidates.values + start, start, candidates.counts[tile]};
  }
  const uint32_t start = tile * kTile;
  return {nullptr, nullptr, start, d - start < kTile ? d - start : kTile};
}

__device__ float value_of(const Run& run, const Accumulated& sum, uint32_t i) {
  return run.values != nullptr ? run.values[i] : sum.at(run.start + i);
}
__device__ uint32_t index_of(const Run& run, uint32_t i) {
  return run.indices != nullptr ? run.indices[i] : run.start + i;
}

// One warp per tile. Counts the magnitudes above the k-th one (upper half of the count) and equal
// to it (lower half).
__device__ void count_selected(Accumulated sum, uint32_t d, uint32_t tiles, const State* state,
                               Kth given, Candidates candidates, uint64_t* counts,
                               const dr_cuda_result* result) {
  if (result->non_finite != 0) return;
  const uint32_t kth = state != nullptr ? state->bits : given.bits, lane = threadIdx.x % 32;
  for (uint32_t tile = grid_index() / 32; tile < tiles; tile += grid_stride() / 32) {
    const Run run = run_of(tile, d, state, candidates);
    uint32_t larger = 0, equal = 0;
    for (uint32_t i = lane; i < run.count; i += 32) {
      const uint32_t bits = magnitude_bits(value_of(run, sum, i));
      larger += bits > kth;
      equal += bits == kth;
    }
    const uint64_t count = warp_sum(static_cast<uint64_t>(larger) << 32 | equal);
    if (lane == 0) counts[tile] = count;
  }
}

// One warp per tile. Writes the selected elements after those of the tiles before.
__device__ void write_selected(Accumulated sum, uint32_t d, uint32_t tiles, const State* state,
                               Kth given, Candidates candidates, const uint64_t* before,
                               uint32_t* count, uint32_t* indices, float* values,
                               const dr_cuda_result* result) {
  if (result->non_finite != 0) return;
  const uint32_t kth = state != nullptr ? state->bits : given.bits,
                 ties = state != nullptr ? state->rest : given.ties;
  const uint32_t lane = threadIdx.x % 32, lower = (1u << lane) - 1;
  for (uint32_t tile = grid_index() / 32; tile < tiles; tile += grid_stride() / 32) {
    const Run run = run_of(tile, d, state, candidates);
    uint32_t larger = static_cast<uint32_t>(before[tile] >> 32),
             equal = static_cast<uint32_t>(before[tile]);
    for (uint32_t i = 0; i < run.count; i += 32) {
      const float value = i + lane < run.count ? value_of(run, sum, i + lane) : 0.0f;
      const uint32_t bits = i + lane < run.count ? magnitude_bits(value) : 0;
      const bool is_larger = bits > kth, is_equal = bits == kth && bits != 0;
      const uint32_t all_larger = __ballot_sync(0xFFFFFFFFu, is_larger),
                     all_equal = __ballot_sync(0xFFFFFFFFu, is_equal);
      const uint32_t my_equal = equal + static_cast<uint32_t>(__popc(all_equal & lower));
      const uint32_t at = larger + static_cast<uint32_t>(__popc(all_larger & lower)) +
                          (my_equal < ties ? my_equal : ties);
      if (is_larger || (is_equal && my_equal < ties)) {
        indices[at] = index_of(run, i + lane);
        values[at] = value;
      }
      larger += static_cast<uint32_t>(__popc(all_larger));
      equal += static_cast<uint32_t>(__popc(all_equal));
    }
    if (tile + 1 == tiles && lane == 0) *count = larger + (equal < ties ? equal : ties);
  }
}

// Writes the elements above the k-th magnitude of `state` (null: of `kth`). *count must be 0
// before.
DeviceSelection write(Device& device, const Encoding& encoding, const State* state, Kth kth,
                      const Candidates& candidates, uint32_t* count, uint32_t capacity) {
  const uint32_t d = static_cast<uint32_t>(encoding.d), tiles = tiles_of(d),
                 blocks = blocks_for(uint64_t{32} * tiles);
  const Accumulated sum = accumulated(encoding);
  uint32_t* indices = device.array<uint32_t>(capacity);
  float* values = device.array<float>(capacity);
  uint64_t* counts = device.array<uint64_t>(tiles);
  launch<count_selected>(device, blocks, kThreads, 0, sum, d, tiles, state, kth, candidates, counts,
                         device.result());
  exclusive_sum(device, counts, counts, tiles);
  launch<write_selected>(device, blocks, kThreads, 0, sum, d, tiles, state, kth, candidates, counts,
                         count, indices, values, device.result());
  return {capacity, count, indices, values};
}

}  // namespace

DeviceSelection select_largest(Device& device, const dr_codec& codec, const Encoding& encoding,
                               uint32_t k) {
  const uint32_t d = static_cast<uint32_t>(encoding.d);
  const Accumulated sum = accumulated(encoding);
  const uint32_t capacity =
      static_cast<uint32_t>(std::min<uint64_t>(d, uint64_t{4} * k + kSpareCandidates));
  State* state = device.zeros<State>(1);
  // a rank in the sample whose magnitude is almost certainly below the k-th one
  const uint32_t samples = std::min(kSamples, d / kElementsASample);
  const double expected = samples == 0 ? 0 : static_cast<double>(k) * samples / d;
  const double rank =
      std::min(expected + 4 * std::sqrt(expected) + 3, static_cast<double>(samples) + 1);
  launch_elementwise<sample>(device, blocks_for(samples), sum, encoding.velocity,
                             static_cast<float>(codec.memory.parameters[0]), d, samples, state);
  launch<pick_limit, kPickThreads>(device, 1, kPickThreads, 0, static_cast<uint32_t>(rank), k,
                                   capacity, state);

  Candidates candidates{};
  candidates.limit = &state->limit;
  candidates.found = &state->found;
  candidates.capacity = capacity;
  candidates.indices = device.array<uint32_t>(capacity);
  candidates.values = device.array<float>(capacity);
  candidates.starts = device.array<uint32_t>(tiles_of(d));
  candidates.counts = device.array<uint32_t>(tiles_of(d));
  accumulate(device, codec, encoding, candidates);
  for (int pass = 0; pass < kPasses; ++pass) {
    launch<count_digits>(device, std::min(blocks_for(d, 64), kCountBlocks), kThreads, 0, sum, d,
                         candidates.values, state, pass, device.result());
    launch<pick_digit, kPickThreads>(device, 1, kPickThreads, 0, state, pass);
  }
  return write(device, encoding, state, Kth{}, candidates, &state->selected, k);
}

DeviceSelection select_above(Device& device, const dr_codec& codec, const Encoding& encoding,
                             float threshold) {
  accumulate(device, codec, encoding, Candidates{});
  return write(device, encoding, nullptr, Kth{magnitude_bits(threshold), 0}, Candidates{},
               device.zeros<uint32_t>(1), static_cast<uint32_t>(encoding.d));
}

}  // namespace cuda
}  // namespace deepreduce
