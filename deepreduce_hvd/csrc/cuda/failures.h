// What kernels refuse. Each row: name, status, text; the text is printed with (expected, got) as unsigned long long, in that order.
#ifndef DEEPREDUCE_CUDA_FAILURES_H
#define DEEPREDUCE_CUDA_FAILURES_H

#include "deepreduce_cuda.h"

#define DR_CUDA_FAILURES(row)                                                                                                                    \
  row(index_section_bytes, DR_CORRUPT_PAYLOAD, "index section: expected %llu bytes, got %llu")                                                   \
  row(value_section_bytes, DR_CORRUPT_PAYLOAD, "value section: expected %llu bytes, got %llu")                                                   \
  row(order_section_bytes, DR_CORRUPT_PAYLOAD, "order section: expected %llu bytes, got %llu")                                                   \
  row(index_beyond_d, DR_CORRUPT_PAYLOAD, "index section: expected an index below d = %llu, got %llu")                                           \
  row(index_twice, DR_CORRUPT_PAYLOAD, "index section: expected %llu distinct indices, got %llu twice")                                          \
  row(indices_not_ascending, DR_CORRUPT_PAYLOAD, "index section: expected ascending indices, got a successor of %llu that is %llu")              \
  row(set_bits, DR_CORRUPT_PAYLOAD, "index section: expected %llu set bits below d, got %llu or one at d or above")                              \
  row(not_finite_half, DR_CORRUPT_PAYLOAD, "value section: expected finite %llu-bit values, got NaN or Inf (%llx)")                              \
  row(not_a_permutation, DR_CORRUPT_PAYLOAD, "order section: expected a permutation of %llu positions, got %llu twice or beyond them")             \
  row(padding, DR_CORRUPT_PAYLOAD, "section: expected zero padding and the end of %llu bits, got a last byte of %llu")

namespace deepreduce {
namespace cuda {

enum class Refused : int32_t {
  nothing,
#define DR_NAME(name, status, text) name,
  DR_CUDA_FAILURES(DR_NAME)
#undef DR_NAME
};

}  // namespace cuda
}  // namespace deepreduce
#endif
