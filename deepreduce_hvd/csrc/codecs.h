// The contracts of the stages and the tables that name them. A codec is one .cc file and one row in registry.cc.
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
  // Out, for a codec that is not lossless: what the receiver will derive. Lossless codecs leave these alone.
  uint32_t decoded_count;
  const uint32_t* decoded;   // (decoded_count,) ascending
  bool values_stay;          // the values stay those of `indices`, position by position (the naive policy)
};

struct IndexCodec {
  int id;
  const char* name;
  bool any_order;  // can carry indices in any order, so that an order mapping costs nothing
  void (*encode)(Context&, IndexEncoding&, ByteWriter& section);
  // Fills indices (count,), all < d, distinct, ascending unless any_order; the section is consumed exactly.
  void (*decode)(Context&, ByteReader& section, uint32_t d, uint32_t count, uint32_t* indices);
};

struct ValueEncoding {
  uint32_t count;
  const float* values;       // (count,) finite
  const double* parameters;  // of the stage
  uint64_t key;              // of Purpose::rounding
  float* decoded;            // out, (count,): what values[i] decodes to, at its own position i
  uint32_t* order;           // out, (count,) when the codec sorts: order[j] = position in `values` of the j-th value sent
};

struct ValueCodec {
  int id;
  const char* name;
  bool sorts;  // sends the values in an order of its own
  double (*bits_a_value)(const double* parameters);  // an estimate for planning, order mapping not counted
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

enum SparsifierId : int { kNoneSparsifier = 0, kTopK = 1, kRandomK = 2, kThreshold = 3, kChunkTopK = 4 };
enum MemoryId : int { kNoMemory = 0, kResidual = 1, kLowPass = 2, kMomentumCorrection = 3 };
enum IndexId : int { kAllIndices = 0, kRawIndex = 1, kBitmap = 2, kRLE = 3, kHuffman = 4, kRice = 5, kEliasFano = 6, kBloom = 7 };
enum ValueId : int {
  kRawValue = 1, kFloat16 = 2, kBFloat16 = 3, kDeflate = 4, kQSGD = 5, kFitPoly = 6, kFitDExp = 7, kQuantile = 8
};

}  // namespace deepreduce
#endif
