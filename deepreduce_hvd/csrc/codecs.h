// The contracts of the stages and the tables that name them. A codec is one .cc file and one row in
// stages.def.
#ifndef DEEPREDUCE_CODECS_H
#define DEEPREDUCE_CODECS_H

#include "base.h"

namespace deepreduce {

// What is selected: `count` elements, indices ascending (null: all of 0..d-1, count == d).
struct Selection {
  uint32_t count = 0;
  const uint32_t* indices = nullptr;
  const float* values = nullptr;  // (count,) the accumulated gradient there
};

struct IndexEncoding {
  uint32_t d;
  uint32_t count;
  const uint32_t* indices;   // (count,) ascending, unless the codec keeps any order
  const double* parameters;  // of the stage
  double value_bits;         // what one more value costs in the payload, for fpr="auto"
  uint64_t key;              // of Purpose::bloom_policy
  // Out, for a codec that is not lossless: what the receiver will derive. Lossless codecs leave
  // these alone.
  uint32_t decoded_count;
  const uint32_t* decoded;  // (decoded_count,) ascending
  // the values stay those of `indices`, position by position (the naive policy)
  bool values_stay;
};

struct IndexCodec {
  int id;
  const char* name;
  bool any_order;  // can carry indices in any order, so that an order mapping costs nothing
  void (*encode)(Context&, IndexEncoding&, ByteWriter& section);
  // Fills indices (count,), all < d, distinct, ascending unless any_order; the section is consumed
  // exactly.
  void (*decode)(Context&, ByteReader& section, uint32_t d, uint32_t count, uint32_t* indices);
};

struct ValueEncoding {
  uint32_t count;
  const float* values;       // (count,) finite
  const double* parameters;  // of the stage
  uint64_t key;              // of Purpose::rounding
  float* decoded;            // out, (count,): what values[i] decodes to, at its own position i
  // out, (count,) when the codec sorts: order[j] = position in `values` of the j-th value sent
  uint32_t* order;
};

struct ValueCodec {
  int id;
  const char* name;
  bool sorts;  // sends the values in an order of its own
  // an estimate for planning, order mapping not counted
  double (*bits_per_value)(const double* parameters);
  void (*encode)(Context&, ValueEncoding&, ByteWriter& section);
  // Fills values (count,) in the order sent; the section is consumed exactly.
  void (*decode)(Context&, ByteReader& section, uint32_t count, float* values);
};

// Null when there is no such id.
const IndexCodec* find_index_codec(int id);
const ValueCodec* find_value_codec(int id);

// In a table of codecs.
template <class Codec, int count>
const Codec* find_codec(const Codec* const (&table)[count], int id) {
  for (const Codec* codec : table)
    if (codec->id == id) return codec;
  return nullptr;
}

// A row of the table of stages, null past the last one.
const dr_stage_row* stage_row(uint32_t number);

enum SparsifierId : int {
#define DR_SPARSIFIER(id, Name, file, where, ...) k##Name = id,
#include "stages.def"
};
enum MemoryId : int {
#define DR_MEMORY(id, Name, file, where, ...) k##Name = id,
#include "stages.def"
};
enum IndexId : int {
  kAllIndices = 0,  // of a payload that carries all elements
#define DR_INDEX_CODEC(id, Name, file, where, ...) k##Name = id,
#include "stages.def"
};
enum ValueId : int {
#define DR_VALUE_CODEC(id, Name, file, where, ...) k##Name = id,
#include "stages.def"
};

}  // namespace deepreduce
#endif
