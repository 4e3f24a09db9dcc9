// DeepreduceDecodeSum: the gathered messages of all ranks -> the sum of one variable's gradients. DeepreduceScale: the reduction in force.
#include "messages.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace deepreduce_tf {
namespace {

using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("DeepreduceDecodeSum")
    .Input("messages: uint8")
    .Input("scale: double")
    .Input("shape: int64")
    .Input("initial: initials * float")
    .Input("spent: spent_types")
    .Input("seconds: records * resource")
    .Output("sum: T")
    .Attr("T: {float, half, bfloat16, double}")
    .Attr("initials: int >= 0 = 0")
    .Attr("spent_types: list({float, half, bfloat16, double}) >= 0 = []")
    .Attr("records: int >= 0 = 0")
    .Attr("member: int >= 0 = 0")
    .Attr("members: int >= 1 = 1")
    .Attr("variable: string = ''")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* context) {
      tensorflow::shape_inference::ShapeHandle messages, scale, shape;
      TF_RETURN_IF_ERROR(context->WithRank(context->input(0), 1, &messages));
      TF_RETURN_IF_ERROR(context->WithRank(context->input(1), 0, &scale));
      TF_RETURN_IF_ERROR(context->MakeShapeFromShapeTensor(2, &shape));
      context->set_output(0, shape);
      return absl::OkStatus();
    })
    .Doc(R"doc(
Adds up payloads, in the order of the ranks.

messages: the ranks' messages one after another; each rank sends `members` of them, this variable's is the one numbered `member`.
scale: each payload's factor.
shape: of the sum; [-1] takes the number of elements from the first payload.
initial: none, or one tensor to add to.
spent: none, or the gradient that was encoded, whose memory the sum takes when nobody else needs it: fresh memory costs more than the sum.
seconds: none, or the variable (2 double) in whose second element the time spent is counted.
)doc");

class DecodeSumOp : public tensorflow::OpKernel {
 public:
  explicit DecodeSumOp(tensorflow::OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("T", &type_));
    OP_REQUIRES_OK(construction, construction->GetAttr("initials", &initials_));
    std::vector<DataType> spent_types;
    OP_REQUIRES_OK(construction, construction->GetAttr("spent_types", &spent_types));
    spents_ = static_cast<int>(spent_types.size());
    OP_REQUIRES_OK(construction, construction->GetAttr("records", &records_));
    OP_REQUIRES_OK(construction, construction->GetAttr("member", &member_));
    OP_REQUIRES_OK(construction, construction->GetAttr("members", &members_));
    OP_REQUIRES_OK(construction, construction->GetAttr("variable", &variable_));
    OP_REQUIRES(construction, initials_ <= 1 && spents_ <= 1 && records_ <= 1 && member_ < members_,
                absl::InvalidArgumentError(absl::StrCat("DeepreduceDecodeSum: expected at most one initial, spent and record and a member of ", members_, ", got ",
                                                        initials_, ", ", spents_, ", ", records_, " and ", member_)));
  }

  void Compute(OpKernelContext* kernel) override {
    const Stopwatch watch;
    const Tensor& messages = kernel->input(0);
    OP_REQUIRES(kernel, messages.dims() == 1 && kernel->input(1).dims() == 0 && kernel->input(2).dims() <= 1,
                absl::InvalidArgumentError("DeepreduceDecodeSum: expected a vector of messages, a scalar scale and a shape"));
    Call call;
    OneVariablesPayloads payloads;
    OP_REQUIRES_OK(kernel, payloads.split(call, messages, member_, members_, variable_));

    tensorflow::TensorShape shape;
    OP_REQUIRES_OK(kernel, wanted_shape(call, kernel->input(2), payloads, &shape));
    Tensor* sum = nullptr;
    std::vector<int> reusable;
    if (spents_ == 1) reusable.push_back(3 + initials_);
    OP_REQUIRES_OK(kernel, kernel->forward_input_or_allocate_output(reusable, 0, shape, &sum));
    Tensor in_float32;
    if (type_ != tensorflow::DT_FLOAT) OP_REQUIRES_OK(kernel, kernel->allocate_temp(tensorflow::DT_FLOAT, shape, &in_float32));
    float* out = (type_ == tensorflow::DT_FLOAT ? *sum : in_float32).flat<float>().data();
    if (initials_ == 1) {
      const Tensor& initial = kernel->input(3);
      OP_REQUIRES(kernel, initial.shape() == shape,
                  absl::InvalidArgumentError(absl::StrCat("out: expected shape ", shape.DebugString(), ", got ", initial.shape().DebugString())));
      std::memcpy(out, initial.data(), initial.TotalBytes());
    } else {
      std::fill_n(out, shape.num_elements(), 0.0f);
    }
    const float scale = static_cast<float>(kernel->input(1).scalar<double>()());
    const int status = dr_decode_sum(&call.context, payloads.data.data(), payloads.sizes.data(), payloads.data.size(), out,
                                     static_cast<uint64_t>(shape.num_elements()), scale);
    OP_REQUIRES_OK(kernel, status_of(status, named(variable_, call.context.message)));
    switch (type_) {
      case tensorflow::DT_HALF: cast<Eigen::half>(in_float32, sum); break;
      case tensorflow::DT_BFLOAT16: cast<tensorflow::bfloat16>(in_float32, sum); break;
      case tensorflow::DT_DOUBLE: cast<double>(in_float32, sum); break;
      default: break;
    }
    if (records_ == 1) {
      LockedVariable record;
      double* seconds;
      OP_REQUIRES_OK(kernel, record.lock(kernel, tensorflow::HandleFromInput(kernel, 3 + initials_ + spents_)));
      OP_REQUIRES_OK(kernel, record.writable(kernel, "seconds", 2, &seconds));
      seconds[1] += watch.seconds();
    }
  }

 private:
  absl::Status wanted_shape(Call& call, const Tensor& given, const OneVariablesPayloads& payloads,
                            tensorflow::TensorShape* shape) const {
    const auto dimensions = given.flat<int64_t>();
    if (given.NumElements() == 1 && dimensions(0) == -1) {
      if (payloads.data.empty()) return absl::InvalidArgumentError(named(variable_, "expected a payload to take the shape from, got none"));
      dr_header header;
      const int status = dr_inspect(&call.context, payloads.data[0], payloads.sizes[0], &header);
      if (status != DR_OK) return status_of(status, named(variable_, call.context.message));
      return tensorflow::TensorShape::BuildTensorShape({static_cast<int64_t>(header.d)}, shape);
    }
    return tensorflow::TensorShapeUtils::MakeShape(dimensions.data(), given.NumElements(), shape);
  }

  template <class T>
  static void cast(const Tensor& from, Tensor* to) {
    const float* source = from.flat<float>().data();
    T* target = to->flat<T>().data();
    for (int64_t i = 0; i < from.NumElements(); ++i) target[i] = static_cast<T>(source[i]);
  }

  DataType type_;
  int initials_, spents_, records_;
  int64_t member_, members_;
  std::string variable_;
};

