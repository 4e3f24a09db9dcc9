// Error feedback and selection: the only passes over the whole gradient.
#ifndef DEEPREDUCE_SELECT_H
#define DEEPREDUCE_SELECT_H

#include "codecs.h"

namespace deepreduce {

// Adds the gradient to what the memory keeps (encoding.residual, encoding.velocity) and selects
// from the sum. A sum beyond float32 saturates at its largest finite value. Zeros are never
// selected, except by NoneSparsifier and RandomK. encoding.threshold comes out as the k-th
// magnitude of TopK; other sparsifiers leave it alone. Returns false, with the memory untouched,
// when the gradient holds NaN or Inf.
bool accumulate_and_select(Context& context, const dr_codec& codec, dr_encoding& encoding,
                           Selection& selection);

// The same for (count,) given ascending distinct indices in place of the sparsifier's choice.
bool accumulate_and_take(Context& context, const dr_codec& codec, dr_encoding& encoding,
                         const uint32_t* given, uint32_t count, Selection& selection);

// Throws unless the indices are ascending, distinct and below d.
void check_given(const uint32_t* indices, uint64_t count, uint64_t d);

// values[i] = the accumulated gradient at indices[i] (null: at i).
void gather_accumulated(const dr_encoding& encoding, const uint32_t* indices, uint32_t count,
                        float* values);

// Leaves in the memory what the payload does not carry: `sent` is what it decodes to.
void remember_rest(Context& context, const dr_codec& codec, dr_encoding& encoding,
                   const Selection& sent);

}  // namespace deepreduce
#endif
