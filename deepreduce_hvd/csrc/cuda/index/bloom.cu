// Bloom: reads and writes sections, and derives indices from the positives of a filter.
#include "cuda/index/bloom.cuh"

#include "support/bits.h"

namespace deepreduce {
namespace cuda {
namespace {

constexpr double kMostFilterBits = 4294967295.0;
// range of the bits per value of the value codecs on the device and the order mapping
constexpr double kLeastValueBits = 1, kMostValueBits = 64;
constexpr uint32_t kShortestSection = 7;

// ---- Upper bounds for the host, which only knows that count <= k and k >= 1. Rates and filters
// grow with count.

double largest_rate(BloomSettings settings, uint32_t d, uint32_t k) {
  return bloom_rate(settings.rate, settings.policy, d, k, kLeastValueBits);
}

uint64_t most_filter_bits(BloomSettings settings, uint32_t d, uint32_t k) {
  // k * log(1 / rate) grows with k
  const double smallest = settings.rate < 0 && settings.policy == kP0
                              ? k / (kMostValueBits * (kLn2 * kLn2) * d)
                              : bloom_rate(settings.rate, settings.policy, d, k, kMostValueBits);
  const double bits = -(k * std::log(std::max(smallest, kSmallestRate))) / (kLn2 * kLn2);
  return static_cast<uint64_t>(std::min(bits * (1 + 1e-9) + 64, kMostFilterBits));
}

// Returns the maximum share of [0, d) that is positive. The filter has count * log2(1 / rate) / ln
// 2 bits and ceil(log2(1 / rate)) hashes, and `filled` is the share of its bits that the indices
// set. If the rate depends on count, a smaller count may have one more hash and a fuller filter.
template <class Filled>
double positive_part(bool fixed_rate, double rate, Filled filled) {
  const double exact = -std::log2(rate), hashes = std::max(std::ceil(exact), 1.0);
  const double part = std::pow(std::min(filled(hashes / exact, exact), 1.0), hashes);
  return fixed_rate ? part
                    : std::max(part, std::pow(std::min(filled((hashes + 1) / hashes, hashes), 1.0),
                                              hashes + 1));
}

// The maximum numbers of positives, for up to kFew indices and for more. Few indices may set as
// many bits as they have hashes. For many indices, the number of set bits varies only by about its
// square root. With evenly distributed hashes, more positives than this do not occur.
struct MostPositives {
  double of_few, of_many;
};

constexpr uint32_t kFew = 1024;

MostPositives most_found(BloomSettings settings, uint32_t d, uint32_t k) {
  const uint32_t few = std::min(k, kFew);
  const bool fixed_rate = settings.rate > 0;
  const double part_of_few =
      positive_part(fixed_rate, largest_rate(settings, d, few),
                    [](double hashes_ratio, double) { return kLn2 * hashes_ratio; });
  const double part_of_many = positive_part(
      fixed_rate, largest_rate(settings, d, k), [](double hashes_ratio, double exact) {
        // more than six times the standard deviation
        return 1 - std::exp(-kLn2 * hashes_ratio) + 3 / std::sqrt(kFew * exact / kLn2);
      });
  return {few + 1.05 * d * part_of_few + 4096, k + 1.05 * d * part_of_many + 4096};
}

// Returns the maximum number of members of the conflict sets from which P2 draws: the positives
// that are not alone in a set, times the number of hashes. A payload with the same settings has no
// more. A payload with other settings may have more, and the host then decodes it. With few
// indices, possibly none is alone. With many indices, on average ln 2 * hashes / log2(1 / rate)
// hashes of indices fall on one bit, and proportionally many hashes of false positives. An index is
// alone in a set if one of its bits has no other hash.
uint64_t most_set_members(BloomSettings settings, uint32_t d, uint32_t k) {
  const MostPositives found = most_found(settings, d, k);
  const double exact = -std::log2(largest_rate(settings, d, k)),
               hashes = std::max(std::ceil(exact), 1.0);
  const bool fixed_rate = settings.rate > 0;
  const double met =
      kLn2 * (fixed_rate ? hashes / exact : std::max(hashes / exact, (hashes + 1) / hashes));
  const double false_positives = found.of_many - k;
  double undecided = false_positives;
  for (double most = k; most > kFew / 2; most /= 2) {  // for counts of most / 2 to most
    const double not_alone =
        std::pow(1 - std::exp(-met * (1 + false_positives / (most / 2))), hashes);
    undecided = std::max(undecided, false_positives + most * std::min(1.25 * not_alone, 1.0));
  }
  undecided = std::min<double>(d, undecided);
  const double members =
      fixed_rate
          ? hashes * std::max(std::min<double>(d, found.of_few), undecided)
          : std::max(kLargestHashes * std::min<double>(d, found.of_few), (hashes + 1) * undecided);
  return static_cast<uint64_t>(members) + 16384;
}

// Returns an upper bound of the number of indices in a payload with these settings and this size.
uint32_t most_indices_of(BloomSettings settings, uint32_t d, uint32_t k, uint64_t bytes) {
  for (int step = 0; step < 4; ++step)
    k = static_cast<uint32_t>(std::min<double>(
        k, 1 + 8.0 * static_cast<double>(bytes) * kLn2 / -std::log2(largest_rate(settings, d, k))));
  return k;
}

// ---- Sections.

// Runs in one thread.
__device__ void plan_encoding(const uint32_t* count_at, uint32_t d, BloomSettings settings,
                              double value_bits, const uint64_t* key, uint64_t capacity,
                              BloomPlan* plan, uint32_t* decoded_count, uint8_t* section,
                              uint64_t* section_bytes, dr_cuda_result* result) {
  const uint32_t count = *count_at, policy = settings.policy;
  *plan = BloomPlan{};
  *section_bytes = 0;
  *decoded_count = 0;
  if (count == 0 || refused(result)) return;
  const BloomSize size = bloom_size(bloom_rate(settings.rate, policy, d, count, value_bits), count);
  const uint64_t bytes = bloom_head_bytes(policy) + (static_cast<uint64_t>(size.bits) + 7) / 8;
  if (size.bits > kMostFilterBits || bytes > capacity) {
    refuse(result, Refused::bloom_filter_bits, static_cast<uint64_t>(kMostFilterBits),
           static_cast<uint64_t>(size.bits));
    return;
  }
  *section_bytes = bytes;
  plan->active = 1;
  plan->policy = policy;
  plan->hashes = size.hashes;
  plan->bits = static_cast<uint32_t>(size.bits);
  plan->count = count;
  const uint32_t seed = random_policy(policy) ? static_cast<uint32_t>(*key) : 0;
  plan->key = mix64(seed);
  section[0] = static_cast<uint8_t>(policy);
  section[1] = static_cast<uint8_t>(size.hashes);
  for (int byte = 0; byte < 4; ++byte)
    section[2 + byte] = static_cast<uint8_t>(plan->bits >> (8 * byte));
  for (int byte = 0; byte < 4 && random_policy(policy); ++byte)
    section[6 + byte] = static_cast<uint8_t>(seed >> (8 * byte));
}

// The filter starts two bytes after the start of a word. Whole words are written at its end.
__device__ void write_filter(const BloomPlan* plan, const uint32_t* filter, uint8_t* section) {
  if (plan->active == 0) return;
  uint16_t* out = reinterpret_cast<uint16_t*>(section + bloom_head_bytes(plan->policy));
  const uint32_t words = (plan->bits - 1) / 32 + 1;
  for (uint32_t at = grid_index(); at < words; at += grid_stride()) {
    out[uint64_t{2} * at] = static_cast<uint16_t>(filter[at]);
    out[uint64_t{2} * at + 1] = static_cast<uint16_t>(filter[at] >> 16);
  }
}

// Runs in one thread.
__device__ void plan_decoding(const DeviceSection* section, uint32_t expected_policy,
                              uint64_t most_bits, BloomPlan* plan, dr_cuda_result* result) {
  *plan = BloomPlan{};
  if (skipped(section, result)) return;
  const uint8_t* data = section->data;
  const uint64_t bytes = section->bytes;
  if (section->count == 0) {
    if (bytes != 0) refuse(result, Refused::index_section_bytes, 0, bytes);
    return;
  }
  if (bytes < kShortestSection)
    return refuse(result, Refused::index_section_bytes, kShortestSection, bytes);
  const uint32_t policy = data[0], hashes = data[1], bits = load_u32(data + 2),
                 header = bloom_head_bytes(policy);
  switch (invalid_bloom_field(policy, hashes, bits)) {
    case BloomField::policy:
      return refuse(result, Refused::bloom_policy, kP2, policy);
    case BloomField::hashes:
      return refuse(result, Refused::bloom_hashes, kLargestHashes, hashes);
    case BloomField::bits:
      return refuse(result, Refused::bloom_no_bits, 1, bits);
    case BloomField::none:
      break;
  }
  if (bytes != header + (uint64_t{bits} + 7) / 8)
    return refuse(result, Refused::index_section_bytes, header + (uint64_t{bits} + 7) / 8, bytes);
  if (!expect_zero_padding(data + header, bits, result)) return;
  if (random_policy(policy) && policy != expected_policy)
    return refuse(result, Refused::bloom_other_policy, expected_policy, policy);
  if (policy == kP2 && bits > most_bits)
    return refuse(result, Refused::bloom_bits_for_host, most_bits, bits);
  plan->active = 1;
  plan->policy = policy;
  plan->hashes = hashes;
  plan->bits = bits;
  plan->count = section->count;
  plan->key = random_policy(policy) ? mix64(load_u32(data + 6)) : 0;
}

__device__ void read_filter(const BloomPlan* plan, const DeviceSection* section, uint32_t* filter) {
  if (plan->active == 0) return;
  const uint8_t* data = section->data + bloom_head_bytes(plan->policy);
  const uint64_t bytes = (uint64_t{plan->bits} + 7) / 8;
  const uint32_t words = (plan->bits - 1) / 32 + 1;
  for (uint32_t at = grid_index(); at < words; at += grid_stride())
    filter[at] = static_cast<uint32_t>(load_bits(data, bytes, uint64_t{32} * at));
}

// ---- Positives of the filter.

// Runs in one thread. decoded_count: only for P0 when encoding, with at most `room` decoded
// indices; null when decoding.
__device__ void check_found(BloomPlan* plan, IndexSet positives, uint32_t d, uint32_t room,
                            uint32_t* decoded_count, dr_cuda_result* result) {
  if (plan->active == 0) return;
  const uint32_t found = positives.before[positives.tiles], count = plan->count;
  const bool decoding = decoded_count == nullptr;
  const uint64_t most = most_positives(plan->hashes, d, count);
  if (!enough_positives(plan->policy, decoding, found, count)) {
    refuse(result, Refused::bloom_positives, count, found);
    plan->active = 0;
  } else if (random_policy(plan->policy) && found > most) {
    refuse(result, decoding ? Refused::bloom_many_positives : Refused::bloom_most_positives, most,
           found);
    plan->active = 0;
  } else if (!decoding && plan->policy == kP0 && found > room) {
    refuse(result, Refused::bloom_room, room, found);
    plan->active = 0;
  } else {
    plan->found = found;
    plan->wanted = count;
    plan->listed = plan->policy == kP0 ? found : count;
    if (!decoding) *decoded_count = plan->listed;
  }
}

void choose(Device& device, BloomPlan* plan, BloomSettings settings, uint32_t d, uint64_t most_bits,
            uint64_t most_members, Refused too_many, const IndexSet& positives) {
  if (settings.policy == kP1) keep_random(device, plan, positives);
  if (settings.policy == kP2)
    keep_by_conflict_sets(device, plan, d, most_bits, most_members, too_many, positives);
}

uint64_t section_capacity(uint32_t d, uint32_t capacity, const double* parameters) {
  const BloomSettings settings = bloom_settings(parameters);
  const uint32_t k = std::min(d, capacity);
  return k == 0 ? 0
                : bloom_head_bytes(settings.policy) + (most_filter_bits(settings, d, k) + 7) / 8;
}

uint32_t decoded_capacity(uint32_t d, uint32_t capacity, const double* parameters) {
  const BloomSettings settings = bloom_settings(parameters);
  const uint32_t k = std::min(d, capacity);
  if (k == 0 || settings.policy != kP0) return capacity;
  const MostPositives found = most_found(settings, d, k);
  return static_cast<uint32_t>(std::min<double>(d, std::max(found.of_few, found.of_many)));
}

void encode(Device& device, DeviceIndexEncoding& encoding) {
  const BloomSettings settings = bloom_settings(encoding.parameters);
  if (!(encoding.value_bits >= kLeastValueBits && encoding.value_bits <= kMostValueBits))
    invalid_argument("Bloom: expected values of 1 to 64 bits, got %g", encoding.value_bits);
  const uint32_t d = encoding.d, k = std::min(d, encoding.capacity);
  uint32_t* decoded = device.array<uint32_t>(encoding.decoded_capacity);
  uint32_t* decoded_count = device.array<uint32_t>(1);
  const uint64_t mark = device.mark();
  BloomPlan* plan = device.array<BloomPlan>(1);
  const uint64_t most_bits = k == 0 ? 0 : most_filter_bits(settings, d, k),
                 most_members = k == 0 ? 0 : most_set_members(settings, d, k);
  uint32_t* filter = device.zeros<uint32_t>(most_bits / 32 + 1);
  launch<plan_encoding>(device, 1, 1, 0, encoding.count, d, settings, encoding.value_bits,
                        encoding.key, encoding.section.capacity, plan, decoded_count,
                        encoding.section.data, encoding.section.bytes, device.result());
  insert_indices(device, plan, encoding.indices, encoding.capacity, filter);
  launch_elementwise<write_filter>(device, blocks_for(most_bits / 32 + 1), plan, filter,
                                   encoding.section.data);
  const IndexSet positives = index_set(device, d);
  scan_universe(device, plan, filter, d, positives);
  launch<check_found>(device, 1, 1, 0, plan, positives, d, encoding.decoded_capacity, decoded_count,
                      device.result());
  choose(device, plan, settings, d, most_bits, most_members, Refused::bloom_set_members, positives);
  list_indices(device, plan, positives, decoded);
  device.release(mark);
  encoding.decoded = decoded;
  encoding.decoded_count = decoded_count;
  encoding.values_stay = settings.policy == kNaive;
}

uint32_t most_count(uint64_t bytes, uint32_t d) { return bytes < kShortestSection ? 0 : d; }

void decode(Device& device, const DeviceSection* section, uint32_t d, uint32_t capacity,
            uint64_t most_bytes, const double* parameters, uint32_t* indices) {
  const BloomSettings settings = bloom_settings(parameters);
  const uint64_t mark = device.mark();
  BloomPlan* plan = device.array<BloomPlan>(1);
  const uint32_t most = std::min(d, capacity),
                 k = most == 0 ? 0 : most_indices_of(settings, d, most, most_bytes);
  const uint64_t most_members = k == 0 ? 0 : most_set_members(settings, d, k);
  // with P2
  const uint64_t most_bits =
      std::min(8 * most_bytes, (k == 0 ? 0 : most_filter_bits(settings, d, k)) + 65536);
  uint32_t* filter = device.array<uint32_t>(most_bytes / 4 + 1);
  launch<plan_decoding>(device, 1, 1, 0, section, settings.policy, most_bits, plan,
                        device.result());
  launch_elementwise<read_filter>(device, blocks_for(most_bytes / 4 + 1), plan, section, filter);
  const IndexSet positives = index_set(device, d);
  scan_universe(device, plan, filter, d, positives);
  launch<check_found>(device, 1, 1, 0, plan, positives, d, 0, static_cast<uint32_t*>(nullptr),
                      device.result());
  choose(device, plan, settings, d, most_bits, most_members, Refused::bloom_left_to_host,
         positives);
  list_indices(device, plan, positives, indices);
  device.release(mark);
}

}  // namespace

extern const DeviceIndexCodec bloom_device_codec;
const DeviceIndexCodec bloom_device_codec = {
    kBloom, "Bloom", false, section_capacity, decoded_capacity, encode, most_count, decode};

}  // namespace cuda
}  // namespace deepreduce
