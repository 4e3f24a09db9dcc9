// DeepreduceDecodeSum: sums one variable's gradients from the gathered messages of all ranks.
#include "decode.h"

#include <algorithm>

#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace deepreduce_tf {
namespace {

using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("DeepreduceDecodeSum")
    .Input("messages: uint8")
    .Input("scale: double")
    .Input("shape: int64")
    .Input("ranks: int32")
    .Input("initial: initials * float")
    .Input("spent: spent_types")
    .Input("seconds: records * resource")
    .Input("hints: hint_types")
    .Output("sum: T")
    .Attr("T: {float, half, bfloat16, double}")
    .Attr("initials: int >= 0 = 0")
    .Attr("spent_types: list({float, half, bfloat16, double}) >= 0 = []")
    .Attr("records: int >= 0 = 0")
    .Attr("hint_types: list({int64, double}) >= 0 = []")
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
shape: of the sum; [-1] takes the number of elements from the first payload, at most 2^24 or 4096 for each of its bytes.
ranks: how many sent messages, a scalar.
initial: none, or one tensor to add to.
spent: none, or the gradient that was encoded, whose memory the sum takes when nobody else needs it: fresh memory costs more than the sum.
seconds: none, or the variable (2 double) in whose second element the time spent is counted.
hints: none, or what saves a device reading its memory back: the length of each message (int64), and the codec of the payloads as
  DeepreduceEncode takes it. The host needs neither.
)doc");

class DecodeSumOp : public tensorflow::OpKernel {
 public:
  explicit DecodeSumOp(tensorflow::OpKernelConstruction* construction)
      : OpKernel(construction), decode_(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("T", &type_));
  }

  void Compute(OpKernelContext* kernel) override {
    const Stopwatch watch;
    OP_REQUIRES_OK(kernel, decode_.check(kernel));
    Call call;
    OneVariablesPayloads payloads;
    OP_REQUIRES_OK(kernel, decode_.expect(kernel, &payloads));
    OP_REQUIRES_OK(kernel,
                   payloads.split(call, kernel->input(DecodeSum::kMessages), decode_.variable));

    tensorflow::TensorShape shape;
    OP_REQUIRES_OK(kernel,
                   decode_.wanted_shape(call, kernel->input(DecodeSum::kShape), payloads, &shape));
    Tensor* sum = nullptr;
    OP_REQUIRES_OK(kernel, decode_.allocate_sum(kernel, shape, &sum));
    Tensor in_float32;
    if (type_ != tensorflow::DT_FLOAT)
      OP_REQUIRES_OK(kernel, kernel->allocate_temp(tensorflow::DT_FLOAT, shape, &in_float32));
    float* out = (type_ == tensorflow::DT_FLOAT ? *sum : in_float32).flat<float>().data();
    if (decode_.initials == 1) {
      OP_REQUIRES_OK(kernel, decode_.check_initial(kernel, shape));
      const Tensor& initial = kernel->input(DecodeSum::kLists);
      std::memcpy(out, initial.data(), initial.TotalBytes());
    } else {
      std::fill_n(out, shape.num_elements(), 0.0f);
    }
    OP_REQUIRES_OK(kernel, decode_.add_up(kernel, call, payloads, out, shape.num_elements()));
    switch (type_) {
      case tensorflow::DT_HALF:
        cast<Eigen::half>(in_float32, sum);
        break;
      case tensorflow::DT_BFLOAT16:
        cast<tensorflow::bfloat16>(in_float32, sum);
        break;
      case tensorflow::DT_DOUBLE:
        cast<double>(in_float32, sum);
        break;
      default:
        break;
    }
    if (decode_.records == 1) {
      LockedVariable record;
      double* seconds = nullptr;
      OP_REQUIRES_OK(
          kernel, record.lock(kernel, tensorflow::HandleFromInput(kernel, decode_.record_input())));
      OP_REQUIRES_OK(kernel, record.writable(kernel, "seconds", 2, &seconds));
      seconds[1] += watch.seconds();
    }
  }

 private:
  template <class T>
  static void cast(const Tensor& from, Tensor* to) {
    const float* source = from.flat<float>().data();
    T* target = to->flat<T>().data();
    for (int64_t i = 0; i < from.NumElements(); ++i) target[i] = static_cast<T>(source[i]);
  }

  const DecodeSum decode_;
  DataType type_;
};

REGISTER_KERNEL_BUILDER(Name("DeepreduceDecodeSum").Device(tensorflow::DEVICE_CPU), DecodeSumOp);

REGISTER_OP("DeepreduceLengths")
    .Input("messages: uint8")
    .Output("lengths: int64")
    .Attr("variable: string = ''")
    .SetShapeFn([](InferenceContext* context) {
      tensorflow::shape_inference::ShapeHandle messages;
      TF_RETURN_IF_ERROR(context->WithRank(context->input(0), 1, &messages));
      context->set_output(0, context->Vector(InferenceContext::kUnknownDim));
      return absl::OkStatus();
    })
    .Doc(R"doc(
The length in bytes of each of the messages that lie one after another.

variable: the first of those that the messages are of, for what is refused.
)doc");

class LengthsOp : public tensorflow::OpKernel {
 public:
  explicit LengthsOp(tensorflow::OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("variable", &variable_));
  }

  void Compute(OpKernelContext* kernel) override {
    Call call;
    std::vector<int64_t> found;
    const auto note = [&](int64_t, const uint8_t*, const dr_message& message) {
      found.push_back(static_cast<int64_t>(message.bytes));
    };
    OP_REQUIRES_OK(kernel, for_each_message(call, kernel->input(0), variable_, note));
    Tensor* lengths = nullptr;
    OP_REQUIRES_OK(kernel,
                   kernel->allocate_output(
                       0, tensorflow::TensorShape({static_cast<int64_t>(found.size())}), &lengths));
    std::copy(found.begin(), found.end(), lengths->flat<int64_t>().data());
  }

 private:
  std::string variable_;
};

REGISTER_KERNEL_BUILDER(Name("DeepreduceLengths").Device(tensorflow::DEVICE_CPU), LengthsOp);

}  // namespace
}  // namespace deepreduce_tf
