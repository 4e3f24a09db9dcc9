// C++ references to tensors. They ensure that another thread never drops the last C++ reference;
// Python references do not count for this.
#include <torch/custom_class.h>

namespace deepreduce_torch {
namespace {

struct References : torch::CustomClassHolder {
  explicit References(std::vector<at::Tensor> tensors) : tensors(std::move(tensors)) {}
  const std::vector<at::Tensor> tensors;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(deepreduce, library) {
  library.class_<References>("References").def(torch::init<std::vector<at::Tensor>>());
}

}  // namespace deepreduce_torch
