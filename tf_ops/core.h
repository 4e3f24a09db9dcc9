// Parts that the TensorFlow kernels share: calls of the native core with TensorFlow's memory and
// errors, and variables updated in place.
#ifndef DEEPREDUCE_TF_OPS_CORE_H
#define DEEPREDUCE_TF_OPS_CORE_H

#include <chrono>
#include <exception>
#include <string>
#include <vector>

#include "api/deepreduce.h"
#include "support/host_scratch.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"

namespace deepreduce_tf {

using tensorflow::DataType;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

// Converts a failure to a class of error by its cause; Python maps each class to an error of the
// package.
inline absl::Status status_of(int status, const std::string& message) {
  switch (status) {
    case DR_OK:
      return absl::OkStatus();
    case DR_CORRUPT_PAYLOAD:
      return absl::DataLossError(message);
    case DR_INVALID_ARGUMENT:
      return absl::InvalidArgumentError(message);
    case DR_UNKNOWN_CODEC:
      return absl::UnimplementedError(message);
    case DR_OUT_OF_MEMORY:
      return absl::ResourceExhaustedError(message);
    default:
      return absl::InternalError(message);
  }
}

// Scratch memory and result of one call. The result is the kernel's output if one is named, else
// memory of the call.
class Call {
 public:
  explicit Call(OpKernelContext* kernel = nullptr, int output = 0)
      : kernel_(kernel), output_(output) {
    context.allocate = [](void* user, size_t bytes) noexcept {
      return static_cast<Call*>(user)->scratch_.allocate(bytes);
    };
    context.output = [](void* user, size_t bytes) noexcept {
      return static_cast<Call*>(user)->allocate_result(bytes);
    };
    context.user = this;
    context.simd = -1;
  }

  dr_context context{};
  Tensor* result = nullptr;  // uint8
  std::vector<uint8_t> own_result;

 private:
  void* allocate_result(size_t bytes) {
    if (kernel_ == nullptr) {
      try {
        own_result.resize(bytes);
      } catch (const std::exception&) {
        return nullptr;
      }
      return bytes == 0 ? static_cast<void*>(this) : static_cast<void*>(own_result.data());
    }
    if (!kernel_
             ->allocate_output(output_, tensorflow::TensorShape({static_cast<int64_t>(bytes)}),
                               &result)
             .ok())
      return nullptr;
    // null would mean a failed allocation
    return bytes == 0 ? static_cast<void*>(this)
                      : static_cast<void*>(result->flat<uint8_t>().data());
  }

  OpKernelContext* kernel_;
  int output_;
  deepreduce::HostScratch scratch_;
};

class Stopwatch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - started_).count();
  }

 private:
  std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
};

// Copies a tensor's elements to another one of the same size, in the memory that the kernel works
// on.
using CopyElements = absl::Status (*)(OpKernelContext* kernel, const Tensor& from, Tensor* to);

inline absl::Status copy_on_host(OpKernelContext*, const Tensor& from, Tensor* to) {
  std::memcpy(to->data(), from.data(), from.TotalBytes());
  return absl::OkStatus();
}

// A variable that only this kernel may write during the lifetime of this object.
class LockedVariable {
 public:
  LockedVariable() = default;
  LockedVariable(const LockedVariable&) = delete;
  LockedVariable& operator=(const LockedVariable&) = delete;
  ~LockedVariable() {
    if (variable_ != nullptr) variable_->mu()->unlock();
  }

  absl::Status lock(OpKernelContext* kernel, const tensorflow::ResourceHandle& handle) {
    TF_RETURN_IF_ERROR(tensorflow::LookupResource(kernel, handle, &variable_));
    variable_->mu()->lock();
    return absl::OkStatus();
  }

  // Returns its elements for updates in place. If others may still read them, they are copied
  // first.
  template <class T>
  absl::Status writable(OpKernelContext* kernel, const char* name, int64_t elements, T** data,
                        CopyElements copy_elements = copy_on_host) {
    Tensor* tensor = variable_->tensor();
    const DataType wanted = tensorflow::DataTypeToEnum<T>::value;
    if (!variable_->is_initialized || tensor->dtype() != wanted ||
        tensor->NumElements() != elements)
      return absl::InvalidArgumentError(absl::StrCat(
          name, ": expected an initialized ", tensorflow::DataTypeString(wanted), " variable of ",
          elements, " elements, got ",
          variable_->is_initialized ? absl::StrCat(tensorflow::DataTypeString(tensor->dtype()),
                                                   " of shape ", tensor->shape().DebugString())
                                    : std::string("an uninitialized one")));
    if (!tensor->RefCountIsOne()) {
      Tensor copy;
      TF_RETURN_IF_ERROR(kernel->allocate_temp(wanted, tensor->shape(), &copy));
      TF_RETURN_IF_ERROR(copy_elements(kernel, *tensor, &copy));
      *tensor = copy;
    }
    *data = tensor->flat<T>().data();
    return absl::OkStatus();
  }

  // Makes the variable refer to another tensor, without a copy.
  void assign(const Tensor& tensor) {
    *variable_->tensor() = tensor;
    variable_->is_initialized = true;
  }

 private:
  tensorflow::core::RefCountPtr<tensorflow::Var> variable_;
};

}  // namespace deepreduce_tf
#endif
