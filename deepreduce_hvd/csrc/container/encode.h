// The implementation of dr_encode and dr_decode_*, which throws failures.
#ifndef DEEPREDUCE_ENCODE_H
#define DEEPREDUCE_ENCODE_H

#include "codecs.h"
#include "support/half.h"

namespace deepreduce {

// Tracks the largest magnitude of its inputs; NaN is larger than Inf.
class Largest {
 public:
  DR_ELEMENT void take(float value) {
    const int32_t bits = static_cast<int32_t>(magnitude_bits(value));
    bits_ = bits > bits_ ? bits : bits_;
  }
  float magnitude() const { return bits_float(static_cast<uint32_t>(bits_)); }

 private:
  int32_t bits_ = 0;
};

void encode(dr_context* caller, Context& context, const dr_codec& codec, dr_encoding& encoding);
void encode_sparse(dr_context* caller, Context& context, const dr_codec& codec,
                   dr_sparse_encoding& encoding);
// Returns false if the gradient is not finite.
bool select_elements(dr_context* caller, Context& context, const dr_codec& codec,
                     dr_encoding& encoding, const uint32_t* given, uint64_t given_count);
void decode_sum(Context& context, const uint8_t* payload, uint64_t size, float* out, uint64_t d,
                float scale, Largest& largest);
void decode_sparse(dr_context* caller, Context& context, const uint8_t* const* payloads,
                   const uint64_t* sizes, uint64_t payload_count, uint64_t d, float scale);

}  // namespace deepreduce
#endif
