// The tables of codecs: one row each, one .cc file each.
#include "codecs.h"

namespace deepreduce {

extern const IndexCodec raw_index_codec;
extern const IndexCodec bitmap_codec;
extern const IndexCodec rle_codec;
extern const IndexCodec huffman_codec;
extern const IndexCodec rice_codec;
extern const IndexCodec elias_fano_codec;
extern const IndexCodec bloom_codec;
extern const ValueCodec raw_value_codec;
extern const ValueCodec float16_codec;
extern const ValueCodec bfloat16_codec;
extern const ValueCodec deflate_codec;
extern const ValueCodec qsgd_codec;
extern const ValueCodec fit_poly_codec;
extern const ValueCodec fit_dexp_codec;
extern const ValueCodec quantile_codec;

namespace {
const IndexCodec* const index_codecs[] = {
    &raw_index_codec,
    &bitmap_codec,
    &rle_codec,
    &huffman_codec,
    &rice_codec,
    &elias_fano_codec,
    &bloom_codec,
};
const ValueCodec* const value_codecs[] = {
    &raw_value_codec,
    &float16_codec,
    &bfloat16_codec,
    &deflate_codec,
    &qsgd_codec,
    &fit_poly_codec,
    &fit_dexp_codec,
    &quantile_codec,
};
}  // namespace

const IndexCodec* find_index_codec(int id) { return find_codec(index_codecs, id); }
const ValueCodec* find_value_codec(int id) { return find_codec(value_codecs, id); }

}  // namespace deepreduce
