// DeepreduceEncode: a gradient and the state of its variable -> a payload.
#include <algorithm>
#include <vector>

#include "core.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace deepreduce_tf {
namespace {

using tensorflow::shape_inference::InferenceContext;

constexpr int kCodecFields = 4 * (1 + DR_STAGE_PARAMETERS);

// The variables of a gradient's slot, in this order, after those of the memory.
enum Record { kSteps, kThreshold, kSeconds, kPayload, kRecords };

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
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* context) {
      tensorflow::shape_inference::ShapeHandle codec, position;
      tensorflow::shape_inference::DimensionHandle size;
      TF_RETURN_IF_ERROR(context->WithRank(context->input(1), 2, &codec));
      TF_RETURN_IF_ERROR(context->WithValue(context->Dim(codec, 1), kCodecFields, &size));
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
  seconds spent encoding and decoding (2 double), the last payload (uint8). With them a failure becomes a notice to all ranks
  in the payload's place.
)doc");

int dtype_code(DataType type) {
  switch (type) {
    case tensorflow::DT_HALF: return DR_FLOAT16;
    case tensorflow::DT_BFLOAT16: return DR_BFLOAT16;
    case tensorflow::DT_DOUBLE: return DR_FLOAT64;
    default: return DR_FLOAT32;
  }
}

dr_codec codec_at(const Tensor& table, int64_t step) {
  const int64_t row = std::min(std::max<int64_t>(step, 0), table.dim_size(0) - 1);
  const double* field = table.flat<double>().data() + row * kCodecFields;
  dr_codec codec;
  dr_stage* stages[] = {&codec.sparsifier, &codec.index, &codec.value, &codec.memory};
  for (dr_stage* stage : stages) {
    stage->id = static_cast<int32_t>(*field++);
    for (double& parameter : stage->parameters) parameter = *field++;
  }
  return codec;
}

class EncodeOp : public tensorflow::OpKernel {
 public:
  explicit EncodeOp(tensorflow::OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("memories", &memories_));
    OP_REQUIRES_OK(construction, construction->GetAttr("records", &records_));
    OP_REQUIRES(construction, memories_ <= 2 && (records_ == 0 || records_ == kRecords),
                absl::InvalidArgumentError(absl::StrCat("DeepreduceEncode: expected at most 2 memories and 0 or 4 records, got ", memories_, " and ", records_)));
  }

  void Compute(OpKernelContext* kernel) override {
    const Stopwatch watch;
    const Tensor& gradient = kernel->input(0);
    const Tensor& table = kernel->input(1);
    const Tensor& position = kernel->input(2);
    OP_REQUIRES(kernel, table.dims() == 2 && table.dim_size(0) > 0 && table.dim_size(1) == kCodecFields,
                absl::InvalidArgumentError(absl::StrCat("codec: expected shape [rows, 20], got ", table.shape().DebugString())));
    OP_REQUIRES(kernel, position.dims() == 1 && position.dim_size(0) == 4,
                absl::InvalidArgumentError(absl::StrCat("position: expected shape [4], got ", position.shape().DebugString())));
    const int64_t d = gradient.NumElements();
    const auto place = position.flat<int64_t>();

    std::vector<LockedVariable> locked(static_cast<size_t>(memories_ + records_));
    float* state[2] = {nullptr, nullptr};
    for (int i = 0; i < memories_ + records_; ++i) OP_REQUIRES_OK(kernel, locked[i].lock(kernel, tensorflow::HandleFromInput(kernel, 3 + i)));
    for (int i = 0; i < memories_; ++i) OP_REQUIRES_OK(kernel, locked[i].writable(kernel, i == 0 ? "residual" : "velocity", d, &state[i]));
    LockedVariable* record = records_ == 0 ? nullptr : locked.data() + memories_;
    int64_t* steps = nullptr;
    float* threshold = nullptr;
    double* seconds = nullptr;
    if (record != nullptr) {
      OP_REQUIRES_OK(kernel, record[kSteps].writable(kernel, "steps", 1, &steps));
      OP_REQUIRES_OK(kernel, record[kThreshold].writable(kernel, "threshold", 1, &threshold));
      OP_REQUIRES_OK(kernel, record[kSeconds].writable(kernel, "seconds", 2, &seconds));
    }

    const int64_t step = steps == nullptr ? place(1) : (*steps)++;
    const dr_codec codec = codec_at(table, step);
    dr_encoding encoding{};
    encoding.gradient = gradient.data();
    encoding.dtype = dtype_code(gradient.dtype());
    encoding.d = static_cast<uint64_t>(d);
    encoding.residual = state[0];
    encoding.velocity = state[1];
    encoding.threshold = threshold == nullptr ? 0.0f : *threshold;
    encoding.position = {static_cast<uint64_t>(place(0)), static_cast<uint64_t>(step), static_cast<uint64_t>(place(2)),
                         static_cast<uint64_t>(place(3))};
    Call call(kernel);
    const int status = dr_encode(&call.context, &codec, &encoding);
    if (record == nullptr || status == DR_OK) {
      OP_REQUIRES_OK(kernel, status_of(status, call.context.message));
    } else {  // the other ranks must hear of it instead of waiting
      const std::string text = call.context.message;
      OP_REQUIRES_OK(kernel, status_of(dr_write_notice(&call.context, text.data(), text.size()), call.context.message));
    }
    if (record != nullptr) {
      *threshold = encoding.threshold;
      record[kPayload].assign(*call.result);
      seconds[0] += watch.seconds();
    }
  }

 private:
  int memories_, records_;
};

REGISTER_KERNEL_BUILDER(Name("DeepreduceEncode").Device(tensorflow::DEVICE_CPU), EncodeOp);

}  // namespace
}  // namespace deepreduce_tf
