// What ranks do with partial sums: keep the largest elements, put lost ones back, add to a result.
#ifndef DEEPREDUCE_SELECT_SPARSE_H
#define DEEPREDUCE_SELECT_SPARSE_H

#include "codecs.h"
#include "container/encode.h"

namespace deepreduce {

// Reorders a sparse tensor: first its k largest elements by (|value|, smaller index first), then
// the rest, both in their old order.
void keep_largest(Context& context, const uint32_t* indices, const float* values, uint32_t count,
                  uint32_t k, uint32_t* new_indices, float* new_values);

// Returns values[i] to residual[indices[i] - start]; LowPass weights it. Zeros change nothing.
void put_back(const dr_stage& memory, const uint32_t* indices, const float* values, uint64_t count,
              uint64_t start, float* residual, uint64_t d);

// out[indices[i] - start] += scale * values[i]
void add_sparse(const uint32_t* indices, const float* values, uint64_t count, uint64_t start,
                float scale, float* out, uint64_t d, Largest& largest);

}  // namespace deepreduce
#endif
