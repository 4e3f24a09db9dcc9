// The registries of codecs on the host, generated from the table of stages.
#include "codecs.h"

namespace deepreduce {

#define DR_INDEX_CODEC(id, Name, file, where, ...) extern const IndexCodec file##_codec;
#define DR_VALUE_CODEC(id, Name, file, where, ...) extern const ValueCodec file##_codec;
#include "stages.def"

namespace {
const IndexCodec* const index_codecs[] = {
#define DR_INDEX_CODEC(id, Name, file, where, ...) &file##_codec,
#include "stages.def"
};
const ValueCodec* const value_codecs[] = {
#define DR_VALUE_CODEC(id, Name, file, where, ...) &file##_codec,
#include "stages.def"
};

#define DR_HOST_ONLY 0
#define DR_HOST_AND_DEVICE 1
const dr_stage_row rows[] = {
#define DR_SPARSIFIER(id, Name, file, where, ...) \
  {"sparsifier", #Name, #file, where, {id, {__VA_ARGS__}}},
#define DR_INDEX_CODEC(id, Name, file, where, ...) \
  {"index", #Name, #file, where, {id, {__VA_ARGS__}}},
#define DR_VALUE_CODEC(id, Name, file, where, ...) \
  {"value", #Name, #file, where, {id, {__VA_ARGS__}}},
#define DR_MEMORY(id, Name, file, where, ...) {"memory", #Name, #file, where, {id, {__VA_ARGS__}}},
#include "stages.def"
};
}  // namespace

const IndexCodec* find_index_codec(int id) { return find_codec(index_codecs, id); }
const ValueCodec* find_value_codec(int id) { return find_codec(value_codecs, id); }
const dr_stage_row* stage_row(uint32_t number) {
  return number < sizeof(rows) / sizeof(rows[0]) ? &rows[number] : nullptr;
}

}  // namespace deepreduce
