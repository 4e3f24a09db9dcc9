// Decoding: a payload to indices and values, then a sum into a dense or a sparse result.
#include <algorithm>
#include <cmath>
#include <limits>

#include "container/encode.h"
#include "container/order.h"
#include "container/payload.h"
#include "support/prefetch.h"
#include "support/simd.h"

namespace deepreduce {
namespace {

void expect_ascending(const uint32_t* indices, uint32_t count, unsigned order) {
  for (uint32_t i = 1; i < count; ++i)
    if (indices[i] <= indices[i - 1])
      corrupt_payload(
          "index section: expected ascending indices for payload order %u, got %u after %u", order,
          indices[i], indices[i - 1]);
}

// Returns indices (null: all, in order) and values. The values are in the order of the indices,
// unless the payload has both in value order.
Selection decode(Context& context, const Payload& payload) {
  const ValueCodec* value_codec = find_value_codec(payload.value_id);
  if (value_codec == nullptr) unknown_codec("value codec: got the unknown id %u", payload.value_id);
  if (payload.order != kAscending && !value_codec->sorts)
    corrupt_payload("payload order: expected 0 for %s values, got %u", value_codec->name,
                    payload.order);
  if (payload.order == kAscending && value_codec->sorts)
    corrupt_payload("payload order: expected 1 or 2 for %s values, got 0", value_codec->name);

  Selection result;
  result.count = payload.count;
  if (payload.index_id != kAllIndices) {
    const IndexCodec* index_codec = find_index_codec(payload.index_id);
    if (index_codec == nullptr)
      unknown_codec("index codec: got the unknown id %u", payload.index_id);
    if (payload.order == kIndicesInValueOrder && !index_codec->any_order)
      corrupt_payload("payload order: expected 0 or 1 for %s indices, got 2", index_codec->name);
    uint32_t* indices = context.arena.array<uint32_t>(payload.count);
    ByteReader section(payload.index, payload.index_bytes, "index section");
    index_codec->decode(context, section, payload.d, payload.count, indices);
    if (index_codec->any_order && payload.order != kIndicesInValueOrder)
      expect_ascending(indices, payload.count, payload.order);
    result.indices = indices;
  }
  float* values = context.arena.array<float>(payload.count);
  ByteReader section(payload.values, payload.value_bytes, "value section");
  value_codec->decode(context, section, payload.count, values);
  result.values = values;
  if (payload.order == kPermutation) {
    uint32_t* order = context.arena.array<uint32_t>(payload.count);
    ByteReader map(payload.order_map, payload.order_bytes, "order section");
    read_order(context, map, payload.count, order);
    float* ordered = context.arena.array<float>(payload.count);
    for (uint32_t j = 0; j < payload.count; ++j) ordered[order[j]] = values[j];
    result.values = ordered;
  }
  return result;
}

// sum[i] += scale * values[i] for all n elements; returns the largest magnitude.
DR_INLINE Largest add_loop(const float* __restrict values, uint32_t n, float scale,
                           float* __restrict sum) {
  Largest largest;
  for (uint32_t i = 0; i < n; ++i) largest.take(sum[i] += scale * values[i]);
  return largest;
}

Largest add_all_scalar(const float* values, uint32_t n, float scale, float* sum) {
  return add_loop(values, n, scale, sum);
}
#if defined(__x86_64__)
DR_AVX2 Largest add_all_avx2(const float* values, uint32_t n, float scale, float* sum) {
  return add_loop(values, n, scale, sum);
}
DR_AVX512 Largest add_all_avx512(const float* values, uint32_t n, float scale, float* sum) {
  return add_loop(values, n, scale, sum);
}
#endif

Payload open(const Context& context, const uint8_t* data, uint64_t size, uint64_t d) {
  const Payload payload = read_payload(context.simd, data, size);
  if (payload.d != d)
    invalid_argument("payload: expected d = %llu elements, got %u",
                     static_cast<unsigned long long>(d), payload.d);
  return payload;
}

}  // namespace

void decode_sum(Context& context, const uint8_t* data, uint64_t size, float* out, uint64_t d,
                float scale, Largest& caller_largest) {
  const Payload payload = open(context, data, size, d);
  if ((payload.flags & kNonFinite) != 0) {
    for (uint64_t i = 0; i < d; ++i) out[i] = std::numeric_limits<float>::quiet_NaN();
    caller_largest.take(std::numeric_limits<float>::quiet_NaN());
    return;
  }
  const Selection sent = decode(context, payload);
  if (sent.indices == nullptr) {
    const auto add_all = DR_CHOOSE(context.simd, add_all);
    caller_largest.take(add_all(sent.values, sent.count, scale, out).magnitude());
    return;
  }
  Largest largest;  // a local, which cannot alias the sum
  for (uint32_t i = 0; i < sent.count; ++i) {
    prefetch_ahead(out, sent.indices, i, sent.count);
    largest.take(out[sent.indices[i]] += scale * sent.values[i]);
  }
  caller_largest.take(largest.magnitude());
}

namespace {

// Memory for a selection.
struct Room {
  uint32_t* indices;
  float* values;
};

// Writes the union of two ascending streams to `room` and returns it. Values of equal indices are
// added, the left one first.
Selection merge(const Room& room, const Selection& left, const Selection& right) {
  uint32_t* indices = room.indices;
  float* values = room.values;
  uint32_t i = 0, j = 0, n = 0;
  // which side is next is random: bit masks instead of branches to mispredict
  while (i < left.count && j < right.count) {
    const uint32_t from_left = left.indices[i], from_right = right.indices[j];
    const uint32_t x = float_bits(left.values[i]), y = float_bits(right.values[j]);
    const uint32_t sum = float_bits(left.values[i] + right.values[j]);
    const uint32_t take_left = from_left <= from_right, take_right = from_right <= from_left;
    // all ones if the other side is not taken, else 0
    const uint32_t only_left = take_right - 1, only_right = take_left - 1;
    indices[n] = std::min(from_left, from_right);
    values[n++] =
        bits_float((only_left & x) | (only_right & y) | (~(only_left | only_right) & sum));
    i += take_left;
    j += take_right;
  }
  const bool rest_is_left = i < left.count;
  const Selection& longer = rest_is_left ? left : right;
  const uint32_t done = rest_is_left ? i : j, rest = longer.count - done;
  if (rest != 0) {
    std::memcpy(indices + n, longer.indices + done, size_t{4} * rest);
    std::memcpy(values + n, longer.values + done, size_t{4} * rest);
  }
  return {n + rest, indices, values};
}

// Returns ascending indices and scaled values, for a payload in any order.
Selection ascending_scaled(Context& context, const Payload& payload, float scale) {
  Selection sent = decode(context, payload);
  float* values = context.arena.array<float>(sent.count);
  if (payload.order == kIndicesInValueOrder) {
    // A counting pass over d makes this linear. The caller has checked d; it is not just a claim of
    // the payload.
    uint32_t* position = context.arena.zeros<uint32_t>(payload.d);
    for (uint32_t j = 0; j < sent.count; ++j) position[sent.indices[j]] = j + 1;
    uint32_t* indices = context.arena.array<uint32_t>(sent.count);
    uint32_t n = 0;
    for (uint32_t i = 0; i < payload.d; ++i) {
      if (position[i] == 0) continue;
      indices[n] = i;
      values[n++] = scale * sent.values[position[i] - 1];
    }
    return {n, indices, values};
  }
  if (sent.indices == nullptr) {
    uint32_t* indices = context.arena.array<uint32_t>(sent.count);
    for (uint32_t i = 0; i < sent.count; ++i) indices[i] = i;
    sent.indices = indices;
  }
  for (uint32_t i = 0; i < sent.count; ++i) values[i] = scale * sent.values[i];
  return {sent.count, sent.indices, values};
}

}  // namespace

void decode_sparse(dr_context* caller, Context& context, const uint8_t* const* payloads,
                   const uint64_t* sizes, uint64_t payload_count, uint64_t d, float scale) {
  Payload* opened = context.arena.array<Payload>(payload_count);
  uint64_t counts = 0;
  for (uint64_t p = 0; p < payload_count; ++p) {
    opened[p] = open(context, payloads[p], sizes[p], d);
    if ((opened[p].flags & kNonFinite) != 0)
      invalid_argument(
          "payloads: expected finite ones, got a non-finite payload at position %llu, whose sum has "
          "no sparse form",
          static_cast<unsigned long long>(p));
    counts += opened[p].count;
  }
  // Two partial sums take turns: memory for each of them would be quadratic in the number of
  // payloads.
  Room rooms[2];
  if (payload_count > 1)
    for (Room& room : rooms)
      room = {context.arena.array<uint32_t>(std::min(d, counts)),
              context.arena.array<float>(std::min(d, counts))};
  Selection sum;
  for (uint64_t p = 0; p < payload_count; ++p) {
    const Selection next = ascending_scaled(context, opened[p], scale);
    sum = p == 0 ? next : merge(rooms[p % 2], sum, next);
  }
  uint8_t* out = static_cast<uint8_t*>(caller->output(caller->user, size_t{8} * sum.count));
  if (sum.count == 0) return;
  if (out == nullptr) Arena::out_of_memory(sum.count, 8);
  std::memcpy(out, sum.indices, size_t{4} * sum.count);
  std::memcpy(out + size_t{4} * sum.count, sum.values, size_t{4} * sum.count);
}

}  // namespace deepreduce
