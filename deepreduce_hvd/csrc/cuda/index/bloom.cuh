// The parts of Bloom on the device: bloom.cu makes and reads sections, bloom_filter.cu inserts and
// scans, bloom_random.cu is P1 and bloom_conflict_sets.cu P2.
#ifndef DEEPREDUCE_CUDA_BLOOM_CUH
#define DEEPREDUCE_CUDA_BLOOM_CUH

#include "cuda/algorithms.cuh"
#include "cuda/codecs.cuh"
#include "index/bloom_filter.h"
#include "index/bloom_size.h"

namespace deepreduce {
namespace cuda {

// What is known of the filter, in device memory. Only kernels of one thread, or one thread of one
// block, write it; so that all threads of the others see the same. Not active: there are no
// indices, or something was refused; nothing more is done.
struct BloomPlan {
  uint32_t active;
  uint32_t policy, hashes, bits;
  uint32_t count;      // of indices
  uint32_t found;      // positives
  uint32_t listed;     // of them, when all is chosen
  uint32_t wanted;     // of them that a random policy has still to choose
  uint32_t threshold;  // P1: random numbers up to this are chosen
  uint32_t members;    // P2: of conflict sets
  uint64_t key;        // of the random policies
};

// A subset of [0, d) as bits, in tiles of 32 words: one warp's.
struct IndexSet {
  uint32_t words, tiles;
  uint32_t* bits;  // (32 * tiles,)
  // (tiles + 1,) how many there are in each tile; after sum_tiles how many before it, and in all
  uint32_t* before;
};

IndexSet index_set(Device& device, uint32_t d);
void sum_tiles(Device& device, const IndexSet& set);

// filter: ((m + 31) / 32,) words, 0 before.
void insert_indices(Device& device, const BloomPlan* plan, const uint32_t* indices,
                    uint32_t capacity, uint32_t* filter);
// All of [0, d) that the filter holds, with sum_tiles done.
void scan_universe(Device& device, const BloomPlan* plan, const uint32_t* filter, uint32_t d,
                   const IndexSet& positives);
// The first plan->listed of the set to indices, ascending.
void list_indices(Device& device, const BloomPlan* plan, const IndexSet& set, uint32_t* indices);

// P1: leaves plan->count of the positives. Needs at least so many.
void keep_random(Device& device, BloomPlan* plan, const IndexSet& positives);

// P2: leaves plan->count of the positives. Needs at least so many. most_bits, most_members: host,
// of the filter and of conflict sets; more members are refused as `too_many`.
void keep_by_conflict_sets(Device& device, BloomPlan* plan, uint32_t d, uint64_t most_bits,
                           uint64_t most_members, Refused too_many, const IndexSet& positives);

// Calls visit(tile, word number, word, how many of the set are before the word) for each word;
// whole warps together.
template <class Visit>
__device__ void for_each_word(const IndexSet& set, Visit visit) {
  for (uint32_t tile = grid_index() / 32; tile < set.tiles; tile += grid_stride() / 32) {
    const uint32_t at = 32 * tile + threadIdx.x % 32, word = set.bits[at],
                   ones = static_cast<uint32_t>(__popc(word));
    visit(tile, at, word, set.before[tile] + warp_inclusive_sum(ones) - ones);
  }
}

// Calls visit(index) for each bit of word number `at`, ascending.
template <class Visit>
__device__ void for_each_index(uint32_t at, uint32_t word, Visit visit) {
  for (; word != 0; word &= word - 1)
    visit(32 * at + static_cast<uint32_t>(__ffs(static_cast<int>(word)) - 1));
}

// Replaces a word of the set and its tile's count; whole warps together, after the tile's `before`
// was read.
__device__ inline void replace_word(const IndexSet& set, uint32_t tile, uint32_t at,
                                    uint32_t word) {
  const uint32_t ones = warp_sum(static_cast<uint32_t>(__popc(word)));
  __syncwarp();  // shuffles do not order memory: all lanes have read `before`
  set.bits[at] = word;
  if (threadIdx.x % 32 == 0) set.before[tile] = ones;
}

__device__ inline BloomFilter filter_of(const BloomPlan& plan) {
  return {plan.bits, plan.hashes, nullptr};
}

}  // namespace cuda
}  // namespace deepreduce
#endif
