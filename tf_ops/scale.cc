// DeepreduceProbe and DeepreduceScale: the probe that Horovod reduces, and the factor that the
// reduced probe shows.
#include <numeric>

#include "core.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace deepreduce_tf {
namespace {

using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("DeepreduceProbe")
    .Input("rank: int32")
    .Input("step: int64")
    .Input("loss_scale: double")
    .Output("probe: T")
    .Attr("T: {float, double}")
    .Attr("fingerprint: int")
    .SetShapeFn([](InferenceContext* context) {
      tensorflow::shape_inference::ShapeHandle scalar;
      TF_RETURN_IF_ERROR(context->WithRank(context->input(0), 0, &scalar));
      TF_RETURN_IF_ERROR(context->WithRank(context->input(1), 0, &scalar));
      TF_RETURN_IF_ERROR(context->WithRank(context->input(2), 0, &scalar));
      context->set_output(0, context->Vector(DR_PROBE_LENGTH));
      return absl::OkStatus();
    })
    .Doc(R"doc(
What a compressor hands to Horovod's reduction, (4,): it tells ranks, configuration (`fingerprint`), step and loss scale apart.
)doc");

// Returns an error unless three inputs, `names`, are scalars.
absl::Status expect_scalars(const OpKernelContext& kernel, int first, const char* names) {
  std::vector<std::string> shapes;
  bool scalars = true;
  for (int i = first; i < first + 3; ++i) {
    shapes.push_back(kernel.input(i).shape().DebugString());
    scalars = scalars && kernel.input(i).dims() == 0;
  }
  if (scalars) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(names, ": expected scalars, got shapes ",
                                                 shapes[0], ", ", shapes[1], " and ", shapes[2]));
}

class ProbeOp : public tensorflow::OpKernel {
 public:
  explicit ProbeOp(tensorflow::OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("fingerprint", &fingerprint_));
  }

  void Compute(OpKernelContext* kernel) override {
    OP_REQUIRES_OK(kernel, expect_scalars(*kernel, 0, "rank, step and loss_scale"));
    Tensor* probe = nullptr;
    OP_REQUIRES_OK(kernel,
                   kernel->allocate_output(0, tensorflow::TensorShape({DR_PROBE_LENGTH}), &probe));
    double numbers[DR_PROBE_LENGTH];
    dr_make_probe(static_cast<uint64_t>(kernel->input(0).scalar<int32_t>()()),
                  static_cast<uint32_t>(fingerprint_),
                  static_cast<uint64_t>(kernel->input(1).scalar<int64_t>()()),
                  kernel->input(2).scalar<double>()(), numbers);
    for (int i = 0; i < DR_PROBE_LENGTH; ++i) {
      if (probe->dtype() == tensorflow::DT_FLOAT)
        probe->flat<float>()(i) = static_cast<float>(numbers[i]);
      else
        probe->flat<double>()(i) = numbers[i];
    }
  }

 private:
  int64_t fingerprint_;
};

REGISTER_KERNEL_BUILDER(Name("DeepreduceProbe").Device(tensorflow::DEVICE_CPU), ProbeOp);
#if GOOGLE_CUDA
// for graphs that are placed on a GPU as a whole
REGISTER_KERNEL_BUILDER(Name("DeepreduceProbe")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("rank")
                            .HostMemory("step")
                            .HostMemory("loss_scale")
                            .HostMemory("probe"),
                        ProbeOp);
#endif

REGISTER_OP("DeepreduceScale")
    .Input("reduced_probe: T")
    .Input("size: int32")
    .Input("step: int64")
    .Input("loss_scale: double")
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
      TF_RETURN_IF_ERROR(context->WithRank(context->input(2), 0, &size));
      TF_RETURN_IF_ERROR(context->WithRank(context->input(3), 0, &size));
      context->set_output(0, context->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
The factor that Horovod's reduction applies to each rank's gradient, from the reduced probe.

size: of the process set; `ranks` are its global ranks, all when there are none. step, loss_scale: those of this rank's probe.
)doc");

class ScaleOp : public tensorflow::OpKernel {
 public:
  explicit ScaleOp(tensorflow::OpKernelConstruction* construction) : OpKernel(construction) {
    std::vector<int64_t> ranks;
    OP_REQUIRES_OK(construction, construction->GetAttr("ranks", &ranks));
    OP_REQUIRES_OK(construction, construction->GetAttr("fingerprint", &fingerprint_));
    OP_REQUIRES_OK(construction, construction->GetAttr("variable", &variable_));
    ranks_.assign(ranks.begin(), ranks.end());
  }

  void Compute(OpKernelContext* kernel) override {
    const Tensor& probe = kernel->input(0);
    OP_REQUIRES(kernel, probe.NumElements() == DR_PROBE_LENGTH,
                absl::InvalidArgumentError(absl::StrCat("reduced_probe: expected shape [4], got ",
                                                        probe.shape().DebugString())));
    OP_REQUIRES_OK(kernel, expect_scalars(*kernel, 1, "size, step and loss_scale"));
    std::vector<uint64_t> ranks = ranks_;
    if (ranks.empty()) {
      ranks.resize(static_cast<size_t>(kernel->input(1).scalar<int32_t>()()));
      std::iota(ranks.begin(), ranks.end(), 0);
    }
    Call call;
    Tensor* scale = nullptr;
    OP_REQUIRES_OK(kernel, kernel->allocate_output(0, tensorflow::TensorShape(), &scale));
    double numbers[DR_PROBE_LENGTH];
    for (int i = 0; i < DR_PROBE_LENGTH; ++i)
      numbers[i] =
          probe.dtype() == tensorflow::DT_FLOAT ? probe.flat<float>()(i) : probe.flat<double>()(i);
    const int status = dr_scale(
        &call.context, numbers, ranks.data(), ranks.size(), static_cast<uint32_t>(fingerprint_),
        static_cast<uint64_t>(kernel->input(2).scalar<int64_t>()()),
        kernel->input(3).scalar<double>()(), scale->scalar<double>().data());
    OP_REQUIRES_OK(kernel, status_of(status, absl::StrCat("parameter ", variable_, ": ",
                                                          call.context.message)));
  }

 private:
  std::vector<uint64_t> ranks_;
  int64_t fingerprint_;
  std::string variable_;
};

REGISTER_KERNEL_BUILDER(Name("DeepreduceScale").Device(tensorflow::DEVICE_CPU), ScaleOp);
#if GOOGLE_CUDA
// for graphs that are placed on a GPU as a whole; these few numbers stay on the host
REGISTER_KERNEL_BUILDER(Name("DeepreduceScale")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("reduced_probe")
                            .HostMemory("size")
                            .HostMemory("step")
                            .HostMemory("loss_scale")
                            .HostMemory("scale"),
                        ScaleOp);
#endif

}  // namespace
}  // namespace deepreduce_tf
