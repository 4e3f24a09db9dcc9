// DeepreduceVariableName and DeepreduceExpectVariable: check that a shared graph runs on the
// variable it was traced for.
#include "core.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace deepreduce_tf {
namespace {

REGISTER_OP("DeepreduceVariableName")
    .Input("variable: resource")
    .Output("name: string")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
What TensorFlow calls a variable: the same for all its handles, and for no other variable of the process.
)doc");

std::string name_of(const tensorflow::ResourceHandle& handle) {
  return absl::StrCat(handle.container(), "/", handle.name());
}

class VariableNameOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* kernel) override {
    Tensor* name = nullptr;
    OP_REQUIRES_OK(kernel, kernel->allocate_output(0, tensorflow::TensorShape(), &name));
    name->scalar<tensorflow::tstring>()() = name_of(tensorflow::HandleFromInput(kernel, 0));
  }
};

REGISTER_OP("DeepreduceExpectVariable")
    .Input("handle: resource")
    .Attr("expected: string")
    .Attr("variable: string")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Fails unless the variable is the one that DeepreduceVariableName calls `expected`; `variable` is what its owner calls it.
)doc");

class ExpectVariableOp : public tensorflow::OpKernel {
 public:
  explicit ExpectVariableOp(tensorflow::OpKernelConstruction* construction)
      : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("expected", &expected_));
    OP_REQUIRES_OK(construction, construction->GetAttr("variable", &variable_));
  }

  void Compute(OpKernelContext* kernel) override {
    const tensorflow::ResourceHandle& found = tensorflow::HandleFromInput(kernel, 0);
    OP_REQUIRES(
        kernel, name_of(found) == expected_,
        absl::InvalidArgumentError(absl::StrCat(
            "parameter ", variable_,
            ": expected the gradient of this variable, got the gradient of ", found.name(),
            ", which has the same shape: Horovod traces tapes and optimizers with gradients of equal shapes only once; "
            "give each one its own view, compression=compressor.bound_to(variables); or the compressor was made for another model: make one for this model")));
  }

 private:
  std::string expected_, variable_;
};

// a handle is on the host, wherever the variable is
REGISTER_KERNEL_BUILDER(Name("DeepreduceVariableName").Device(tensorflow::DEVICE_CPU),
                        VariableNameOp);
REGISTER_KERNEL_BUILDER(Name("DeepreduceVariableName")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("variable")
                            .HostMemory("name"),
                        VariableNameOp);
REGISTER_KERNEL_BUILDER(Name("DeepreduceExpectVariable").Device(tensorflow::DEVICE_CPU),
                        ExpectVariableOp);
REGISTER_KERNEL_BUILDER(
    Name("DeepreduceExpectVariable").Device(tensorflow::DEVICE_GPU).HostMemory("handle"),
    ExpectVariableOp);

}  // namespace
}  // namespace deepreduce_tf
