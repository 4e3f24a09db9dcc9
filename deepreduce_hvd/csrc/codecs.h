// The interfaces of the stages, and the tables of the codecs. A codec is one .cc file and one row
// in stages.def.
#ifndef DEEPREDUCE_CODECS_H
#define DEEPREDUCE_CODECS_H

#include "base.h"

namespace deepreduce {

// The selected elements: `count` ascending indices (null: all of 0..d-1, count == d).
struct Selection {
  uint32_t count = 0;
  const uint32_t* indices = nullptr;
  const float* values = nullptr;  // (count,) accumulated gradient at the indices
};

struct IndexEncoding {
  uint32_t d;
  uint32_t count;
  const uint32_t* indices;   // (count,) ascending, unless the codec supports any order
  const double* parameters;  // of the stage
  double value_bits;         // bits per value in the payload, for fpr="auto"
  uint64_t key;              // of Purpose::bloom_policy
  // Outputs of a lossy codec: the indices that the receiver will decode. Lossless codecs leave them
  // unchanged.
  uint32_t decoded_count;
  const uint32_t* decoded;  // (decoded_count,) ascending
  // true: the values of `indices` are sent in place of those at `decoded` (the naive policy)
  bool values_stay;
};

struct IndexCodec {
  int id;
  const char* name;
  bool any_order;  // supports indices in any order, so no order mapping is needed
  void (*encode)(Context&, IndexEncoding&, ByteWriter& section);
  // Fills indices (count,): all < d, distinct, ascending unless any_order. Consumes the whole
  // section.
  void (*decode)(Context&, ByteReader& section, uint32_t d, uint32_t count, uint32_t* indices);
};

struct ValueEncoding {
  uint32_t count;
  const float* values;       // (count,) finite
  const double* parameters;  // of the stage
  uint64_t key;              // of Purpose::rounding
  float* decoded;            // out, (count,): decoded value of values[i], at position i
  // out, (count,), if the codec sorts: order[j] = position in `values` of the j-th value sent
  uint32_t* order;
};

struct ValueCodec {
  int id;
  const char* name;
  bool sorts;  // sends the values in another order
  // estimate for planning, without the order mapping
  double (*bits_per_value)(const double* parameters);
  void (*encode)(Context&, ValueEncoding&, ByteWriter& section);
  // Fills values (count,) in the order sent. Consumes the whole section.
  void (*decode)(Context&, ByteReader& section, uint32_t count, float* values);
};

// Returns null if there is no such id.
const IndexCodec* find_index_codec(int id);
const ValueCodec* find_value_codec(int id);

// Finds a codec in a table.
template <class Codec, int count>
const Codec* find_codec(const Codec* const (&table)[count], int id) {
  for (const Codec* codec : table)
    if (codec->id == id) return codec;
  return nullptr;
}

// Returns a row of the table of stages, or null past the last one.
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
  kAllIndices = 0,  // payload with all elements
#define DR_INDEX_CODEC(id, Name, file, where, ...) k##Name = id,
#include "stages.def"
};
enum ValueId : int {
#define DR_VALUE_CODEC(id, Name, file, where, ...) k##Name = id,
#include "stages.def"
};

}  // namespace deepreduce
#endif
