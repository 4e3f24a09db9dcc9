// The policies P1 and P2, which choose `count` of a Bloom filter's positives. Sender and receiver
// both run this code.
#include <algorithm>

#include "index/bloom_filter.h"
#include "index/bloom_size.h"

namespace deepreduce {
namespace {

constexpr uint32_t kBlock = 256;

// Calls visit(j, bits) for each of n indices, in order. bits[i * kBlock] is its bit under hash i.
template <class Visit>
void for_each_row(Simd simd, const BloomFilter& filter, const uint32_t* indices, uint32_t n,
                  Visit visit) {
  uint32_t bits[kLargestHashes][kBlock];
  for (uint32_t first = 0; first < n; first += kBlock) {
    const uint32_t block = std::min(n - first, kBlock);
    for (uint32_t i = 0; i < filter.hashes; ++i)
      filter_positions(simd, filter, i, indices + first, block, bits[i]);
    for (uint32_t j = 0; j < block; ++j) visit(first + j, bits[0] + j);
  }
}

// Calls visit(j, bit) for each of n indices and each of its hashes, in order.
template <class Visit>
void for_each_bit(Simd simd, const BloomFilter& filter, const uint32_t* indices, uint32_t n,
                  Visit visit) {
  for_each_row(simd, filter, indices, n, [&](uint32_t j, const uint32_t* bits) {
    for (uint32_t i = 0; i < filter.hashes; ++i) visit(j, bits[i * kBlock]);
  });
}

// The conflict sets of the positives that are not taken, in one array. Members are positions among
// the positives.
class ConflictSets {
 public:
  ConflictSets(Context& context, const BloomFilter& filter, const Positives& positives,
               const uint32_t* sizes, const uint8_t* taken, uint32_t undecided)
      : members_(context.arena.array<uint32_t>(uint64_t{undecided} * filter.hashes)) {
    Arena& arena = context.arena;
    uint32_t* indices = arena.array<uint32_t>(undecided);
    uint32_t* places = arena.array<uint32_t>(undecided);
    for (uint32_t j = 0, u = 0; u < undecided; ++j) {
      if (taken[j]) continue;
      indices[u] = positives.data()[j];
      places[u++] = j;
    }
    uint32_t* starts = arena.zeros<uint32_t>(uint64_t{filter.bits} + 2);
    for_each_bit(context.simd, filter, indices, undecided,
                 [&](uint32_t, uint32_t bit) { ++starts[uint64_t{bit} + 2]; });
    uint32_t largest = 0;
    for (uint64_t bit = 0; bit < filter.bits; ++bit) {
      if (starts[bit + 2] != 0) largest = std::max(largest, sizes[bit]);
      count_ += starts[bit + 2] != 0;
      starts[bit + 2] += starts[bit + 1];
    }
    for_each_bit(context.simd, filter, indices, undecided, [&](uint32_t u, uint32_t bit) {
      members_[starts[uint64_t{bit} + 1]++] = places[u];
    });
    // The members of a bit's set are now at starts[bit] to starts[bit + 1]. Next, sort the sets by
    // (size, bit), ascending.
    uint32_t* first_of_size = arena.zeros<uint32_t>(uint64_t{largest} + 2);
    for (uint64_t bit = 0; bit < filter.bits; ++bit)
      if (starts[bit] != starts[bit + 1]) ++first_of_size[uint64_t{sizes[bit]} + 1];
    for (uint64_t size = 1; size <= largest; ++size) first_of_size[size + 1] += first_of_size[size];
    sets_ = arena.array<Set>(count_);
    for (uint64_t bit = 0; bit < filter.bits; ++bit)
      if (starts[bit] != starts[bit + 1])
        sets_[first_of_size[sizes[bit]]++] = {starts[bit], starts[bit + 1] - starts[bit]};
  }

  // Takes `wanted` more positives. A draw removes its member from the set, so all passes together
  // take linear time.
  void draw(uint64_t key, uint32_t wanted, uint8_t* taken) {
    uint32_t draws = 0;
    for (bool first_pass = true; wanted != 0; first_pass = false) {
      uint32_t kept = 0;
      for (uint32_t s = 0; s < count_ && wanted != 0; ++s) {
        Set set = sets_[s];
        uint32_t* members = members_ + set.start;
        if (first_pass)
          set.left = static_cast<uint32_t>(
              std::remove_if(members, members + set.left, [&](uint32_t j) { return taken[j]; }) -
              members);
        while (set.left != 0) {
          uint32_t& place = members[random_below(key, draws++, set.left)];
          const uint32_t drawn = place;
          place = members[--set.left];
          if (taken[drawn]) continue;
          taken[drawn] = 1;
          --wanted;
          break;
        }
        if (set.left != 0) sets_[kept++] = set;
      }
      count_ = kept;
    }
  }

 private:
  struct Set {
    uint32_t start, left;
  };
  uint32_t* members_;
  Set* sets_;
  uint32_t count_ = 0;
};

}  // namespace

const uint32_t* choose_random(Arena& arena, const Positives& positives, uint32_t k, uint64_t key) {
  const uint64_t n = positives.size();
  uint64_t* drawn = arena.array<uint64_t>(n);
  for (uint64_t j = 0; j < n; ++j)
    drawn[j] = uint64_t{random32(key, static_cast<uint32_t>(j))} << 32 | j;
  std::nth_element(drawn, drawn + k, drawn + n);
  uint32_t* chosen = arena.array<uint32_t>(k);
  for (uint32_t i = 0; i < k; ++i) chosen[i] = positives.data()[static_cast<uint32_t>(drawn[i])];
  std::sort(chosen, chosen + k);
  return chosen;
}

const uint32_t* choose_by_conflict_sets(Context& context, const BloomFilter& filter,
                                        const Positives& positives, uint32_t k, uint64_t key,
                                        const char* section) {
  Arena& arena = context.arena;
  const uint32_t n = static_cast<uint32_t>(positives.size());
  uint32_t* sizes = arena.zeros<uint32_t>(filter.bits);
  for_each_bit(context.simd, filter, positives.data(), n,
               [&](uint32_t, uint32_t bit) { ++sizes[bit]; });
  // Sets of one come first and give nearly all positives; only the rest is sorted into sets.
  uint8_t* taken = arena.array<uint8_t>(n);
  uint32_t alone = 0;
  for_each_row(context.simd, filter, positives.data(), n, [&](uint32_t j, const uint32_t* bits) {
    uint32_t i = 0;
    while (i < filter.hashes && sizes[bits[i * kBlock]] != 1) ++i;
    taken[j] = i < filter.hashes;
    alone += taken[j];
  });
  if (alone > k)
    corrupt_payload("%s: expected at most %u positives that are alone in a conflict set, got %u",
                    section, k, alone);
  if (alone < k)
    ConflictSets(context, filter, positives, sizes, taken, n - alone).draw(key, k - alone, taken);
  uint32_t* result = arena.array<uint32_t>(k);
  for (uint32_t j = 0, i = 0; j < n; ++j)
    if (taken[j]) result[i++] = positives.data()[j];
  return result;
}

}  // namespace deepreduce
