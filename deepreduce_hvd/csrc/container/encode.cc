// The implementation of dr_encode: error feedback and selection, index codec, value codec, payload.
#include "container/encode.h"

#include <algorithm>

#include "api/arguments.h"
#include "container/order.h"
#include "container/payload.h"
#include "select/element.h"
#include "select/select.h"
#include "support/half.h"
#include "support/random.h"

namespace deepreduce {
namespace {

void finish(dr_context* caller, const Context& context, const Payload& payload) {
  expect_section_lengths(payload);
  void* out = caller->output(caller->user, static_cast<size_t>(payload.total_bytes()));
  if (out == nullptr) Arena::out_of_memory(payload.total_bytes(), 1);
  write_payload(context.simd, payload, static_cast<uint8_t*>(out));
}

void put_values(Payload& payload, const ValueCodec& codec, ByteWriter& section) {
  payload.value_id = static_cast<uint8_t>(codec.id);
  payload.values = section.data();
  payload.value_bytes = section.size();
}

// The tensor to encode.
class Source {
 public:
  virtual ~Source() = default;
  // values[i] = the element at indices[i] (at i if indices is null); indices are ascending
  virtual void gather(const uint32_t* indices, uint32_t count, float* values) const = 0;
};

class Accumulated final : public Source {
 public:
  explicit Accumulated(const dr_encoding& encoding) : encoding_(encoding) {}
  void gather(const uint32_t* indices, uint32_t count, float* values) const override {
    gather_accumulated(encoding_, indices, count, values);
  }

 private:
  const dr_encoding& encoding_;
};

// A tensor that is 0 except at given indices.
class Given final : public Source {
 public:
  Given(const uint32_t* indices, const float* values, uint32_t count)
      : indices_(indices), values_(values), count_(count) {}
  void gather(const uint32_t* indices, uint32_t count, float* values) const override {
    if (indices == nullptr) {
      for (uint32_t i = 0; i < count; ++i) values[i] = 0;
      for (uint32_t i = 0; i < count_; ++i) values[indices_[i]] = values_[i];
      return;
    }
    uint32_t g = 0;
    for (uint32_t i = 0; i < count; ++i) {
      while (g < count_ && indices_[g] < indices[i]) ++g;
      values[i] = g < count_ && indices_[g] == indices[i] ? values_[g] : 0.0f;
    }
  }

