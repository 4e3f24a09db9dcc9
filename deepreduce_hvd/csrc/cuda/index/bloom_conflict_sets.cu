// Bloom's policy P2: conflict sets. With the default rate of our encoder, sets with one member
// contain nearly all indices. All threads find them. The other sets are sorted, and one thread
// draws from them, because each draw depends on the number of draws before it.
#include "cuda/index/bloom.cuh"

namespace deepreduce {
namespace cuda {
namespace {

// sizes[bit]: the size of the set of this bit, over all positives.
__device__ void count_members(const BloomPlan* plan, IndexSet positives, uint32_t* sizes) {
  if (plan->active == 0) return;
  const BloomFilter shape = filter_of(*plan);
  for (uint32_t at = grid_index(); at < positives.words; at += grid_stride()) {
    for_each_index(at, positives.bits[at], [&](uint32_t index) {
      const uint32_t block = murmur_block(index);
      for (uint32_t i = 0; i < shape.hashes; ++i) atomicAdd(sizes + shape.position(block, i), 1u);
    });
  }
}

// taken: positives that are alone in a set. undecided: the others.
__device__ void take_alone(const BloomPlan* plan, IndexSet positives, const uint32_t* sizes,
                           IndexSet taken, IndexSet undecided) {
  if (plan->active == 0) return;
  const BloomFilter shape = filter_of(*plan);
  for_each_word(positives, [&](uint32_t tile, uint32_t at, uint32_t word, uint32_t) {
    uint32_t alone = 0;
    for_each_index(at, word, [&](uint32_t index) {
      const uint32_t block = murmur_block(index);
      uint32_t i = 0;
      while (i < shape.hashes && sizes[shape.position(block, i)] != 1) ++i;
      if (i < shape.hashes) alone |= 1u << (index % 32);
    });
    taken.bits[at] = alone;
    replace_word(undecided, tile, at, word & ~alone);
  });
}

// Runs in one thread.
__device__ void plan_draws(BloomPlan* plan, IndexSet undecided, uint64_t most_members,
                           Refused too_many, dr_cuda_result* result) {
  if (plan->active == 0) return;
  const uint32_t left = undecided.before[undecided.tiles], alone = plan->found - left;
  if (alone > plan->count) {
    refuse(result, Refused::bloom_alone, plan->count, alone);
    plan->active = 0;
    return;
  }
  plan->wanted = plan->count - alone;
  const uint64_t members = plan->wanted == 0 ? 0 : uint64_t{left} * plan->hashes;
  if (members > most_members) {
    refuse(result, too_many, most_members, members);
    plan->active = 0;
    return;
  }
  plan->members = static_cast<uint32_t>(members);
}

// Lists the members in the order of (index, hash), each with the (size, bit) of its set.
__device__ void list_members(const BloomPlan* plan, IndexSet undecided, const uint32_t* sizes,
                             uint64_t* sets, uint32_t* members) {
  if (plan->active == 0 || plan->wanted == 0) return;
  const BloomFilter shape = filter_of(*plan);
  for_each_word(undecided, [&](uint32_t, uint32_t at, uint32_t word, uint32_t rank) {
    for_each_index(at, word, [&](uint32_t index) {
      const uint32_t block = murmur_block(index);
      for (uint32_t i = 0; i < shape.hashes; ++i) {
        const uint32_t bit = shape.position(block, i);
        sets[uint64_t{rank} * shape.hashes + i] = uint64_t{sizes[bit]} << 32 | bit;
        members[uint64_t{rank} * shape.hashes + i] = index;
      }
      ++rank;
    });
  });
}

// Fills the places beyond the members with the largest key, so that they come last in the sort.
__device__ void fill_sets(const BloomPlan* plan, uint64_t* sets, uint64_t capacity) {
  if (plan->active == 0) return;
  for (uint64_t i = plan->members + uint64_t{grid_index()}; i < capacity; i += grid_stride())
    sets[i] = ~uint64_t{0};
}

__device__ bool is_taken(const IndexSet& taken, uint32_t index) {
  return (taken.bits[index / 32] >> (index % 32) & 1u) != 0;
}

struct Draws {
  IndexSet taken;
  uint64_t key;
  uint32_t wanted, made;