REGISTER_KERNEL_BUILDER(Name("DeepreduceDecodeSum").Device(tensorflow::DEVICE_CPU), DecodeSumOp);

REGISTER_OP("DeepreduceScale")
    .Input("reduced_probe: T")
    .Input("size: int32")
    .Output("scale: double")
    .Attr("T: {float, double}")
    .Attr("ranks: list(int) = []")
    .Attr("fingerprint: int")
    .Attr("variable: string")
    .SetShapeFn([](InferenceContext* context) {
      tensorflow::shape_inference::ShapeHandle probe, size;
      tensorflow::shape_inference::DimensionHandle length;
      TF_RETURN_IF_ERROR(context->WithRank(context->input(0), 1, &probe));
      TF_RETURN_IF_ERROR(context->WithValue(context->Dim(probe, 0), DR_PROBE_LENGTH, &length));
      TF_RETURN_IF_ERROR(context->WithRank(context->input(1), 0, &size));
      context->set_output(0, context->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
The factor that Horovod's reduction applies to each rank's gradient, from the reduced probe.

size: of the process set; `ranks` are its global ranks, all when there are none.
)doc");

class ScaleOp : public tensorflow::OpKernel {
 public:
  explicit ScaleOp(tensorflow::OpKernelConstruction* construction) : OpKernel(construction) {
    std::vector<int64_t> ranks;
    OP_REQUIRES_OK(construction, construction->GetAttr("ranks", &ranks));
    OP_REQUIRES_OK(construction, construction->GetAttr("fingerprint", &fingerprint_));
    OP_REQUIRES_OK(construction, construction->GetAttr("variable", &variable_));
    rank_count_ = ranks.size();
    for (const int64_t rank : ranks) rank_sum_ += static_cast<uint64_t>(rank) + 1;
  }

  void Compute(OpKernelContext* kernel) override {
    const Tensor& probe = kernel->input(0);
    OP_REQUIRES(kernel, probe.NumElements() == DR_PROBE_LENGTH && kernel->input(1).dims() == 0,
                absl::InvalidArgumentError(absl::StrCat("reduced_probe: expected shape [4], got ", probe.shape().DebugString())));
    uint64_t count = rank_count_, sum = rank_sum_;
    if (count == 0) {
      count = static_cast<uint64_t>(kernel->input(1).scalar<int32_t>()());
      sum = count * (count + 1) / 2;
    }
    Call call;
    Tensor* scale = nullptr;
    OP_REQUIRES_OK(kernel, kernel->allocate_output(0, tensorflow::TensorShape(), &scale));
    double numbers[DR_PROBE_LENGTH];
    for (int i = 0; i < DR_PROBE_LENGTH; ++i) numbers[i] = probe.dtype() == tensorflow::DT_FLOAT ? probe.flat<float>()(i) : probe.flat<double>()(i);
    const int status = dr_scale(&call.context, numbers, count, sum, static_cast<uint32_t>(fingerprint_),
                                scale->scalar<double>().data());
    OP_REQUIRES_OK(kernel, status_of(status, absl::StrCat("parameter ", variable_, ": ", call.context.message)));
  }

 private:
  uint64_t rank_count_ = 0, rank_sum_ = 0;
  int64_t fingerprint_;
  std::string variable_;
};

REGISTER_KERNEL_BUILDER(Name("DeepreduceScale").Device(tensorflow::DEVICE_CPU), ScaleOp);

}  // namespace
}  // namespace deepreduce_tf