 private:
  const uint32_t* indices_;
  const float* values_;
  uint32_t count_;
};

// Writes every element in the gradient's own precision, for when compression does not reduce the
// size.
void pack_dense(Context& context, const Source& source, Payload& payload, ByteWriter& section,
                Selection& sent) {
  const uint32_t d = payload.d;
  const int dtype = payload.dtype;
  float* values = context.arena.array<float>(d);
  float* decoded = context.arena.array<float>(d);
  source.gather(nullptr, d, values);
  const int id = dtype == DR_FLOAT16 ? kFloat16 : dtype == DR_BFLOAT16 ? kBFloat16 : kRawValue;
  const double none[DR_STAGE_PARAMETERS] = {};
  ValueEncoding value{d, values, none, 0, decoded, nullptr};
  const ValueCodec* codec = find_value_codec(id);
  codec->encode(context, value, section);
  payload = Payload{};
  payload.d = payload.count = d;
  payload.dtype = static_cast<uint8_t>(dtype);
  put_values(payload, *codec, section);
  sent = {d, nullptr, decoded};
}

uint64_t dense_bytes(const Payload& payload) {
  return kHeaderBytes + payload.d * dense_element_bytes(payload.dtype);
}

struct Stages {
  const IndexCodec* index;
  const ValueCodec* value;
};

Stages stages_of(const dr_codec& codec) {
  const Stages stages{find_index_codec(codec.index.id), find_value_codec(codec.value.id)};
  if (stages.value == nullptr) unknown_codec("value codec: got the unknown id %d", codec.value.id);
  if (stages.index == nullptr) unknown_codec("index codec: got the unknown id %d", codec.index.id);
  return stages;
}

// Encodes the elements selected from `source`. payload: d and dtype are set before. Returns the
// elements that the payload decodes to.
Selection pack(Context& context, const dr_codec& codec, const Stages& stages,
               const dr_position& position, const Source& source, const Selection& selected,
               Payload& payload) {
  const IndexCodec* index_codec = stages.index;
  const ValueCodec* value_codec = stages.value;
  Arena& arena = context.arena;
  ByteWriter index_section(arena), value_section(arena), order_section(arena);
  const bool all = selected.indices == nullptr || selected.count == payload.d;
  const bool reorder_indices = !all && value_codec->sorts && index_codec->any_order;
  // Raw indices and values are used as sections without a copy, which would take longer than the
  // rest of their encoding.
  const bool raw_index = !all && !reorder_indices && index_codec->id == kRawIndex;
  const bool raw_values = !all && value_codec->id == kRawValue;
  Selection sent = selected;
  if (all) {
    sent.indices = nullptr;
  } else {
    payload.index_id = static_cast<uint8_t>(index_codec->id);
  }

  IndexEncoding index{payload.d,
                      selected.count,
                      selected.indices,
                      codec.index.parameters,
                      value_codec->bits_per_value(codec.value.parameters),
                      random_key(position, Purpose::bloom_policy),
                      selected.count,
                      selected.indices,
                      false};
  if (!all && !reorder_indices && !raw_index) {
    index_codec->encode(context, index, index_section);
    if (index.decoded != selected.indices) {
      sent.count = index.decoded_count;
      sent.indices = index.decoded;
      if (!index.values_stay) {
        float* values = arena.array<float>(sent.count);
        source.gather(sent.indices, sent.count, values);
        sent.values = values;
      }
    }
  }
  payload.count = sent.count;

  uint32_t* order = value_codec->sorts ? arena.array<uint32_t>(sent.count) : nullptr;
  if (raw_values) {
    payload.value_id = kRawValue;
    payload.values = reinterpret_cast<const uint8_t*>(sent.values);
    payload.value_bytes = uint64_t{4} * sent.count;
  } else {
    float* decoded = arena.array<float>(sent.count);
    ValueEncoding value{
        sent.count, sent.values, codec.value.parameters, random_key(position, Purpose::rounding),
        decoded,    order};
    value_codec->encode(context, value, value_section);
    put_values(payload, *value_codec, value_section);
    sent.values = decoded;
  }
  if (reorder_indices) {
    uint32_t* reordered = arena.array<uint32_t>(sent.count);
    for (uint32_t j = 0; j < sent.count; ++j) reordered[j] = sent.indices[order[j]];
    index.indices = reordered;
    index_codec->encode(context, index, index_section);
    payload.order = kIndicesInValueOrder;
  } else if (value_codec->sorts) {
    write_order(order, sent.count, order_section);
    payload.order = kPermutation;
  }
  payload.index = raw_index ? reinterpret_cast<const uint8_t*>(sent.indices) : index_section.data();
  payload.index_bytes = raw_index ? uint64_t{4} * sent.count : index_section.size();
  payload.order_map = order_section.data();
  payload.order_bytes = order_section.size();

  if (payload.total_bytes() > dense_bytes(payload)) {
    value_section.shrink_to(0);
    pack_dense(context, source, payload, value_section, sent);
  }
  return sent;
}

float* output_floats(dr_context* context, uint64_t bytes) {
  void* out = context->output(context->user, static_cast<size_t>(bytes));
  if (out == nullptr && bytes != 0) Arena::out_of_memory(bytes, 1);
  return static_cast<float*>(out);
}

bool all_finite(const float* values, uint64_t count) {
  uint32_t largest = 0;
  for (uint64_t i = 0; i < count; ++i) largest = std::max(largest, magnitude_bits(values[i]));
  return largest < 0x7F800000u;
}

// Writes the error of the payload to encoding.values, and finds the elements that a lossy index
// codec added.
void write_back(Arena& arena, const Selection& sent, dr_sparse_encoding& encoding) {
  float* values = encoding.values;
  if (sent.indices == encoding.indices) {
    for (uint64_t i = 0; i < encoding.count; ++i)
      values[i] = without(values[i], 1.0f, sent.values[i]);
    return;
  }
  uint32_t* added = arena.array<uint32_t>(sent.count);
  float* lacks = arena.array<float>(sent.count);
  uint64_t g = 0;
  for (uint32_t j = 0; j < sent.count; ++j) {
    const uint32_t at = sent.indices == nullptr ? j : sent.indices[j];
    while (g < encoding.count && encoding.indices[g] < at) ++g;
    if (g < encoding.count && encoding.indices[g] == at) {
      values[g] = without(values[g], 1.0f, sent.values[j]);
    } else if (sent.values[j] != 0) {
      added[encoding.added_count] = at;
      lacks[encoding.added_count++] = -sent.values[j];
    }
  }
  encoding.added_indices = added;
  encoding.added_values = lacks;
}

}  // namespace

void encode(dr_context* caller, Context& context, const dr_codec& codec, dr_encoding& encoding) {
  check_gradient(codec, encoding.d, encoding.dtype, encoding.residual != nullptr,
                 encoding.velocity != nullptr);
  const Stages stages = stages_of(codec);
  Payload payload;
  payload.d = static_cast<uint32_t>(encoding.d);
  payload.dtype = static_cast<uint8_t>(encoding.dtype);
  Selection selected;
  if (!accumulate_and_select(context, codec, encoding, selected)) {
    payload.flags = kNonFinite;
    encoding.count = 0;
    finish(caller, context, payload);
    return;
  }
  const Selection sent =
      pack(context, codec, stages, encoding.position, Accumulated(encoding), selected, payload);
  encoding.count = sent.count;
  finish(caller, context, payload);
  remember_rest(context, codec, encoding, sent);
}

void encode_sparse(dr_context* caller, Context& context, const dr_codec& codec,
                   dr_sparse_encoding& encoding) {
  if (encoding.d > kMaxElements)
    invalid_argument("d: expected at most %llu, got %llu",
                     static_cast<unsigned long long>(kMaxElements),
                     static_cast<unsigned long long>(encoding.d));
  if (encoding.dtype < DR_FLOAT32 || encoding.dtype > DR_FLOAT64)
    invalid_argument("dtype: expected 0 to 3, got %d", encoding.dtype);
  check_given(encoding.indices, encoding.count, encoding.d);
  const Stages stages = stages_of(codec);
  encoding.added_count = 0;
  Payload payload;
  payload.d = static_cast<uint32_t>(encoding.d);
  payload.dtype = static_cast<uint8_t>(encoding.dtype);
  if (!all_finite(encoding.values, encoding.count)) {
    payload.flags = kNonFinite;
    finish(caller, context, payload);
    return;
  }
  static const uint32_t nothing = 0;
  const uint32_t count = static_cast<uint32_t>(encoding.count);
  // a selection with null indices would mean all elements
  if (count == 0) encoding.indices = &nothing;
  const Selection given{count, encoding.indices, encoding.values};
  const Selection sent = pack(context, codec, stages, encoding.position,
                              Given(encoding.indices, encoding.values, count), given, payload);
  finish(caller, context, payload);
  if (encoding.write_back != 0) write_back(context.arena, sent, encoding);
}

bool select_elements(dr_context* caller, Context& context, const dr_codec& codec,
                     dr_encoding& encoding, const uint32_t* given, uint64_t given_count) {
  check_gradient(codec, encoding.d, encoding.dtype, encoding.residual != nullptr,
                 encoding.velocity != nullptr);
  Selection selected;
  if (given != nullptr) check_given(given, given_count, encoding.d);
  encoding.count = 0;
  if (given != nullptr ? !accumulate_and_take(context, codec, encoding, given,
                                              static_cast<uint32_t>(given_count), selected)
                       : !accumulate_and_select(context, codec, encoding, selected)) {
    output_floats(caller, 0);
    return false;
  }
  encoding.count = selected.count;
  float* out = output_floats(caller, uint64_t{8} * selected.count);
  for (uint32_t i = 0; i < selected.count; ++i) {
    const uint32_t at = selected.indices == nullptr ? i : selected.indices[i];
    std::memcpy(out + i, &at, 4);
  }
  if (selected.count != 0)
    std::memcpy(out + selected.count, selected.values, uint64_t{4} * selected.count);
  // the values may be in the residual, which changes next
  selected.values = out + selected.count;
  remember_rest(context, codec, encoding, selected);
  return true;
}

}  // namespace deepreduce
