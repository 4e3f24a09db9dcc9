// The work behind dr_encode and dr_decode_*, with failures thrown.
#ifndef DEEPREDUCE_ENCODE_H
#define DEEPREDUCE_ENCODE_H

#include "codecs.h"

namespace deepreduce {

void encode(dr_context* caller, Context& context, const dr_codec& codec, dr_encoding& encoding);
void decode_sum(Context& context, const uint8_t* payload, uint64_t size, float* out, uint64_t d, float scale);
void decode_sparse(dr_context* caller, Context& context, const uint8_t* const* payloads, const uint64_t* sizes,
                   uint64_t payload_count, uint64_t d, float scale);

}  // namespace deepreduce
#endif
