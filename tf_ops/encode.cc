// DeepreduceEncode: encodes a gradient with the state of its variable.
#include "slot.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace deepreduce_tf {
namespace {

using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("DeepreduceEncode")
    .Input("gradient: T")
    .Input("codec: double")
    .Input("position: int64")
    .Input("memory: memories * resource")
    .Input("record: records * resource")
    .Output("payload: uint8")
    .Attr("T: {float, half, bfloat16, double}")
    .Attr("memories: int >= 0")
    .Attr("records: int >= 0")
    .Attr("notices: bool = false")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* context) {
      tensorflow::shape_inference::ShapeHandle codec, position;
      tensorflow::shape_inference::DimensionHandle size;
      TF_RETURN_IF_ERROR(context->WithRank(context->input(1), 2, &codec));
      TF_RETURN_IF_ERROR(context->WithValue(context->Dim(codec, 1), DR_CODEC_FIELDS, &size));
      TF_RETURN_IF_ERROR(context->WithRank(context->input(2), 1, &position));
      TF_RETURN_IF_ERROR(context->WithValue(context->Dim(position, 0), 4, &size));
      context->set_output(0, context->Vector(InferenceContext::kUnknownDim));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Encodes a gradient of any shape as one payload.

codec: (rows, 20) a codec's numbers; a row for each step of a schedule, whose last row stays.
position: (4,) seed, step, tensor and rank, which key the random choices.
memory: the float32 variables of the memory, one element for each of the gradient's; updated in place.
record: none, or four variables: steps (int64; read in place of position's step, then incremented), the threshold found (float32),
  seconds spent encoding and decoding (2 double), the last payload (uint8). On a GPU none: they are the host's.
notices: whether a failure becomes a notice to all ranks in the payload's place; with records it does.
)doc");

class EncodeOp : public tensorflow::OpKernel {
 public:
  explicit EncodeOp(tensorflow::OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("memories", &memories_));
    OP_REQUIRES_OK(construction, construction->GetAttr("records", &records_));
    OP_REQUIRES_OK(construction, construction->GetAttr("notices", &notices_));
    OP_REQUIRES_OK(construction, Slot::check(memories_, records_));
  }

  void Compute(OpKernelContext* kernel) override {
    const Stopwatch watch;
    const Tensor& gradient = kernel->input(0);
    Slot slot;
    OP_REQUIRES_OK(kernel, slot.open(kernel, 1, memories_, records_, gradient.NumElements()));
    dr_encoding encoding{};
    encoding.gradient = gradient.data();
    encoding.dtype = dtype_code(gradient.dtype());
    encoding.d = static_cast<uint64_t>(gradient.NumElements());
    encoding.residual = slot.memory[0];
    encoding.velocity = slot.memory[1];
    encoding.threshold = slot.threshold();
    encoding.position = slot.position;
    Call call(kernel);
    const int status = dr_encode(&call.context, &slot.codec, &encoding);
    OP_REQUIRES_OK(kernel, slot.close(call, status, encoding.threshold, watch, notices_));
  }

 private:
  int memories_, records_;
  bool notices_;
};

REGISTER_KERNEL_BUILDER(Name("DeepreduceEncode").Device(tensorflow::DEVICE_CPU), EncodeOp);

}  // namespace
}  // namespace deepreduce_tf
