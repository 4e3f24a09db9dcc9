// Parts that the encoding kernels share: a codec's numbers, and the variables of a gradient's slot.
#ifndef DEEPREDUCE_TF_OPS_SLOT_H
#define DEEPREDUCE_TF_OPS_SLOT_H

#include <algorithm>
#include <vector>

#include "core.h"

namespace deepreduce_tf {

inline int dtype_code(DataType type) {
  switch (type) {
    case tensorflow::DT_HALF:
      return DR_FLOAT16;
    case tensorflow::DT_BFLOAT16:
      return DR_BFLOAT16;
    case tensorflow::DT_DOUBLE:
      return DR_FLOAT64;
    default:
      return DR_FLOAT32;
  }
}

// Reads the codec of one step: a row of (rows, DR_CODEC_FIELDS) numbers, and the last row for all
// later steps.
inline absl::Status codec_at(const Tensor& table, int64_t step, dr_codec* codec) {
  if (table.dims() != 2 || table.dim_size(0) == 0 || table.dim_size(1) != DR_CODEC_FIELDS)
    return absl::InvalidArgumentError(absl::StrCat("codec: expected shape [rows, ", DR_CODEC_FIELDS,
                                                   "], got ", table.shape().DebugString()));
  const int64_t row = std::min(std::max<int64_t>(step, 0), table.dim_size(0) - 1);
  dr_context context{};
  const int status = dr_read_codec(&context, table.flat<double>().data() + row * table.dim_size(1),
                                   static_cast<uint64_t>(table.dim_size(1)), codec);
  return status_of(status, context.message);
}

// Writes a failure's notice as the call's result.
inline absl::Status write_notice(Call& call, const std::string& text) {
  return status_of(dr_write_notice(&call.context, text.data(), text.size()), call.context.message);
}

// Attributes and inputs of an encoding kernel: codec and position, then the memory's variables,
// then none or all of the records. The variables are locked during the lifetime of this object.
class Slot {
 public:
  static absl::Status check(int memories, int records) {
    if (memories <= 2 && (records == 0 || records == kRecords)) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        "expected at most 2 memories and 0 or 4 records, got ", memories, " and ", records));
  }

  // `first`: number of the codec's input; `d`: number of elements of the memory; `copy_elements`:
  // copies in the memory's space (host or device).
  absl::Status open(OpKernelContext* kernel, int first, int memories, int records, int64_t d,
                    CopyElements copy_elements = copy_on_host) {
    const Tensor& codec_table = kernel->input(first);
    const Tensor& position = kernel->input(first + 1);
    if (position.dims() != 1 || position.dim_size(0) != 4)
      return absl::InvalidArgumentError(
          absl::StrCat("position: expected shape [4], got ", position.shape().DebugString()));
    locked_ = std::vector<LockedVariable>(static_cast<size_t>(memories + records));
    for (int i = 0; i < memories + records; ++i)
      TF_RETURN_IF_ERROR(
          locked_[i].lock(kernel, tensorflow::HandleFromInput(kernel, first + 2 + i)));
    for (int i = 0; i < memories; ++i) {
      TF_RETURN_IF_ERROR(locked_[i].writable(kernel, i == 0 ? "residual" : "velocity", d,
                                             &memory[i], copy_elements));
      // an empty tensor may have a null address, which would mean no memory
      if (memory[i] == nullptr) memory[i] = &nothing_;
    }
    const auto place = position.flat<int64_t>();
    int64_t step = place(1), *steps = nullptr;
    if (records != 0) {
      record_ = locked_.data() + memories;
      TF_RETURN_IF_ERROR(record_[kSteps].writable(kernel, "steps", 1, &steps));
      TF_RETURN_IF_ERROR(record_[kThreshold].writable(kernel, "threshold", 1, &threshold_));
      TF_RETURN_IF_ERROR(record_[kSeconds].writable(kernel, "seconds", 2, &seconds_));
      step = *steps;
    }
    TF_RETURN_IF_ERROR(codec_at(codec_table, step, &codec));
    if (steps != nullptr) ++*steps;
    this->position = {static_cast<uint64_t>(place(0)), static_cast<uint64_t>(step),
                      static_cast<uint64_t>(place(2)), static_cast<uint64_t>(place(3))};
    return absl::OkStatus();
  }

  float threshold() const { return threshold_ == nullptr ? 0.0f : *threshold_; }

  // Ends the call. With records, or on request, a failure becomes a notice to all ranks in place of
  // the payload.
  absl::Status close(Call& call, int status, float threshold, const Stopwatch& watch,
                     bool notices = false) {
    if (record_ == nullptr && !notices) return status_of(status, call.context.message);
    if (status != DR_OK) TF_RETURN_IF_ERROR(write_notice(call, call.context.message));
    if (record_ == nullptr) return absl::OkStatus();
    *threshold_ = threshold;
    record_[kPayload].assign(*call.result);
    seconds_[0] += watch.seconds();
    return absl::OkStatus();
  }

  dr_codec codec;
  dr_position position;
  float* memory[2] = {nullptr, nullptr};

 private:
  // order of the records among the inputs
  enum Record { kSteps, kThreshold, kSeconds, kPayload, kRecords };

  float nothing_ = 0.0f;
  std::vector<LockedVariable> locked_;
  LockedVariable* record_ = nullptr;
  float* threshold_ = nullptr;
  double* seconds_ = nullptr;
};

}  // namespace deepreduce_tf
#endif
