// A Bloom filter over indices: MurmurHash3, insertion and the scan of the whole universe.
#ifndef DEEPREDUCE_BLOOM_FILTER_H
#define DEEPREDUCE_BLOOM_FILTER_H

#include "base.h"
#include "random.h"

namespace deepreduce {

constexpr uint32_t kLargestHashes = 32;

DR_HOST_DEVICE inline uint32_t rotate_left(uint32_t x, unsigned bits) { return (x << bits) | (x >> (32 - bits)); }

// The part of MurmurHash3_x86_32 of a 4-byte key that does not depend on the seed.
DR_HOST_DEVICE inline uint32_t murmur_block(uint32_t index) { return rotate_left(index * 0xCC9E2D51u, 15) * 0x1B873593u; }

DR_HOST_DEVICE inline uint32_t murmur_seed(uint32_t hash_number) { return hash_number * 0x9E3779B9u; }

DR_HOST_DEVICE inline uint32_t murmur_finish(uint32_t block, uint32_t seed) {
  uint32_t x = rotate_left(seed ^ block, 13) * 5 + 0xE6546B64u;
  x ^= 4;  // the key's length
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

  uint32_t position(uint32_t block, uint32_t hash_number) const {
    return static_cast<uint32_t>((uint64_t{murmur_finish(block, murmur_seed(hash_number))} * bits) >> 32);
  }
  void insert(uint32_t index) {
    const uint32_t block = murmur_block(index);
    for (uint32_t i = 0; i < hashes; ++i) {
      const uint32_t bit = position(block, i);
      words[bit >> 5] |= 1u << (bit & 31);
    }
  }
};

// Ascending indices of [0, d) that the filter holds, at most `limit` of them.
class Positives {
 public:
  Positives(Arena& arena, uint64_t expected);
  void append(const uint32_t* indices, uint32_t n);
  const uint32_t* data() const { return data_; }
  uint64_t size() const { return size_; }
  void shrink_to(uint64_t size) { size_ = size; }

 private:
  Arena& arena_;
  uint32_t* data_;
  uint64_t size_ = 0, capacity_;
};

// Scans [0, d); stops early once more than `limit` are found.
void scan_universe(Simd simd, const BloomFilter& filter, uint32_t d, uint64_t limit, Positives& positives);

}  // namespace deepreduce
#endif