  // Draws until a member of the set is chosen. Returns the number of remaining members. A drawn
  // member leaves the set, and the last one takes its place.
  __device__ uint32_t visit(uint32_t* members, uint32_t left) {
    while (left != 0) {
      uint32_t& place = members[random_below(key, made++, left)];
      const uint32_t drawn = place;
      place = members[--left];
      if (is_taken(taken, drawn)) continue;
      taken.bits[drawn / 32] |= 1u << (drawn % 32);
      --wanted;
      break;
    }
    return left;
  }
};

// Runs in one thread. Each draw removes a member and each visit draws, so the loop makes at most
// two turns per member (plan->members). kept: memory for a (start, left) per set.
__device__ void draw(const BloomPlan* plan, const uint64_t* sets, uint32_t* members, uint2* kept,
                     IndexSet taken) {
  if (plan->active == 0) return;
  const uint32_t end = plan->members;
  Draws draws{taken, plan->key, plan->wanted, 0};
  uint32_t kept_count = 0;
  for (uint32_t start = 0, next = 0; start < end && draws.wanted != 0; start = next) {
    uint32_t left = 0;
    for (; next < end && sets[next] == sets[start]; ++next)
      if (!is_taken(taken, members[next])) members[start + left++] = members[next];
    left = draws.visit(members + start, left);
    if (left != 0) kept[kept_count++] = make_uint2(start, left);
  }
  while (draws.wanted != 0 && kept_count != 0) {
    const uint32_t visits = kept_count;
    kept_count = 0;
    for (uint32_t s = 0; s < visits && draws.wanted != 0; ++s) {
      const uint2 set = kept[s];
      const uint32_t left = draws.visit(members + set.x, set.y);
      if (left != 0) kept[kept_count++] = make_uint2(set.x, left);
    }
  }
}

__device__ void replace(const BloomPlan* plan, IndexSet positives, IndexSet taken) {
  if (plan->active == 0) return;
  for_each_word(positives, [&](uint32_t tile, uint32_t at, uint32_t, uint32_t) {
    replace_word(positives, tile, at, taken.bits[at]);
  });
}

}  // namespace

void keep_by_conflict_sets(Device& device, BloomPlan* plan, uint32_t d, uint64_t most_bits,
                           uint64_t most_members, Refused too_many, const IndexSet& positives) {
  const uint64_t mark = device.mark();
  const uint32_t blocks = blocks_for(positives.words);
  const IndexSet taken = index_set(device, d), undecided = index_set(device, d);
  uint32_t* sizes = device.zeros<uint32_t>(most_bits);
  launch_elementwise<count_members>(device, blocks, plan, positives, sizes);
  launch<take_alone>(device, blocks, kThreads, 0, plan, positives, sizes, taken, undecided);
  sum_tiles(device, undecided);
  launch<plan_draws>(device, 1, 1, 0, plan, undecided, most_members, too_many, device.result());

  uint64_t* unsorted_sets = device.array<uint64_t>(most_members);
  uint64_t* sets = device.array<uint64_t>(most_members);
  uint32_t* unsorted_members = device.array<uint32_t>(most_members);
  uint32_t* members = device.array<uint32_t>(most_members);
  launch<list_members>(device, blocks, kThreads, 0, plan, undecided, sizes, unsorted_sets,
                       unsorted_members);
  launch_elementwise<fill_sets>(device, blocks_for(most_members), plan, unsorted_sets,
                                most_members);
  sort_pairs(device, unsorted_sets, sets, unsorted_members, members, most_members);
  launch<draw>(device, 1, 1, 0, plan, sets, members, reinterpret_cast<uint2*>(unsorted_sets),
               taken);

  launch<replace>(device, blocks, kThreads, 0, plan, positives, taken);
  sum_tiles(device, positives);
  device.release(mark);
}

}  // namespace cuda
}  // namespace deepreduce
