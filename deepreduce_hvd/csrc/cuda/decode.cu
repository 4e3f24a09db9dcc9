// The work of dr_cuda_decode_sum: checks of the container, the stages, and the sum. A payload is
// encoded by the codec, dense, or non-finite. Only the device knows which. So the same kernels are
// started for all of them, and missing sections are not active.
#include "cuda/algorithms.cuh"
#include "cuda/encode.cuh"
#include "cuda/payload.cuh"
#include "support/bits.h"
#include "value/half_format.h"

namespace deepreduce {
namespace cuda {
namespace {

// The contents of a payload, as found by the device.
struct Opened {
  uint64_t checksum;
  // dense: the values of all elements, as float32 or as 2-byte floats
  DeviceSection index, value, order, dense;
  uint32_t ascending;  // indices must ascend
  uint32_t non_finite;
  int32_t dense_id;
};

// What the caller expects of the payload.
struct Expected {
  int32_t index_id, value_id;
  uint32_t sorts, any_order;  // booleans
  uint32_t d;
};

// Returns 8 bytes, with zeros beyond the end. Reads whole words in the middle, and single bytes at
// both ends, because memory beyond them belongs to others.
__device__ uint64_t word_of(const uint8_t* data, uint64_t size, uint64_t at) {
  const uint64_t misaligned = reinterpret_cast<uintptr_t>(data) % 8;
  if (at >= 8 && at + 16 <= size) {
    const uint64_t* words = reinterpret_cast<const uint64_t*>(data - misaligned) + at / 8;
    return misaligned == 0 ? words[0]
                           : words[0] >> (8 * misaligned) | words[1] << (64 - 8 * misaligned);
  }
  uint64_t word = 0;
  for (uint64_t byte = at; byte < size && byte < at + 8; ++byte)
    word |= static_cast<uint64_t>(data[byte]) << (8 * (byte - at));
  return word;
}

__device__ void sum_words(const Payload* from, uint64_t* checksum) {
  __shared__ uint64_t shared[33];
  const uint8_t* payload = from->data;
  const uint64_t size = from->size;
  const uint64_t words = (size + 7) / 8;
  uint64_t terms = 0;
  for (uint64_t i = grid_index(); i < words; i += grid_stride())
    terms += checksum_term(i == kChecksumOffset / 8 ? 0 : word_of(payload, size, 8 * i), i);
  add_block_sum(terms, shared, checksum);
}

__device__ bool is_dense_id(int32_t id) {
  return id == kRawValue || id == kFloat16 || id == kBFloat16;
}

__device__ Refused refused_of(HeaderFault fault) {
  switch (fault) {
    case HeaderFault::nothing:
      break;
#define DR_CASE(name)     \
  case HeaderFault::name: \
    return Refused::name;
      DR_HEADER_FAULTS(DR_CASE)
#undef DR_CASE
  }
  return Refused::nothing;
}

// Runs in one thread. After the checks of the header, the order of the checks is that of
// csrc/container/decode.cc.
__device__ void open(const Payload* from, uint64_t position, Expected expected, Opened* opened,
                     dr_cuda_result* result) {
  if (refused(result)) return;
  const uint8_t* payload = from->data;
  result->payload = position;
  const Header header = load_header(payload);
  const HeaderRefusal refusal = check_header(header, from->size, opened->checksum);
  if (refusal.fault != HeaderFault::nothing)
    return refuse(result, refused_of(refusal.fault), refusal.expected, refusal.got);
  const uint32_t d = header.d, count = header.count, order = header.order;
  const int32_t index_id = header.index_id, value_id = header.value_id;
  if (d != expected.d) return refuse(result, Refused::wrong_elements, expected.d, d);
  if (header.non_finite()) {
    opened->non_finite = 1;
    result->non_finite = 1;
    return;
  }
  const bool dense = index_id == 0 && is_dense_id(value_id);
  const bool sorts = !dense && expected.sorts != 0;
  if (!dense && value_id != expected.value_id)
    return refuse(result, Refused::value_id, static_cast<uint64_t>(expected.value_id),
                  static_cast<uint64_t>(value_id));
  if (order != kAscending && !sorts)
    return refuse(result, Refused::order_of_unsorted, kAscending, order);
  if (order == kAscending && sorts)
    return refuse(result, Refused::order_of_sorted, kPermutation, order);
  if (index_id != 0 && index_id != expected.index_id)
    return refuse(result, Refused::index_id, static_cast<uint64_t>(expected.index_id),
                  static_cast<uint64_t>(index_id));
  if (index_id != 0 && order == kIndicesInValueOrder && expected.any_order == 0)
    return refuse(result, Refused::order_of_indices, kPermutation, order);
  const uint32_t most = index_id != 0 ? from->most_indices : from->most;
  if (!dense && count > most) return refuse(result, Refused::count_of_bytes, most, count);
  const uint8_t* const index = payload + kHeaderBytes;
  const uint8_t* const values = index + header.index_bytes;
  opened->index = {index, header.index_bytes, d, count, index_id != 0};
  opened->value = {values, header.value_bytes, d, count, !dense};
  opened->dense = {values, header.value_bytes, d, count, dense};
  opened->order = {values + header.value_bytes, header.order_bytes, d, count,
                   order == kPermutation};
  opened->ascending = index_id != 0 && expected.any_order != 0 && order != kIndicesInValueOrder;
  opened->dense_id = value_id;
}

__device__ void expect_ascending(const Opened* opened, const uint32_t* indices,
                                 dr_cuda_result* result) {
  if (opened->ascending == 0 || refused(result)) return;
  for (uint32_t i = grid_index(); i + 1 < opened->index.count; i += grid_stride())
    if (indices[i + 1] <= indices[i])
      refuse(result, Refused::indices_not_ascending, indices[i], indices[i + 1]);
}

__device__ uint32_t half_at(const uint8_t* data, uint32_t i) {
  const uint8_t* at = data + uint64_t{2} * i;
  return static_cast<uint32_t>(at[0]) | static_cast<uint32_t>(at[1]) << 8;
}

__device__ void check_dense(const Opened* opened, dr_cuda_result* result) {
  const DeviceSection* dense = &opened->dense;
  if (skipped(dense, result)) return;
  const bool halves = opened->dense_id != kRawValue;
  const uint64_t bytes = uint64_t{halves ? 2u : 4u} * dense->count;
  if (dense->bytes != bytes) {
    if (grid_index() == 0) refuse(result, Refused::value_section_bytes, bytes, dense->bytes);
    return;
  }
  const uint32_t exponent =
      opened->dense_id == kFloat16 ? Float16Format::kExponent : BFloat16Format::kExponent;
  for (uint32_t i = grid_index(); halves && i < dense->count; i += grid_stride()) {
    const uint32_t half = half_at(dense->data, i);
    if ((half & exponent) == exponent) refuse(result, Refused::not_finite_half, 16, half);
  }
}

// The indices of a payload are distinct, so no two threads write the same element.
__device__ void add(const Opened* opened, const uint32_t* indices, const uint32_t* order,
                    const float* values, const SumInputs* inputs, uint32_t d,
                    const dr_cuda_result* result) {
  if (refused(result)) return;
  float* const out = inputs->out;
  const float scale = inputs->scale;
  if (opened->non_finite != 0) {
    for (uint32_t i = grid_index(); i < d; i += grid_stride()) out[i] = bits_float(0x7FC00000u);
  } else if (opened->dense.active != 0) {
    const uint8_t* data = opened->dense.data;
    const int32_t id = opened->dense_id;
    for (uint32_t i = grid_index(); i < d; i += grid_stride()) {
      const float value = id == kRawValue ? bits_float(load_u32(data + uint64_t{4} * i))
                          : id == kFloat16
                              ? float16_to_float(static_cast<uint16_t>(half_at(data, i)))
                              : bfloat16_to_float(static_cast<uint16_t>(half_at(data, i)));
      out[i] += scale * value;
    }
  } else {
    const bool permuted = opened->order.active != 0, indexed = opened->index.active != 0;
    const uint32_t count = opened->value.count;
    for (uint32_t j = grid_index(); j < count; j += grid_stride()) {
      const uint32_t place = permuted ? order[j] : j;
      out[indexed ? indices[place] : place] += scale * values[j];
    }
  }
}

// Returns the maximum number of values whose order fits into `bytes` bytes, as an order section or
// as indices of 4 bytes.
uint64_t most_ordered(uint64_t bytes) {
  uint64_t most = 1;
  for (unsigned width = 1; width <= 31; ++width)
    most = std::max(most, std::min(uint64_t{1} << width, 8 * bytes / width));
  return most;
}

}  // namespace

Payload described(const dr_codec& codec, uint64_t d, const uint8_t* data, uint64_t size) {
  if (size < kHeaderBytes)
    corrupt_payload("payload: expected at least %llu bytes, got %llu",
                    static_cast<unsigned long long>(kHeaderBytes),
                    static_cast<unsigned long long>(size));
  const Stages stages = stages_of(codec);
  const uint64_t bytes = size - kHeaderBytes;
  const uint64_t ordered = stages.value->sorts ? most_ordered(bytes) : d;
  const uint32_t most =
      static_cast<uint32_t>(std::min<uint64_t>({d, ordered, stages.value->most_count(bytes)}));
  return {data, size, most,
          std::min(most, stages.index->most_count(bytes, static_cast<uint32_t>(d)))};
}

void decode_sum(Device& device, const dr_codec& codec, uint64_t position, const Payload* payload,
                const Payload& most, const SumInputs* inputs, uint64_t d) {
  const Stages stages = stages_of(codec);
  const uint64_t bytes = most.size - kHeaderBytes;
  const uint32_t elements = static_cast<uint32_t>(d);
  const Expected expected{codec.index.id, codec.value.id, stages.value->sorts,
                          stages.index->any_order, elements};

  Opened* opened = device.zeros<Opened>(1);
  launch<sum_words>(device, blocks_for((most.size + 7) / 8, 4), kThreads, 0, payload,
                    &opened->checksum);
  launch<open>(device, 1, 1, 0, payload, position, expected, opened, device.result());
  uint32_t* indices = device.array<uint32_t>(most.most_indices);
  stages.index->decode(device, &opened->index, elements, most.most_indices, bytes,
                       codec.index.parameters, indices);
  if (stages.index->any_order)
    launch_elementwise<expect_ascending>(device, blocks_for(most.most_indices), opened, indices,
                                         device.result());
  float* values = device.array<float>(most.most);
  stages.value->decode(device, &opened->value, most.most, bytes, values);
  uint32_t* order = stages.value->sorts ? device.array<uint32_t>(most.most) : nullptr;
  if (stages.value->sorts) read_order(device, &opened->order, most.most, order);
  launch_elementwise<check_dense>(device, blocks_for(std::min<uint64_t>(d, bytes / 2), 4), opened,
                                  device.result());
  launch_elementwise<add>(device, blocks_for(std::max<uint64_t>(most.most, d / 16)), opened,
                          indices, order, values, inputs, elements, device.result());
}

}  // namespace cuda
}  // namespace deepreduce
