// The work of dr_cuda_encode: error feedback, selection, index codec, value codec and payload. The
// host starts the same kernels whatever is selected.
#include "cuda/encode.cuh"

#include "api/arguments.h"
#include "cuda/payload.cuh"
#include "cuda/select.cuh"
#include "support/random.h"

namespace deepreduce {
namespace cuda {
namespace {

__device__ void begin_plan(const uint32_t* count, uint32_t d, Plan* plan,
                           const dr_cuda_result* result) {
  plan->all = result->non_finite == 0 && *count == d;
  plan->index_count = plan->all != 0 ? 0 : *count;
}

// Determines what is sent after a lossy index codec: its indices and the values there, or all
// elements if all are selected.
__device__ void settle(const Plan* plan, Accumulated sum, const uint32_t* selected_count,
                       const uint32_t* selected, const float* selected_values,
                       const uint32_t* decoded_count, const uint32_t* decoded, bool values_stay,
                       uint32_t* count_out, uint32_t* indices, float* values,
                       const dr_cuda_result* result) {
  const bool all = plan->all != 0;
  const uint32_t count = refused(result) ? 0 : all ? *selected_count : *decoded_count;
  if (grid_index() == 0) *count_out = count;
  for (uint32_t i = grid_index(); i < count; i += grid_stride()) {
    const uint32_t index = all ? selected[i] : decoded[i];
    indices[i] = index;
    values[i] = all || values_stay ? selected_values[i] : sum.at(index);
  }
}

__device__ void reorder(const Plan* plan, const uint32_t* indices, const uint32_t* order,
                        uint32_t* reordered) {
  for (uint32_t j = grid_index(); j < plan->index_count; j += grid_stride())
    reordered[j] = indices[order[j]];
}

SectionOut section_of(Device& device, uint64_t capacity) {
  uint8_t* data = device.array<uint8_t>(capacity + kSectionSlack);
  return {data, capacity, device.array<uint64_t>(1)};
}

// The decoded contents of the payload.
struct Sent {
  uint32_t capacity;
  const uint32_t* count;
  const uint32_t* indices;
  const float* values;
};

void encode_indices(Device& device, const DeviceIndexCodec& index_codec, DeviceIndexEncoding& index,
                    uint64_t section_bytes) {
  index.section = section_of(device, section_bytes);
  index_codec.encode(device, index);
}

}  // namespace

Stages stages_of(const dr_codec& codec) {
  const Stages stages{find_device_index_codec(codec.index.id),
                      find_device_value_codec(codec.value.id)};
  if (stages.value == nullptr)
    unknown_codec("value codec: got the id %d, which has no CUDA kernels", codec.value.id);
  if (stages.index == nullptr)
    unknown_codec("index codec: got the id %d, which has no CUDA kernels", codec.index.id);
  return stages;
}

void check(const dr_codec& codec, const dr_cuda_encoding& encoding) {
  check_gradient(codec, encoding.d, encoding.dtype, encoding.residual != nullptr,
                 encoding.velocity != nullptr);
  stages_of(codec);
  check_selection(codec);
}

void check_room(const dr_cuda_encoding& encoding, uint64_t needed) {
  if (encoding.payload_capacity < needed)
    invalid_argument("payload: expected room for %llu bytes, got %llu",
                     static_cast<unsigned long long>(needed),
                     static_cast<unsigned long long>(encoding.payload_capacity));
  if (reinterpret_cast<uintptr_t>(encoding.payload) % 8 != 0)
    invalid_argument("payload: expected memory aligned to 8 bytes, got %p",
                     static_cast<void*>(encoding.payload));
}

Inputs inputs_of(const dr_cuda_encoding& encoding) {
  return {encoding.gradient, random_key(encoding.position, Purpose::bloom_policy),
          random_key(encoding.position, Purpose::rounding)};
}

void encode(Device& device, const dr_codec& codec, const Encoding& encoding) {
  const Stages stages = stages_of(codec);
  const uint32_t d = static_cast<uint32_t>(encoding.d);
  const Accumulated sum = accumulated(encoding);
  device.zero(encoding.result, sizeof(dr_cuda_result));
  Plan* plan = device.array<Plan>(1);
  const DeviceSelection selected = select(device, codec, encoding);
  // known on the host
  const bool always_all = selected.indices == nullptr, maybe_all = selected.capacity == d;
  const bool sorts = stages.value->sorts,
             reorders = !always_all && sorts && stages.index->any_order;
  launch<begin_plan>(device, 1, 1, 0, selected.count, d, plan, device.result());

  Sent sent{selected.capacity, selected.count, selected.indices, selected.values};
  Parts parts{};
  parts.index_id = codec.index.id;
  parts.value_id = codec.value.id;
  parts.order_kind = reorders ? kIndicesInValueOrder : sorts ? kPermutation : kAscending;
  parts.order_kind_of_all = sorts ? kPermutation : kAscending;

  DeviceIndexEncoding index{d,
                            selected.capacity,
                            &plan->index_count,
                            selected.indices,
                            codec.index.parameters,
                            stages.value->bits_per_value(codec.value.parameters),
                            &encoding.inputs->policy_key,
                            SectionOut{},
                            selected.capacity,
                            &plan->index_count,
                            selected.indices,
                            false};
  const uint64_t index_capacity =
      always_all ? 0 : stages.index->section_capacity(d, selected.capacity, codec.index.parameters);
  if (!always_all && !reorders) {
    if (stages.index->decoded_capacity != nullptr)
      index.decoded_capacity =
          stages.index->decoded_capacity(d, selected.capacity, codec.index.parameters);
    encode_indices(device, *stages.index, index, index_capacity);
    if (index.decoded != selected.indices) {
      const uint32_t capacity = std::max(index.decoded_capacity, selected.capacity);
      uint32_t* count = device.array<uint32_t>(1);
      uint32_t* indices = device.array<uint32_t>(capacity);
      float* values = device.array<float>(capacity);
      launch_elementwise<settle>(device, blocks_for(capacity), plan, sum, selected.count,
                                 selected.indices, selected.values, index.decoded_count,
                                 index.decoded, index.values_stay, count, indices, values,
                                 device.result());
      sent = {capacity, count, indices, values};
    }
  }

  float* decoded = device.array<float>(sent.capacity);
  uint32_t* order = sorts ? device.array<uint32_t>(sent.capacity) : nullptr;
  parts.value =
      section_of(device, stages.value->section_capacity(sent.capacity, codec.value.parameters));
  DeviceValueEncoding value{sent.capacity,
                            sent.count,
                            sent.values,
                            codec.value.parameters,
                            &encoding.inputs->rounding_key,
                            parts.value,
                            decoded,
                            order};
  stages.value->encode(device, value);
  if (reorders) {
    uint32_t* reordered = device.array<uint32_t>(selected.capacity);
    launch_elementwise<reorder>(device, blocks_for(selected.capacity), plan, selected.indices,
                                order, reordered);
    index.indices = index.decoded = reordered;
    encode_indices(device, *stages.index, index, index_capacity);
  }
  if (sorts && (!reorders || maybe_all)) {
    parts.order = section_of(device, order_capacity(sent.capacity));
    write_order(device, order, sent.count, sent.capacity, parts.order);
  }
  parts.index = index.section;
  make_plan(device, parts, d, encoding.dtype, sent.count, plan);
  assemble(device, parts, sum, d, encoding.dtype, plan, encoding.payload);
  remember_rest(device, codec, encoding, plan, sent.indices, decoded, sent.capacity);
}

}  // namespace cuda
}  // namespace deepreduce
