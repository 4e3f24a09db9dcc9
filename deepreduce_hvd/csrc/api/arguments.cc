#include "api/arguments.h"

#include <algorithm>
#include <cfloat>
#include <cmath>

#include "codecs.h"
#include "container/payload.h"

namespace deepreduce {

dr_codec codec_of(const double* fields, uint64_t field_count) {
  if (field_count != DR_CODEC_FIELDS)
    invalid_argument("codec: expected %d numbers, got %llu", DR_CODEC_FIELDS,
                     static_cast<unsigned long long>(field_count));
  dr_codec codec;
  for (dr_stage* stage : {&codec.sparsifier, &codec.index, &codec.value, &codec.memory}) {
    stage->id = static_cast<int32_t>(*fields++);
    for (double& parameter : stage->parameters) parameter = *fields++;
  }
  return codec;
}

void check_gradient(const dr_codec& codec, uint64_t d, int dtype, bool has_residual,
                    bool has_velocity) {
  if (d > kMaxElements)
    invalid_argument("gradient: expected at most %llu elements, got %llu; split the tensor",
                     static_cast<unsigned long long>(kMaxElements),
                     static_cast<unsigned long long>(d));
  if (dtype < DR_FLOAT32 || dtype > DR_FLOAT64)
    invalid_argument("gradient dtype: expected 0 to 3, got %d", dtype);
  if (codec.memory.id < kNoMemory || codec.memory.id > kMomentumCorrection)
    unknown_codec("memory id: expected 0 to 3, got %d", codec.memory.id);
  if (has_residual != (codec.memory.id != kNoMemory))
    invalid_argument("memory %d: expected %s residual, got %s", codec.memory.id,
                     has_residual ? "no" : "a", has_residual ? "one" : "none");
  if (has_velocity != (codec.memory.id == kMomentumCorrection))
    invalid_argument("memory %d: expected %s velocity, got %s", codec.memory.id,
                     has_velocity ? "no" : "a", has_velocity ? "one" : "none");
}

void check_selection(const dr_codec& codec) {
  const double* given = codec.sparsifier.parameters;
  switch (codec.sparsifier.id) {
    case kNoneSparsifier:
      break;
    case kTopK:
    case kRandomK:
      if (!(given[1] == 0 ? given[0] > 0 && given[0] <= 1 : given[0] == 0 && given[1] >= 1))
        invalid_argument(
            "sparsifier %d: expected a ratio in (0, 1] or a k of at least 1, got ratio %g and k %g",
            codec.sparsifier.id, given[0], given[1]);
      break;
    case kThreshold:
      if (!(given[0] >= 0 && given[0] <= FLT_MAX))
        invalid_argument("Threshold: expected a finite float32 of at least 0, got %g", given[0]);
      break;
    case kChunkTopK:
      if (!(given[0] >= 1 && given[0] <= INT32_MAX))
        invalid_argument("ChunkTopK chunk: expected 1 to 2147483647, got %g", given[0]);
      break;
    default:
      unknown_codec("sparsifier id: expected 0 to 4, got %d", codec.sparsifier.id);
  }
  const double parameter = codec.memory.parameters[0];
  if (codec.memory.id == kLowPass && !(parameter > 0 && parameter <= 1))
    invalid_argument("LowPass beta: expected a number in (0, 1], got %g", parameter);
  if (codec.memory.id == kMomentumCorrection && !(parameter >= 0 && parameter < 1))
    invalid_argument("MomentumCorrection momentum: expected a number in [0, 1), got %g", parameter);
}

uint32_t kept_count(const dr_stage& sparsifier, uint64_t d) {
  const double ratio = sparsifier.parameters[0], fixed = sparsifier.parameters[1];
  const double wanted = fixed > 0 ? std::floor(fixed) : std::floor(ratio * static_cast<double>(d));
  return static_cast<uint32_t>(std::min(std::max(wanted, 1.0), static_cast<double>(d)));
}

}  // namespace deepreduce
