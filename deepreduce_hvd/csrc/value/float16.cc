// Float16: value/half_values.h with the format Float16Format.
#include "value/half_values.h"

namespace deepreduce {

extern const ValueCodec float16_codec;
const ValueCodec float16_codec = HalfValues<Float16Format>::codec(kFloat16, "Float16");

}  // namespace deepreduce
