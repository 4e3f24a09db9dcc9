// A Bloom filter of indices: MurmurHash3, insertion and the scan of all indices.
#ifndef DEEPREDUCE_BLOOM_FILTER_H
#define DEEPREDUCE_BLOOM_FILTER_H

#include "base.h"
#include "support/random.h"

namespace deepreduce {

DR_HOST_DEVICE inline uint32_t rotate_left(uint32_t x, unsigned bits) {
  return (x << bits) | (x >> (32 - bits));
}

// The part of MurmurHash3_x86_32 of a 4-byte key that does not depend on the seed.
DR_HOST_DEVICE inline uint32_t murmur_block(uint32_t index) {
  return rotate_left(index * 0xCC9E2D51u, 15) * 0x1B873593u;
}

DR_HOST_DEVICE inline uint32_t murmur_seed(uint32_t hash_number) {
  return hash_number * 0x9E3779B9u;
}

DR_HOST_DEVICE inline uint32_t murmur_finish(uint32_t block, uint32_t seed) {
  uint32_t x = rotate_left(seed ^ block, 13) * 5 + 0xE6546B64u;
  x ^= 4;  // length of the key
  x ^= x >> 16;
  x *= 0x85EBCA6Bu;
  x ^= x >> 13;
  x *= 0xC2B2AE35u;
  return x ^ (x >> 16);
}

struct BloomFilter {
  uint32_t bits;    // m
  uint32_t hashes;  // h
  uint32_t* words;  // ceil(m / 32) words, bit b in word b / 32

  DR_HOST_DEVICE uint32_t position(uint32_t block, uint32_t hash_number) const {
    return static_cast<uint32_t>(
        (uint64_t{murmur_finish(block, murmur_seed(hash_number))} * bits) >> 32);
  }
};

// bits[j] = the bit of indices[j] under one hash, for n indices.
void filter_positions(Simd simd, const BloomFilter& filter, uint32_t hash_number,
                      const uint32_t* indices, uint32_t n, uint32_t* bits);

void filter_insert(Simd simd, BloomFilter& filter, const uint32_t* indices, uint32_t n);

// The ascending indices of [0, d) for which the filter is positive.
class Positives {
 public:
  Positives(Arena& arena, uint64_t expected);
  void append(const uint32_t* indices, uint32_t n);
  const uint32_t* data() const { return data_; }
  uint64_t size() const { return size_; }

 private:
  Arena& arena_;
  uint32_t* data_;
  uint64_t size_ = 0, capacity_;
};

// Scans [0, d); stops early when at least `enough` are found.
void scan_universe(Simd simd, const BloomFilter& filter, uint32_t d, uint64_t enough,
                   Positives& positives);

// P1: the k positives with the smallest random numbers, ascending. Needs at least k positives.
const uint32_t* choose_random(Arena& arena, const Positives& positives, uint32_t k, uint64_t key);

// P2: k positives by DeepReduce's conflict sets, ascending. A smaller set is more likely to contain
// a true positive; the member of a set of one always is. Needs at least k positives; positives
// times hashes must be below 2^32.
const uint32_t* choose_by_conflict_sets(Context& context, const BloomFilter& filter,
                                        const Positives& positives, uint32_t k, uint64_t key,
                                        const char* section);

}  // namespace deepreduce
#endif
