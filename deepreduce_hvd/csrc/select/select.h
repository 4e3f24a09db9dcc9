// Error feedback and selection. These are the only passes over the whole gradient.
#ifndef DEEPREDUCE_SELECT_H
#define DEEPREDUCE_SELECT_H

#include "codecs.h"

namespace deepreduce {

// Adds the gradient to the memory (encoding.residual, encoding.velocity) and selects from the sum.
// A sum outside of float32 saturates at the largest finite value. Zeros are never selected, except
// by NoneSparsifier and RandomK. encoding.threshold becomes the k-th magnitude of TopK; other
// sparsifiers leave it unchanged. Returns false and leaves the memory unchanged if the gradient has
// NaN or Inf.
bool accumulate_and_select(Context& context, const dr_codec& codec, dr_encoding& encoding,
                           Selection& selection);

// The same, but selects the (count,) given ascending distinct indices.
bool accumulate_and_take(Context& context, const dr_codec& codec, dr_encoding& encoding,
                         const uint32_t* given, uint32_t count, Selection& selection);

// Throws unless the indices are ascending, distinct, at least `start` and below start + d.
void check_given(const uint32_t* indices, uint64_t count, uint64_t d, uint64_t start = 0);

// values[i] = the accumulated gradient at indices[i] (at i if indices is null).
void gather_accumulated(const dr_encoding& encoding, const uint32_t* indices, uint32_t count,
                        float* values);

// Updates the memory to what the payload does not contain; `sent` is the decoded payload.
void remember_rest(Context& context, const dr_codec& codec, dr_encoding& encoding,
                   const Selection& sent);

}  // namespace deepreduce
#endif
