// Bloom: insertion, the scan of the universe, and lists of the positives.
#include "cuda/index/bloom.cuh"

namespace deepreduce {
namespace cuda {
namespace {

__device__ void insert(const BloomPlan* plan, const uint32_t* indices, uint32_t* filter) {
  if (plan->active == 0) return;
  const BloomFilter shape = filter_of(*plan);
  for (uint32_t i = grid_index(); i < plan->count; i += grid_stride()) {
    const uint32_t block = murmur_block(indices[i]);
    for (uint32_t hash_number = 0; hash_number < shape.hashes; ++hash_number) {
      const uint32_t bit = shape.position(block, hash_number);
      atomicOr(filter + bit / 32, 1u << (bit % 32));
    }
  }
}

// A thread determines the 32 indices of a word. Each turn of its loop tests one hash of one index.
// It continues with the next hash if the bit is set, otherwise with the next index. This takes
// about two tests per index, and the lanes of a warp stay together however many tests their indices
// need.
__device__ void scan(const BloomPlan* plan, const uint32_t* filter, uint32_t d,
                     IndexSet positives) {
  if (plan->active == 0) return;
  const uint32_t bits = plan->bits, hashes = plan->hashes;
  for (uint32_t tile = grid_index() / 32; tile < positives.tiles; tile += grid_stride() / 32) {
    const uint32_t at = 32 * tile + threadIdx.x % 32, first = 32 * at;
    const uint32_t n = at >= positives.words ? 0 : d - first < 32 ? d - first : 32;
    uint32_t word = 0;
    for (uint32_t i = 0, hash_number = 0; i < n;) {
      const uint32_t bit =
          BloomFilter{bits, hashes, nullptr}.position(murmur_block(first + i), hash_number);
      const bool held = (__ldg(filter + bit / 32) >> (bit % 32) & 1u) != 0;
      ++hash_number;
      if (held && hash_number < hashes) continue;
      word |= static_cast<uint32_t>(held) << i;
      ++i;
      hash_number = 0;
    }
    replace_word(positives, tile, at, word);
  }
}

__device__ void list(const BloomPlan* plan, IndexSet set, uint32_t* indices) {
  if (plan->active == 0) return;
  const uint32_t listed = plan->listed;
  for_each_word(set, [&](uint32_t, uint32_t at, uint32_t word, uint32_t rank) {
    for_each_index(at, word, [&](uint32_t index) {
      if (rank < listed) indices[rank] = index;
      ++rank;
    });
  });
}

}  // namespace

IndexSet index_set(Device& device, uint32_t d) {
  IndexSet set;
  set.words = static_cast<uint32_t>((uint64_t{d} + 31) / 32);
  set.tiles = (set.words + 31) / 32;
  set.bits = device.array<uint32_t>(uint64_t{32} * set.tiles);
  set.before = device.array<uint32_t>(uint64_t{set.tiles} + 1);
  return set;
}

void sum_tiles(Device& device, const IndexSet& set) {
  exclusive_sum(device, set.before, set.before, uint64_t{set.tiles} + 1);
}

void insert_indices(Device& device, const BloomPlan* plan, const uint32_t* indices,
                    uint32_t capacity, uint32_t* filter) {
  launch_elementwise<insert>(device, blocks_for(capacity), plan, indices, filter);
}

void scan_universe(Device& device, const BloomPlan* plan, const uint32_t* filter, uint32_t d,
                   const IndexSet& positives) {
  launch<scan>(device, blocks_for(positives.words), kThreads, 0, plan, filter, d, positives);
  sum_tiles(device, positives);
}

void list_indices(Device& device, const BloomPlan* plan, const IndexSet& set, uint32_t* indices) {
  launch<list>(device, blocks_for(set.words), kThreads, 0, plan, set, indices);
}

}  // namespace cuda
}  // namespace deepreduce
