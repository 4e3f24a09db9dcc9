// The tables of codecs on the device. Those that stay on the host, and why: Deflate (zlib's streams are sequential), Huffman (codes of one stream,
// small sections), Quantile and RLE (sequential by their format).
#include "codecs.cuh"

namespace deepreduce {
namespace cuda {

extern const DeviceIndexCodec raw_index_device_codec;
extern const DeviceIndexCodec bitmap_device_codec;
extern const DeviceIndexCodec rice_device_codec;
extern const DeviceIndexCodec elias_fano_device_codec;
extern const DeviceIndexCodec bloom_device_codec;
extern const DeviceValueCodec raw_value_device_codec;
extern const DeviceValueCodec float16_device_codec;
extern const DeviceValueCodec bfloat16_device_codec;
extern const DeviceValueCodec qsgd_device_codec;
extern const DeviceValueCodec fit_poly_device_codec;
extern const DeviceValueCodec fit_dexp_device_codec;

namespace {
const DeviceIndexCodec* const index_codecs[] = {
    &raw_index_device_codec,
    &bitmap_device_codec,
    &rice_device_codec,
    &elias_fano_device_codec,
    &bloom_device_codec,
};
const DeviceValueCodec* const value_codecs[] = {
    &raw_value_device_codec,
    &float16_device_codec,
    &bfloat16_device_codec,
    &qsgd_device_codec,
    &fit_poly_device_codec,
    &fit_dexp_device_codec,
};
}  // namespace

const DeviceIndexCodec* find_device_index_codec(int id) { return find_codec(index_codecs, id); }
const DeviceValueCodec* find_device_value_codec(int id) { return find_codec(value_codecs, id); }

}  // namespace cuda
}  // namespace deepreduce
