// The registries of codecs on the device, from the table of stages.
#include "cuda/codecs.cuh"

namespace deepreduce {
namespace cuda {

#define DR_HOST_ONLY(row)
#define DR_HOST_AND_DEVICE(row) row

#define DR_INDEX_CODEC(id, Name, file, where, ...) \
  where(extern const DeviceIndexCodec file##_device_codec;)
#define DR_VALUE_CODEC(id, Name, file, where, ...) \
  where(extern const DeviceValueCodec file##_device_codec;)
#include "stages.def"

// A comma cannot be passed as an argument of another macro.
#define DR_COMMA ,
namespace {
const DeviceIndexCodec* const index_codecs[] = {
#define DR_INDEX_CODEC(id, Name, file, where, ...) where(&file##_device_codec DR_COMMA)
#include "stages.def"
};
const DeviceValueCodec* const value_codecs[] = {
#define DR_VALUE_CODEC(id, Name, file, where, ...) where(&file##_device_codec DR_COMMA)
#include "stages.def"
};
}  // namespace

const DeviceIndexCodec* find_device_index_codec(int id) { return find_codec(index_codecs, id); }
const DeviceValueCodec* find_device_value_codec(int id) { return find_codec(value_codecs, id); }

}  // namespace cuda
}  // namespace deepreduce
