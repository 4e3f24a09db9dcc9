// Bloom: a Bloom filter of the indices, and the policies that choose among its positives.
#include <algorithm>

#include "codecs.h"
#include "index/bloom_filter.h"
#include "index/bloom_size.h"
#include "support/bits.h"

namespace deepreduce {
namespace {

// Finds as many positives as the policy needs; raises an error if there are too few or too many.
void find_positives(Simd simd, const BloomFilter& filter, uint8_t policy, uint32_t d,
                    uint32_t count, bool decoding, const char* section, Positives& positives) {
  const uint64_t most = random_policy(policy)       ? most_positives(filter.hashes, d, count)
                        : policy == kP0 && decoding ? count
                                                    : d;
  const bool first_only = policy == kNaive || policy == kLeftmost;
  scan_universe(simd, filter, d, first_only ? count : most + 1, positives);
  const unsigned long long found = positives.size();
  if (!enough_positives(policy, decoding, found, count))
    corrupt_payload("%s: expected a Bloom filter with %u positives, got %llu", section, count,
                    found);
  if (random_policy(policy) && found > most) {
    const unsigned long long allowed = most;
    if (!decoding)
      invalid_argument(
          "Bloom filter: expected at most %llu positives, got %llu; use policy p0 or split the tensor",
          allowed, found);
    corrupt_payload(
        "%s: expected a Bloom filter for %u of %u indices with at most %llu positives, got %llu or more",
        section, count, d, allowed, found);
  }
}

// Returns the positives that the policy keeps. `count` is the count in the payload's header, or no
// limit for P0 in the encoder.
const uint32_t* apply_policy(Context& context, const BloomFilter& filter, uint8_t policy,
                             uint32_t seed, uint32_t d, uint32_t count, bool decoding,
                             const char* section, uint32_t* decoded_count) {
  Arena& arena = context.arena;
  Positives positives(arena, std::min<uint64_t>(d, uint64_t{count} + count / 8 + 4096));
  find_positives(context.simd, filter, policy, d, count, decoding, section, positives);
  *decoded_count = policy == kP0 ? static_cast<uint32_t>(positives.size()) : count;
  if (!random_policy(policy)) return positives.data();
  const uint64_t key = mix64(seed);
  return policy == kP1 ? choose_random(arena, positives, count, key)
                       : choose_by_conflict_sets(context, filter, positives, count, key, section);
}

void encode(Context& context, IndexEncoding& encoding, ByteWriter& section) {
  const auto [wanted_rate, policy] = bloom_settings(encoding.parameters);
  if (encoding.count == 0) return;
  const double rate =
      bloom_rate(wanted_rate, policy, encoding.d, encoding.count, encoding.value_bits);
  const BloomSize size = bloom_size(rate, encoding.count);
  if (size.bits > 4294967295.0)
    invalid_argument(
        "Bloom filter: expected at most 4294967295 bits, got %.0f; use a larger fpr or split the tensor",
        size.bits);
  BloomFilter filter;
  filter.bits = static_cast<uint32_t>(size.bits);
  filter.hashes = size.hashes;
  filter.words = context.arena.zeros<uint32_t>((uint64_t{filter.bits} + 31) / 32);
  filter_insert(context.simd, filter, encoding.indices, encoding.count);

  const uint32_t seed = random_policy(policy) ? static_cast<uint32_t>(encoding.key) : 0;
  section.put(policy);
  section.put(static_cast<uint8_t>(filter.hashes));
  section.put(filter.bits);
  if (random_policy(policy)) section.put(seed);
  section.put_bytes(filter.words, (uint64_t{filter.bits} + 7) / 8);

  encoding.decoded = apply_policy(context, filter, policy, seed, encoding.d, encoding.count, false,
                                  "Bloom filter", &encoding.decoded_count);
  encoding.values_stay = policy == kNaive;
}

void decode(Context& context, ByteReader& section, uint32_t d, uint32_t count, uint32_t* indices) {
  if (count == 0) return section.expect_end();
  const uint8_t policy = section.get<uint8_t>();
  BloomFilter filter;
  filter.hashes = section.get<uint8_t>();
  filter.bits = section.get<uint32_t>();
  if (invalid_bloom_field(policy, filter.hashes, filter.bits) != BloomField::none)
    corrupt_payload(
        "%s: expected a Bloom policy of 0 to 4, 1 to %u hashes and at least 1 bit, got %u, %u and %u",
        section.section(), kLargestHashes, policy, filter.hashes, filter.bits);
  const uint32_t seed = random_policy(policy) ? section.get<uint32_t>() : 0;
  const uint64_t bytes = (uint64_t{filter.bits} + 7) / 8;
  const uint8_t* data = section.take(bytes);
  section.expect_end();
  expect_zero_padding(data, filter.bits, section.section());
  filter.words = context.arena.zeros<uint32_t>((uint64_t{filter.bits} + 31) / 32);
  std::memcpy(filter.words, data, bytes);
  uint32_t decoded_count;
  const uint32_t* decoded = apply_policy(context, filter, policy, seed, d, count, true,
                                         section.section(), &decoded_count);
  std::memcpy(indices, decoded, uint64_t{4} * count);
}

}  // namespace

extern const IndexCodec bloom_codec;
const IndexCodec bloom_codec = {kBloom, "Bloom", false, encode, decode};

}  // namespace deepreduce
