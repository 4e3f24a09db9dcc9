// Parts of DeepreduceDecodeSum's kernels that host and devices share: attributes, inputs and the
// shape of the sum.
#ifndef DEEPREDUCE_TF_OPS_DECODE_H
#define DEEPREDUCE_TF_OPS_DECODE_H

#include <string>
#include <vector>

#include "messages.h"

namespace deepreduce_tf {

struct DecodeSum {
  // inputs before the lists
  enum { kMessages, kScale, kShape, kRanks, kLists };

  explicit DecodeSum(tensorflow::OpKernelConstruction* construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("initials", &initials));
    std::vector<DataType> spent_types, types;
    OP_REQUIRES_OK(construction, construction->GetAttr("spent_types", &spent_types));
    spents = static_cast<int>(spent_types.size());
    OP_REQUIRES_OK(construction, construction->GetAttr("records", &records));
    OP_REQUIRES_OK(construction, construction->GetAttr("hint_types", &types));
    hints = static_cast<int>(types.size());
    OP_REQUIRES_OK(construction, construction->GetAttr("member", &member));
    OP_REQUIRES_OK(construction, construction->GetAttr("members", &members));
    OP_REQUIRES_OK(construction, construction->GetAttr("variable", &variable));
    OP_REQUIRES(
        construction, initials <= 1 && spents <= 1 && records <= 1 && member < members,
        absl::InvalidArgumentError(absl::StrCat(
            "DeepreduceDecodeSum: expected at most one initial, spent and record and a member of ",
            members, ", got ", initials, ", ", spents, ", ", records, " and ", member)));
    OP_REQUIRES(
        construction,
        types.empty() ||
            types == std::vector<DataType>({tensorflow::DT_INT64, tensorflow::DT_DOUBLE}),
        absl::InvalidArgumentError(absl::StrCat(
            "DeepreduceDecodeSum: expected no hints, or lengths (int64) and a codec (double), got ",
            tensorflow::DataTypeSliceString(types))));
  }

  int spent_input() const { return kLists + initials; }
  int record_input() const { return spent_input() + spents; }
  int hint_input() const { return record_input() + records; }

  absl::Status check(OpKernelContext* kernel) const {
    if (kernel->input(kMessages).dims() != 1 || kernel->input(kScale).dims() != 0 ||
        kernel->input(kShape).dims() > 1)
      return absl::InvalidArgumentError(absl::StrCat(
          "DeepreduceDecodeSum: expected a vector of messages, a scalar scale and a shape, got "
          "tensors of shapes ",
          kernel->input(kMessages).shape().DebugString(), ", ",
          kernel->input(kScale).shape().DebugString(), " and ",
          kernel->input(kShape).shape().DebugString()));
    return absl::OkStatus();
  }

  // Sets the expected number of payloads, and whose they are.
  absl::Status expect(OpKernelContext* kernel, OneVariablesPayloads* payloads) const {
    return payloads->expect(kernel->input(kRanks), member, members);
  }

  float scale(OpKernelContext* kernel) const {
    return static_cast<float>(kernel->input(kScale).scalar<double>()());
  }

  static bool takes_shape_of_payload(const Tensor& given) {
    return given.NumElements() == 1 && given.flat<int64_t>()(0) == -1;
  }

  // `payloads`: must be in host memory if the shape is read from the first of them.
  absl::Status wanted_shape(Call& call, const Tensor& given, const OneVariablesPayloads& payloads,
                            tensorflow::TensorShape* shape) const {
    if (takes_shape_of_payload(given)) {
      if (payloads.data.empty())
        return absl::InvalidArgumentError(
            named(variable, "expected a payload to take the shape from, got none"));
      dr_header header;
      const int status = dr_inspect(&call.context, payloads.data[0], payloads.sizes[0], &header);
      if (status != DR_OK) return status_of(status, named(variable, call.context.message));
      const uint64_t most = dr_default_max_elements(payloads.sizes[0]);
      if (header.d > most)
        return absl::InvalidArgumentError(named(
            variable, absl::StrCat("expected at most ", most, " elements of a payload of ",
                                   payloads.sizes[0], " bytes where the shape is [-1], got ",
                                   header.d, "; give the shape of a payload that you trust")));
      return tensorflow::TensorShape::BuildTensorShape({static_cast<int64_t>(header.d)}, shape);
    }
    return tensorflow::TensorShapeUtils::MakeShape(given.flat<int64_t>().data(),
                                                   given.NumElements(), shape);
  }

  absl::Status check_initial(OpKernelContext* kernel, const tensorflow::TensorShape& shape) const {
    const Tensor& initial = kernel->input(kLists);
    if (initial.shape() == shape) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("out: expected shape ", shape.DebugString(),
                                                   ", got ", initial.shape().DebugString()));
  }

  // Allocates the sum. It uses the memory of the gradient, if nobody else needs that.
  absl::Status allocate_sum(OpKernelContext* kernel, const tensorflow::TensorShape& shape,
                            Tensor** sum) const {
    std::vector<int> reusable;
    if (spents == 1) reusable.push_back(spent_input());
    return kernel->forward_input_or_allocate_output(reusable, 0, shape, sum);
  }

  // out += scale * each payload, all in host memory.
  absl::Status add_up(OpKernelContext* kernel, Call& call, const OneVariablesPayloads& payloads,
                      float* out, int64_t elements) const {
    const int status = dr_decode_sum(&call.context, payloads.data.data(), payloads.sizes.data(),
                                     payloads.data.size(), out, static_cast<uint64_t>(elements),
                                     scale(kernel), nullptr);
    return status_of(status, named(variable, call.context.message));
  }

  int initials = 0, spents = 0, records = 0, hints = 0;
  int64_t member = 0, members = 1;
  std::string variable;
};

}  // namespace deepreduce_tf
#endif
