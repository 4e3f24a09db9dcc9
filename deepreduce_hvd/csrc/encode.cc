// dr_encode's work: error feedback and selection, index codec, value codec, payload.
#include "encode.h"

#include "half.h"
#include "order.h"
#include "payload.h"
#include "random.h"
#include "select.h"

namespace deepreduce {
namespace {

void check(const dr_codec& codec, const dr_encoding& encoding) {
  if (encoding.d > kMaxElements)
    invalid_argument("gradient: expected at most %llu elements, got %llu; split the tensor",
                     static_cast<unsigned long long>(kMaxElements), static_cast<unsigned long long>(encoding.d));
  if (encoding.dtype < DR_FLOAT32 || encoding.dtype > DR_FLOAT64)
    invalid_argument("gradient dtype: expected 0 to 3, got %d", encoding.dtype);
  if (codec.memory.id < kNoMemory || codec.memory.id > kMomentumCorrection)
    unknown_codec("memory id: expected 0 to 3, got %d", codec.memory.id);
  if ((encoding.residual != nullptr) != (codec.memory.id != kNoMemory))
    invalid_argument("memory %d: expected %s residual", codec.memory.id, codec.memory.id == kNoMemory ? "no" : "a");
  if ((encoding.velocity != nullptr) != (codec.memory.id == kMomentumCorrection))
    invalid_argument("memory %d: expected %s velocity", codec.memory.id, codec.memory.id == kMomentumCorrection ? "a" : "no");
}

uint64_t key_of(const dr_encoding& encoding, Purpose purpose) {
  const dr_position& at = encoding.position;
  return random_key(at.seed, at.step, at.tensor, at.rank, purpose);
}

void finish(dr_context* context, const Payload& payload) {
  void* out = context->output(context->user, static_cast<size_t>(payload.total_bytes()));
  if (out == nullptr) Arena::out_of_memory(payload.total_bytes(), 1);
  write_payload(payload, static_cast<uint8_t*>(out));
}

void put_values(Payload& payload, const ValueCodec& codec, ByteWriter& section) {
  payload.value_id = static_cast<uint8_t>(codec.id);
  payload.values = section.data();
  payload.value_bytes = section.size();
}

// Every element in the gradient's own precision: what is sent when compression would not pay.
void encode_dense(Context& context, const dr_encoding& encoding, Payload& payload, ByteWriter& section, Selection& sent) {
  const uint32_t d = static_cast<uint32_t>(encoding.d);
  float* values = context.arena.array<float>(d);
  float* decoded = context.arena.array<float>(d);
  gather_accumulated(encoding, nullptr, d, values);
  const int id = encoding.dtype == DR_FLOAT16 ? kFloat16 : encoding.dtype == DR_BFLOAT16 ? kBFloat16 : kRawValue;
  const double none[DR_STAGE_PARAMETERS] = {};
  ValueEncoding value{d, values, none, 0, decoded, nullptr};
  const ValueCodec* codec = find_value_codec(id);
  codec->encode(context, value, section);
  payload = Payload{};
  payload.d = payload.count = d;
  put_values(payload, *codec, section);
  sent = {d, nullptr, decoded};
}

uint64_t dense_bytes(const dr_encoding& encoding) {
  const bool half = encoding.dtype == DR_FLOAT16 || encoding.dtype == DR_BFLOAT16;
  return kHeaderBytes + encoding.d * (half ? 2 : 4);
}

}  // namespace

void encode(dr_context* caller, Context& context, const dr_codec& codec, dr_encoding& encoding) {
  check(codec, encoding);
  const ValueCodec* value_codec = find_value_codec(codec.value.id);
  if (value_codec == nullptr) unknown_codec("value codec: got the unknown id %d", codec.value.id);
  const IndexCodec* index_codec = find_index_codec(codec.index.id);
  if (index_codec == nullptr) unknown_codec("index codec: got the unknown id %d", codec.index.id);

  Payload payload;
  payload.d = static_cast<uint32_t>(encoding.d);
  payload.dtype = static_cast<uint8_t>(encoding.dtype);
  Selection selected;
  if (!accumulate_and_select(context, codec, encoding, selected)) {
    payload.flags = kNonFinite;
    encoding.count = 0;
    finish(caller, payload);
    return;
  }

  Arena& arena = context.arena;
  ByteWriter index_section(arena), value_section(arena), order_section(arena);
  const bool all = selected.indices == nullptr || selected.count == payload.d;
  const bool reorder_indices = !all && value_codec->sorts && index_codec->any_order;
  // raw indices and values are sections as they lie in memory: copying them would cost more than the rest of their coding
  const bool raw_index = !all && !reorder_indices && index_codec->id == kRawIndex;
  const bool raw_values = !all && value_codec->id == kRawValue;
  Selection sent = selected;
  if (all) {
    sent.indices = nullptr;
  } else {
    payload.index_id = static_cast<uint8_t>(index_codec->id);
  }

  IndexEncoding index{payload.d, selected.count, selected.indices, codec.index.parameters,
                      value_codec->bits_a_value(codec.value.parameters), key_of(encoding, Purpose::bloom_policy),
                      selected.count, selected.indices, false};
  if (!all && !reorder_indices && !raw_index) {
    index_codec->encode(context, index, index_section);
    if (index.decoded != selected.indices) {
      sent.count = index.decoded_count;
      sent.indices = index.decoded;
      if (!index.values_stay) {
        float* values = arena.array<float>(sent.count);
        gather_accumulated(encoding, sent.indices, sent.count, values);
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
    ValueEncoding value{sent.count, sent.values, codec.value.parameters, key_of(encoding, Purpose::rounding), decoded, order};
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

  if (payload.total_bytes() > dense_bytes(encoding)) {
    value_section.shrink_to(0);
    encode_dense(context, encoding, payload, value_section, sent);
    payload.dtype = static_cast<uint8_t>(encoding.dtype);
  }
  encoding.count = sent.count;
  finish(caller, payload);
  remember_rest(context, codec, encoding, sent);
}

}  // namespace deepreduce
