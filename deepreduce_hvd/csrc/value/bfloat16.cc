// BFloat16: value/half_values.h with the format BFloat16Format.
#include "value/half_values.h"

namespace deepreduce {

extern const ValueCodec bfloat16_codec;
const ValueCodec bfloat16_codec = HalfValues<BFloat16Format>::codec(kBFloat16, "BFloat16");

}  // namespace deepreduce
