// Checks of encoder arguments, shared by host and device.
#ifndef DEEPREDUCE_ARGUMENTS_H
#define DEEPREDUCE_ARGUMENTS_H

#include "base.h"

namespace deepreduce {

// Makes a codec from its numbers; throws if there are more or fewer than DR_CODEC_FIELDS.
dr_codec codec_of(const double* fields, uint64_t field_count);

// Throws unless the gradient can be encoded and the arrays that the memory needs are there.
void check_gradient(const dr_codec& codec, uint64_t d, int dtype, bool has_residual,
                    bool has_velocity);

// Throws unless the parameters of sparsifier and memory are in range.
void check_selection(const dr_codec& codec);

// Returns k of TopK and RandomK: at least 1 and at most d.
uint32_t kept_count(const dr_stage& sparsifier, uint64_t d);

}  // namespace deepreduce
#endif
