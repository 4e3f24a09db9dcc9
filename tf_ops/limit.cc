// DeepreduceLimitMessages: notices in place of messages that are too large for Horovod.
#include <algorithm>

#include "messages.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace deepreduce_tf {
namespace {

using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("DeepreduceLimitMessages")
    .Input("messages: uint8")
    .Input("ranks: int32")
    .Input("rank: int32")
    .Output("sent: uint8")
    .Attr("most: int >= 1")
    .SetShapeFn([](InferenceContext* context) {
      tensorflow::shape_inference::ShapeHandle shape;
      TF_RETURN_IF_ERROR(context->WithRank(context->input(0), 1, &shape));
      TF_RETURN_IF_ERROR(context->WithRank(context->input(1), 0, &shape));
      TF_RETURN_IF_ERROR(context->WithRank(context->input(2), 0, &shape));
      context->set_output(0, context->Vector(InferenceContext::kUnknownDim));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Returns concatenated messages, or as many notices if each of `ranks` ranks cannot send as much to a rank that can receive `most` bytes.

rank: the global rank, for the text of the notices.
)doc");

class LimitMessagesOp : public tensorflow::OpKernel {
 public:
  explicit LimitMessagesOp(tensorflow::OpKernelConstruction* construction)
      : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("most", &most_));
  }

  void Compute(OpKernelContext* kernel) override {
    const Tensor& messages = kernel->input(0);
    OP_REQUIRES(kernel,
                messages.dims() == 1 && kernel->input(1).dims() == 0 &&
                    kernel->input(2).dims() == 0 && kernel->input(1).scalar<int32_t>()() >= 1,
                absl::InvalidArgumentError(absl::StrCat(
                    "messages, ranks and rank: expected a vector, a number of at least "
                    "1 and a number, got ",
                    messages.shape().DebugString(), ", ", kernel->input(1).DebugString(), " and ",
                    kernel->input(2).DebugString())));
    const int64_t size = messages.NumElements(), ranks = kernel->input(1).scalar<int32_t>()();
    if (size <= most_ / ranks) {
      kernel->set_output(0, messages);
      return;
    }
    Call call;
    int64_t count = 0;
    OP_REQUIRES_OK(kernel,
                   for_each_message(call, messages, "",
                                    [&](int64_t, const uint8_t*, const dr_message&) { ++count; }));
    const int status = dr_write_size_notice(
        &call.context, static_cast<uint64_t>(size), static_cast<uint64_t>(ranks),
        static_cast<uint64_t>(most_), static_cast<uint64_t>(kernel->input(2).scalar<int32_t>()()));
    OP_REQUIRES_OK(kernel, status_of(status, call.context.message));
    const int64_t bytes = static_cast<int64_t>(call.own_result.size());
    Tensor* sent = nullptr;
    OP_REQUIRES_OK(kernel,
                   kernel->allocate_output(0, tensorflow::TensorShape({count * bytes}), &sent));
    for (int64_t i = 0; i < count; ++i)
      std::copy(call.own_result.begin(), call.own_result.end(),
                sent->flat<uint8_t>().data() + i * bytes);
  }

 private:
  int64_t most_;
};

REGISTER_KERNEL_BUILDER(Name("DeepreduceLimitMessages").Device(tensorflow::DEVICE_CPU),
                        LimitMessagesOp);
#if GOOGLE_CUDA
// for graphs that are placed on a GPU as a whole; messages that are gathered there are on the host
REGISTER_KERNEL_BUILDER(Name("DeepreduceLimitMessages")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("messages")
                            .HostMemory("ranks")
                            .HostMemory("rank")
                            .HostMemory("sent"),
                        LimitMessagesOp);
#endif

}  // namespace
}  // namespace deepreduce_tf
