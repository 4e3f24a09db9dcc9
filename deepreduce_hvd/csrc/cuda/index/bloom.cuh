// The parts of Bloom on the device: bloom.cu reads and writes sections, bloom_filter.cu inserts and
// scans, bloom_random.cu implements P1 and bloom_conflict_sets.cu P2.
#ifndef DEEPREDUCE_CUDA_BLOOM_CUH
#define DEEPREDUCE_CUDA_BLOOM_CUH

#include "cuda/algorithms.cuh"
#include "cuda/codecs.cuh"
#include "index/bloom_filter.h"
#include "index/bloom_size.h"

namespace deepreduce {
namespace cuda {

// The state of the filter, in device memory. Only kernels with one thread, or one thread of a
// kernel with one block, write it, so that all threads of the other kernels see the same values. It
// is not active if there are no indices or a failure was recorded. Nothing more is then done.
struct BloomPlan {
  uint32_t active;
  uint32_t policy, hashes, bits;
  uint32_t count;      // number of indices
  uint32_t found;      // number of positives
  uint32_t listed;     // number of positives after the policy
  uint32_t wanted;     // number of positives that a random policy must still choose
  uint32_t threshold;  // P1: positives with random numbers up to this are chosen
  uint32_t members;    // P2: members of conflict sets
  uint64_t key;        // key of the random policies
};

// A subset of [0, d) as bits, in tiles of 32 words. A warp processes one tile.
struct IndexSet {
  uint32_t words, tiles;
  uint32_t* bits;  // (32 * tiles,)
  // (tiles + 1,) number of indices in each tile; after sum_tiles, the number before each tile, then
  // the total
  uint32_t* before;
};

IndexSet index_set(Device& device, uint32_t d);
void sum_tiles(Device& device, const IndexSet& set);

// filter: ((m + 31) / 32,) words, initialized to 0.
void insert_indices(Device& device, const BloomPlan* plan, const uint32_t* indices,
                    uint32_t capacity, uint32_t* filter);
// Finds all indices of [0, d) that are in the filter, and runs sum_tiles.
void scan_universe(Device& device, const BloomPlan* plan, const uint32_t* filter, uint32_t d,
                   const IndexSet& positives);
// Writes the first plan->listed indices of the set to `indices`, ascending.
void list_indices(Device& device, const BloomPlan* plan, const IndexSet& set, uint32_t* indices);

// P1: keeps plan->count of the positives. Needs at least that many.
void keep_random(Device& device, BloomPlan* plan, const IndexSet& positives);

// P2: keeps plan->count of the positives. Needs at least that many. most_bits, most_members: host,
// maximum sizes of the filter and of all conflict sets together. More members are refused as
// `too_many`.
void keep_by_conflict_sets(Device& device, BloomPlan* plan, uint32_t d, uint64_t most_bits,
                           uint64_t most_members, Refused too_many, const IndexSet& positives);

// Calls visit(tile, word number, word, number of indices before the word) for each word. Whole
// warps must call it.
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

// Replaces a word of the set, and the count of its tile. Whole warps must call it, after they have
// read the tile's `before`.
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
