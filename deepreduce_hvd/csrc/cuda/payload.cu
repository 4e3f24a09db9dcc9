#include "cuda/payload.cuh"

#include "cuda/algorithms.cuh"

namespace deepreduce {
namespace cuda {
namespace {

__device__ void plan_sections(Parts parts, uint32_t d, int dtype, const uint32_t* count, Plan* plan,
                              dr_cuda_result* result) {
  Header header;
  header.value_id = static_cast<uint8_t>(parts.value_id);
  plan->count = *count;
  for (uint64_t& length : plan->lengths) length = 0;
  if (refused(result)) {
    plan->dense = plan->all = 0;
    plan->total = 0;
    return;
  }
  if (result->non_finite != 0) {
    plan->dense = plan->all = plan->count = 0;
    header.flags = kNonFinite;
    header.value_id = 0;
  } else {
    header.order = plan->all != 0 ? parts.order_kind_of_all : parts.order_kind;
    if (plan->all == 0) {
      header.index_id = static_cast<uint8_t>(parts.index_id);
      plan->lengths[0] = *parts.index.bytes;
    }
    plan->lengths[1] = *parts.value.bytes;
    if (header.order == kPermutation) plan->lengths[2] = *parts.order.bytes;
    const uint64_t dense_bytes = d * dense_element_bytes(dtype);
    plan->dense = plan->lengths[0] + plan->lengths[1] + plan->lengths[2] > dense_bytes;
    if (plan->dense != 0) {
      plan->count = d;
      plan->lengths[0] = plan->lengths[2] = 0;
      plan->lengths[1] = dense_bytes;
      header.index_id = 0;
      header.order = kAscending;
      header.value_id = static_cast<uint8_t>(dtype == DR_FLOAT16    ? kFloat16
                                             : dtype == DR_BFLOAT16 ? kBFloat16
                                                                    : kRawValue);
    }
  }
  plan->total = kHeaderBytes;
  for (const uint64_t length : plan->lengths) {
    if (length > UINT32_MAX) refuse(result, Refused::section_too_long, UINT32_MAX, length);
    plan->total += length;
  }
  if (refused(result)) plan->total = 0;
  header.d = d;
  header.dtype = static_cast<uint8_t>(dtype);
  header.count = plan->count;
  header.index_bytes = plan->lengths[0];
  header.value_bytes = plan->lengths[1];
  header.order_bytes = plan->lengths[2];
  store_header(header, plan->header);
  plan->checksum = 0;
}

// Returns 8 bytes at `at`. The memory must be aligned to 8 bytes and readable up to the end of the
// last word.
__device__ uint64_t load_aligned(const uint8_t* data, uint64_t at) {
  const uint64_t* words = reinterpret_cast<const uint64_t*>(data) + at / 8;
  const unsigned shift = static_cast<unsigned>(at % 8) * 8;
  return shift == 0 ? words[0] : words[0] >> shift | words[1] << (64 - shift);
}

// Returns 8 bytes at `at` of the concatenated sections, with zeros beyond their end.
__device__ uint64_t section_word(const Parts& parts, const Plan* plan, uint64_t at) {
  const uint8_t* const data[3] = {parts.index.data, parts.value.data, parts.order.data};
  uint64_t start = 0, word = 0;
  for (int s = 0; s < 3; ++s) {
    const uint64_t end = start + plan->lengths[s];
    if (at >= start && at + 8 <= end) return load_aligned(data[s], at - start);
    for (uint64_t byte = at < start ? start : at; byte < end && byte < at + 8; ++byte)
      word |= static_cast<uint64_t>(data[s][byte - start]) << (8 * (byte - at));
    start = end;
  }
  return word;
}

// Returns 8 bytes at 8 * `at` of the dense tensor.
__device__ uint64_t dense_word(const Accumulated& sum, uint32_t d, int dtype, uint64_t at) {
  const uint32_t each = 8 / static_cast<uint32_t>(dense_element_bytes(dtype));
  uint64_t word = 0;
  for (uint32_t i = 0; i < each && at * each + i < d; ++i) {
    const float value = sum.at(at * each + i);
    const uint64_t bits = dtype == DR_FLOAT16    ? float_to_float16(value)
                          : dtype == DR_BFLOAT16 ? float_to_bfloat16(value)
                                                 : float_bits(value);
    word |= bits << (64 / each * i);
  }
  return word;
}

__device__ void write_words(Parts parts, Accumulated sum, uint32_t d, int dtype, Plan* plan,
                            uint8_t* payload) {
  __shared__ uint64_t shared[33];
  constexpr uint64_t kFirstWord = kHeaderBytes / 8;  // of the sections
  const uint64_t total = plan->total, words = (total + 7) / 8;
  uint64_t terms = 0;
  for (uint64_t i = grid_index(); i < words; i += grid_stride()) {
    const uint64_t word = i < kHeaderWords   ? plan->header[i]
                          : i < kFirstWord   ? 0
                          : plan->dense != 0 ? dense_word(sum, d, dtype, i - kFirstWord)
                                             : section_word(parts, plan, 8 * (i - kFirstWord));
    terms += checksum_term(word, i);
    if (8 * i + 8 <= total) {
      reinterpret_cast<uint64_t*>(payload)[i] = word;
    } else {
      for (uint64_t byte = 8 * i; byte < total; ++byte)
        payload[byte] = static_cast<uint8_t>(word >> (8 * (byte - 8 * i)));
    }
  }
  add_block_sum(terms, shared, &plan->checksum);
}

__device__ void seal(const Plan* plan, uint8_t* payload, dr_cuda_result* result) {
  result->payload_bytes = plan->total;
  result->count = plan->total != 0 ? plan->count : 0;
  if (plan->total != 0) reinterpret_cast<uint64_t*>(payload)[kChecksumOffset / 8] = plan->checksum;
}

// Updates the memory where the payload has a value.
__device__ void forget_at(const Plan* plan, const uint32_t* indices, const float* sent,
                          float* residual, float* velocity, float weight) {
  for (uint32_t j = grid_index(); j < plan->count; j += grid_stride()) {
    const uint32_t i = indices[j];
    residual[i] = without(residual[i], weight, sent[j]);
    if (velocity != nullptr) velocity[i] = 0.0f;
  }
}

// Updates the memory. If the payload has all elements, updates everything. Otherwise, LowPass
// subtracts its share of the gradient here, and forget_sent runs next; other memories subtract the
// sent values.
template <class Number>
__device__ void forget(const Plan* plan, const Inputs* inputs, uint32_t d, int dtype,
                       const uint32_t* indices, const float* sent, float* residual, float* velocity,
                       float weight, const dr_cuda_result* result) {
  if (result->non_finite != 0 || refused(result)) return;
  const bool all = plan->all != 0 || plan->dense != 0;
  const float rest = 1.0f - weight;
  if (!all && weight == 1.0f) return forget_at(plan, indices, sent, residual, velocity, weight);
  const auto* gradient = static_cast<const typename Number::Storage*>(inputs->gradient);
  for (uint32_t i = grid_index(); i < d; i += grid_stride()) {
    const float sum = residual[i];
    float kept = weight == 1.0f ? sum : without(sum, rest, Number::to_float(gradient[i]));
    if (all) {
      kept = without(kept, weight, plan->dense != 0 ? as_carried(sum, dtype) : sent[i]);
      if (velocity != nullptr) velocity[i] = 0.0f;
    }
    residual[i] = kept;
  }
}

__device__ void forget_sent(const Plan* plan, const uint32_t* indices, const float* sent,
                            float* residual, float* velocity, float weight,
                            const dr_cuda_result* result) {
  if (result->non_finite != 0 || refused(result) || plan->all != 0 || plan->dense != 0) return;
  forget_at(plan, indices, sent, residual, velocity, weight);
}

}  // namespace

void make_plan(Device& device, const Parts& parts, uint32_t d, int dtype, const uint32_t* count,
               Plan* plan) {
  launch<plan_sections>(device, 1, 1, 0, parts, d, dtype, count, plan, device.result());
}

void assemble(Device& device, const Parts& parts, const Accumulated& sum, uint32_t d, int dtype,
              Plan* plan, uint8_t* payload) {
  const uint64_t sections = parts.index.capacity + parts.value.capacity + parts.order.capacity;
  const uint64_t most = std::min<uint64_t>(sections, d * dense_element_bytes(dtype)) + kHeaderBytes;
  device.set_payload_capacity(most);
  launch<write_words>(device, blocks_for((most + 7) / 8, 2), kThreads, 0, parts, sum, d, dtype,
                      plan, payload);
  launch<seal>(device, 1, 1, 0, plan, payload, device.result());
}

void remember_rest(Device& device, const dr_codec& codec, const Encoding& encoding,
                   const Plan* plan, const uint32_t* indices, const float* values,
                   uint32_t capacity) {
  if (codec.memory.id == kNoMemory) return;
  const float weight =
      codec.memory.id == kLowPass ? static_cast<float>(codec.memory.parameters[0]) : 1.0f;
  const uint32_t d = static_cast<uint32_t>(encoding.d);
  with_numbers(encoding.dtype, [&](auto number) {
    using Number = decltype(number);
    launch_elementwise<forget<Number>>(device, blocks_for(d, 4), plan, encoding.inputs, d,
                                       encoding.dtype, indices, values, encoding.residual,
                                       encoding.velocity, weight, device.result());
  });
  if (indices != nullptr && weight != 1.0f)
    launch_elementwise<forget_sent>(device, blocks_for(capacity), plan, indices, values,
                                    encoding.residual, encoding.velocity, weight, device.result());
}

}  // namespace cuda
}  // namespace deepreduce
