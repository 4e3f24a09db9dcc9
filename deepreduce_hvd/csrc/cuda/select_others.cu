// RandomK and ChunkTopK.
#include "cuda/algorithms.cuh"
#include "cuda/select.cuh"
#include "select/random.h"
#include "support/bits.h"

namespace deepreduce {
namespace cuda {
namespace {

__device__ void permute(RandomPermutation permutation, uint32_t k, uint32_t* indices) {
  for (uint32_t i = grid_index(); i < k; i += grid_stride()) indices[i] = permutation(i);
}

__device__ void count_all(uint32_t k, uint32_t* count, const dr_cuda_result* result) {
  *count = result->non_finite != 0 ? 0 : k;
}

// Returns the rank of an element in its chunk: larger magnitudes are better, and with equal
// magnitudes smaller indices. 0 for a zero.
__device__ uint64_t rank_of(float value, uint32_t index) {
  const uint32_t bits = magnitude_bits(value);
  return bits == 0 ? 0 : static_cast<uint64_t>(bits) << 32 | ~index;
}

// Each warp processes consecutive elements. It writes the best element of a chunk when it leaves
// the chunk.
__device__ void find_best(Accumulated sum, uint32_t d, uint32_t chunk, uint64_t* best,
                          const dr_cuda_result* result) {
  constexpr uint32_t kStretch = 32 * 16;
  if (result->non_finite != 0) return;
  const uint32_t lane = threadIdx.x % 32, stretches = (d + kStretch - 1) / kStretch;
  for (uint32_t stretch = grid_index() / 32; stretch < stretches; stretch += grid_stride() / 32) {
    uint64_t mine = 0;
    uint32_t my_chunk = stretch * kStretch / chunk;  // the same in all lanes
    const uint32_t end = d - stretch * kStretch < kStretch ? d : (stretch + 1) * kStretch;
    for (uint32_t i = stretch * kStretch; i < end; i += 32) {
      const uint32_t at = i + lane;
      const uint64_t rank = at < d ? rank_of(sum.at(at), at) : 0;
      const uint32_t first = i / chunk, last = ((i + 31 < d ? i + 31 : d - 1)) / chunk;
      // write the common result, then each lane continues with its own chunk
      if (first != my_chunk || last != my_chunk) {
        for (int lanes = 16; lanes > 0; lanes /= 2) {
          const uint64_t other = __shfl_xor_sync(0xFFFFFFFFu, mine, lanes);
          mine = other > mine ? other : mine;
        }
        if (lane == 0 && mine != 0) atomic_max(best + my_chunk, mine);
        if (rank != 0) atomic_max(best + at / chunk, rank);
        mine = 0;
        my_chunk = last;
      } else {
        mine = rank > mine ? rank : mine;
      }
    }
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      const uint64_t other = __shfl_xor_sync(0xFFFFFFFFu, mine, lanes);
      mine = other > mine ? other : mine;
    }
    if (lane == 0 && mine != 0) atomic_max(best + my_chunk, mine);
  }
}

__device__ void count_chunks(const uint64_t* best, uint32_t chunks, uint32_t* before) {
  for (uint32_t c = grid_index(); c < chunks; c += grid_stride()) before[c] = best[c] != 0;
}

__device__ void write_chunks(Accumulated sum, const uint64_t* best, uint32_t chunks,
                             const uint32_t* before, uint32_t* count, uint32_t* indices,
                             float* values, const dr_cuda_result* result) {
  if (result->non_finite != 0) return;
  for (uint32_t c = grid_index(); c < chunks; c += grid_stride()) {
    if (best[c] != 0) {
      const uint32_t index = ~static_cast<uint32_t>(best[c]);
      indices[before[c]] = index;
      values[before[c]] = sum.at(index);
    }
    if (c + 1 == chunks) *count = before[c] + (best[c] != 0);
  }
}

}  // namespace

DeviceSelection select_random(Device& device, const dr_codec& codec, const Encoding& encoding,
                              uint32_t k) {
  const uint32_t d = static_cast<uint32_t>(encoding.d);
  const dr_position& at = encoding.position;
  // the key has rank 0 on all ranks, so that they choose the same indices
  const RandomPermutation permutation(
      random_key(at.seed, at.step, at.tensor, 0, Purpose::selection), d);
  accumulate(device, codec, encoding, Candidates{});
  uint32_t* count = device.array<uint32_t>(1);
  uint32_t* indices = device.array<uint32_t>(k);
  float* values = device.array<float>(k);
  const uint64_t mark = device.mark();
  uint32_t* chosen = device.array<uint32_t>(k);
  launch_elementwise<permute>(device, blocks_for(k), permutation, k, chosen);
  sort(device, chosen, indices, k, 0, std::max(1, static_cast<int>(bit_width_of(d))));
  device.release(mark);
  launch<count_all>(device, 1, 1, 0, k, count, device.result());
  gather(device, accumulated(encoding), indices, count, k, values);
  return {k, count, indices, values};
}

DeviceSelection select_largest_of_chunks(Device& device, const dr_codec& codec,
                                         const Encoding& encoding, uint32_t chunk) {
  const uint32_t d = static_cast<uint32_t>(encoding.d);
  const uint32_t chunks = static_cast<uint32_t>((encoding.d + chunk - 1) / chunk);
  const Accumulated sum = accumulated(encoding);
  accumulate(device, codec, encoding, Candidates{});
  uint32_t* count = device.zeros<uint32_t>(1);
  uint32_t* indices = device.array<uint32_t>(chunks);
  float* values = device.array<float>(chunks);
  uint64_t* best = device.zeros<uint64_t>(chunks);
  uint32_t* before = device.array<uint32_t>(chunks);
  launch<find_best>(device, blocks_for(d, 16), kThreads, 0, sum, d, chunk, best, device.result());
  launch_elementwise<count_chunks>(device, blocks_for(chunks), best, chunks, before);
  exclusive_sum(device, before, before, chunks);
  launch_elementwise<write_chunks>(device, blocks_for(chunks), sum, best, chunks, before, count,
                                   indices, values, device.result());
  return {chunks, count, indices, values};
}

}  // namespace cuda
}  // namespace deepreduce
