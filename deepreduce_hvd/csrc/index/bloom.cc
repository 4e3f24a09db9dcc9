// Bloom: a Bloom filter of the indices, and the policies that choose among its positives.
#include <algorithm>
#include <cmath>

#include "codecs.h"
#include "exact_log.h"
#include "index/bloom_filter.h"

namespace deepreduce {
namespace {

enum Policy : uint8_t { kNaive = 0, kP0 = 1, kP1 = 2, kLeftmost = 3, kP2 = 4 };
constexpr double kSmallestRate = 2.3283064365386963e-10;  // 2^-32
constexpr double kLargestRate = 0.999;

bool random_policy(uint8_t policy) { return policy == kP1 || policy == kP2; }

double false_positive_rate(const IndexEncoding& encoding, uint8_t policy) {
  const double wanted = encoding.parameters[0];  // a rate, 0: DeepReduce's default, -1: "auto"
  const double k = encoding.count, d = encoding.d;
  double rate = wanted;
  if (wanted == 0 || (wanted < 0 && policy != kP0)) rate = 0.1 * k / d;
  // more filter bits against more values: the paper's cost has its minimum here
  if (wanted < 0 && policy == kP0) rate = k / (encoding.value_bits * (kLn2 * kLn2) * (d - k));
  return std::min(std::max(rate, kSmallestRate), kLargestRate);
}

// What an honest filter's positives and hashes stay below by far; more would make decoding cost memory that nothing earned.
void check_entries(uint64_t positives, uint32_t hashes, uint32_t d, uint32_t count, const char* section) {
  if (positives * hashes > 2 * uint64_t{d} + 2 * uint64_t{count} * hashes + 4096)
    corrupt_payload("%s: expected a Bloom filter for %u of %u indices, got one with %llu positives of %u hashes", section, count, d,
                    static_cast<unsigned long long>(positives), hashes);
}

// k of the positives, those with the smallest random numbers; ascending.
const uint32_t* choose_random(Arena& arena, const Positives& positives, uint32_t k, uint64_t key) {
  const uint64_t n = positives.size();
  uint64_t* drawn = arena.array<uint64_t>(n);
  for (uint64_t j = 0; j < n; ++j) drawn[j] = uint64_t{random32(key, static_cast<uint32_t>(j))} << 32 | j;
  std::nth_element(drawn, drawn + k, drawn + n);
  uint32_t* chosen = arena.array<uint32_t>(k);
  for (uint32_t i = 0; i < k; ++i) chosen[i] = positives.data()[static_cast<uint32_t>(drawn[i])];
  std::sort(chosen, chosen + k);
  return chosen;
}

// DeepReduce's conflict sets: smaller sets are likelier to hold a true positive, a set of one holds nothing else.
const uint32_t* choose_by_conflict_sets(Arena& arena, const BloomFilter& filter, const Positives& positives, uint32_t k, uint64_t key) {
  const uint32_t n = static_cast<uint32_t>(positives.size());
  // sets in compressed rows: the positives (by position) whose hashes meet each bit
  uint32_t* starts = arena.zeros<uint32_t>(uint64_t{filter.bits} + 2);
  uint32_t* bits = arena.array<uint32_t>(uint64_t{n} * filter.hashes);
  for (uint32_t j = 0; j < n; ++j) {
    const uint32_t block = murmur_block(positives.data()[j]);
    for (uint32_t i = 0; i < filter.hashes; ++i) {
      const uint32_t bit = filter.position(block, i);
      bits[uint64_t{j} * filter.hashes + i] = bit;
      ++starts[uint64_t{bit} + 2];
    }
  }
  uint32_t largest = 0, sets = 0;
  for (uint64_t bit = 0; bit < filter.bits; ++bit) {
    largest = std::max(largest, starts[bit + 2]);
    sets += starts[bit + 2] != 0;
  }
  uint32_t* first_of_size = arena.zeros<uint32_t>(uint64_t{largest} + 2);
  for (uint64_t bit = 0; bit < filter.bits; ++bit)
    if (starts[bit + 2] != 0) ++first_of_size[uint64_t{starts[bit + 2]} + 1];
  for (uint64_t size = 1; size <= largest; ++size) first_of_size[size + 1] += first_of_size[size];
  uint32_t* by_size = arena.array<uint32_t>(sets);
  for (uint64_t bit = 0; bit < filter.bits; ++bit)
    if (starts[bit + 2] != 0) by_size[first_of_size[starts[bit + 2]]++] = static_cast<uint32_t>(bit);
  for (uint64_t bit = 1; bit <= filter.bits; ++bit) starts[bit + 1] += starts[bit];
  uint32_t* members = arena.array<uint32_t>(uint64_t{n} * filter.hashes);
  for (uint32_t j = 0; j < n; ++j)
    for (uint32_t i = 0; i < filter.hashes; ++i) members[starts[uint64_t{bits[uint64_t{j} * filter.hashes + i]} + 1]++] = j;
  // now the members of a bit's set are at starts[bit] to starts[bit + 1]

  uint8_t* taken = arena.zeros<uint8_t>(n);
  uint32_t chosen = 0, draws = 0;
  while (chosen < k) {  // every pass takes at least one: n >= k and every positive is in some set
    for (uint32_t s = 0; s < sets && chosen < k; ++s) {
      uint32_t* first = members + starts[by_size[s]];
      const uint32_t* end = members + starts[uint64_t{by_size[s]} + 1];
      uint32_t left = 0;
      for (const uint32_t* at = first; at < end; ++at) left += !taken[*at];
      if (left == 0) continue;
      uint32_t pick = end - first == 1 ? 0 : random_below(key, draws++, left);
      for (const uint32_t* at = first; at < end; ++at) {
        if (taken[*at] || pick-- != 0) continue;
        taken[*at] = 1;
        ++chosen;
        break;
      }
    }
  }
  uint32_t* result = arena.array<uint32_t>(k);
  for (uint32_t j = 0, i = 0; j < n; ++j)
    if (taken[j]) result[i++] = positives.data()[j];
  return result;
}

// The positives that the policy keeps; count is what the payload's header says, or for P0 in the encoder no bound.
const uint32_t* apply_policy(Context& context, const BloomFilter& filter, uint8_t policy, uint32_t seed, uint32_t d, uint32_t count,
                             bool decoding, const char* section, uint32_t* decoded_count) {
  Arena& arena = context.arena;
  Positives positives(arena, std::min<uint64_t>(d, uint64_t{count} + count / 8 + 4096));
  // of these only the first `count` are kept, or there must be no more
  const bool bounded = policy == kNaive || policy == kLeftmost || (policy == kP0 && decoding);
  const uint64_t most = (2 * uint64_t{d} + 4096) / filter.hashes + 2 * uint64_t{count};
  scan_universe(context.simd, filter, d, bounded ? count : policy == kP0 ? d : most, positives);
  if (positives.size() < count || (policy == kP0 && decoding && positives.size() != count))
    corrupt_payload("%s: expected a Bloom filter with %u positives, got %llu", section, count, static_cast<unsigned long long>(positives.size()));
  *decoded_count = policy == kP0 ? static_cast<uint32_t>(positives.size()) : count;
  if (!random_policy(policy)) return positives.data();
  check_entries(positives.size(), filter.hashes, d, count, section);
  const uint64_t key = mix64(seed);
  return policy == kP1 ? choose_random(arena, positives, count, key) : choose_by_conflict_sets(arena, filter, positives, count, key);
}

void encode(Context& context, IndexEncoding& encoding, ByteWriter& section) {
  const double wanted_policy = encoding.parameters[1];
  if (!(wanted_policy >= kNaive && wanted_policy <= kP2)) invalid_argument("Bloom policy: expected 0 to 4, got %g", wanted_policy);
  if (!(encoding.parameters[0] < 1)) invalid_argument("Bloom fpr: expected a number below 1, got %g", encoding.parameters[0]);
  if (encoding.count == 0) return;
  const uint8_t policy = static_cast<uint8_t>(wanted_policy);
  const double log_rate = exact_log(false_positive_rate(encoding, policy));
  const double bits = std::ceil(-(encoding.count * log_rate) / (kLn2 * kLn2));
  if (bits > 4294967295.0)
    invalid_argument("Bloom filter: expected at most 4294967295 bits, got %.0f; use a larger fpr or split the tensor", bits);
  BloomFilter filter;
  filter.bits = std::max<uint32_t>(static_cast<uint32_t>(bits), 1);
  filter.hashes = std::max<uint32_t>(static_cast<uint32_t>(std::ceil(-log_rate / kLn2)), 1);
  filter.words = context.arena.zeros<uint32_t>((uint64_t{filter.bits} + 31) / 32);
  for (uint32_t i = 0; i < encoding.count; ++i) filter.insert(encoding.indices[i]);

  const uint32_t seed = random_policy(policy) ? static_cast<uint32_t>(encoding.key) : 0;
  section.put(policy);
  section.put(static_cast<uint8_t>(filter.hashes));
  section.put(filter.bits);
  if (random_policy(policy)) section.put(seed);
  section.put_bytes(filter.words, (uint64_t{filter.bits} + 7) / 8);

  encoding.decoded = apply_policy(context, filter, policy, seed, encoding.d, encoding.count, false, "Bloom filter", &encoding.decoded_count);
  encoding.values_stay = policy == kNaive;
}

void decode(Context& context, ByteReader& section, uint32_t d, uint32_t count, uint32_t* indices) {
  if (count == 0) return section.expect_end();
  const uint8_t policy = section.get<uint8_t>();
  BloomFilter filter;
  filter.hashes = section.get<uint8_t>();
  filter.bits = section.get<uint32_t>();
  if (policy > kP2 || filter.hashes < 1 || filter.hashes > kLargestHashes || filter.bits < 1)
    corrupt_payload("%s: expected a policy of 0 to 4, 1 to %u hashes and at least 1 bit, got %u, %u and %u", section.section(), kLargestHashes,
                    policy, filter.hashes, filter.bits);
  const uint32_t seed = random_policy(policy) ? section.get<uint32_t>() : 0;
  const uint64_t bytes = (uint64_t{filter.bits} + 7) / 8;
  const uint8_t* data = section.take(bytes);
  section.expect_end();
  if (filter.bits % 8 != 0 && (data[bytes - 1] >> (filter.bits % 8)) != 0)
    corrupt_payload("%s: expected zero padding and the end of the bits", section.section());
  filter.words = context.arena.zeros<uint32_t>((uint64_t{filter.bits} + 31) / 32);
  std::memcpy(filter.words, data, bytes);
  uint32_t decoded_count;
  const uint32_t* decoded = apply_policy(context, filter, policy, seed, d, count, true, section.section(), &decoded_count);
  std::memcpy(indices, decoded, uint64_t{4} * count);
}

}  // namespace

extern const IndexCodec bloom_codec;
const IndexCodec bloom_codec = {kBloom, "Bloom", false, encode, decode};

}  // namespace deepreduce
