// Parts that the kernels on a GPU share: TensorFlow's stream, memory for one call from its
// allocators, and waits for data that the host needs.
#ifndef DEEPREDUCE_TF_OPS_CUDA_DEVICE_H
#define DEEPREDUCE_TF_OPS_CUDA_DEVICE_H

#include "placement.h"

#include <cstdint>
#include <string>
#include <vector>

#include "../core.h"
#include "cuda/deepreduce_cuda.h"

namespace deepreduce_tf {

// A kernel that waits for its device. TensorFlow runs cheap kernels on the thread that starts the
// next operations, and expensive ones on separate threads. This one is marked as expensive, so its
// wait delays nothing else. (The callbacks of an AsyncOpKernel would run on one of two threads that
// handle all events of the device.)
class WaitingKernel : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;
  bool IsExpensive() override { return true; }
};

// One call of a kernel on its device. TensorFlow reuses freed device memory in the order of the
// stream, so memory freed here may still be in use on the device. Pinned memory belongs to the host
// allocator, which reuses it at once; so the call waits for everything that uses it before it ends.
class DeviceCall {
 public:
  explicit DeviceCall(OpKernelContext* kernel) : kernel_(kernel), stream_(stream_of(kernel)) {}
  ~DeviceCall() {
    if (pinned_in_use_) wait().IgnoreError();  // after a failure only
  }
  DeviceCall(const DeviceCall&) = delete;
  DeviceCall& operator=(const DeviceCall&) = delete;

  void* stream() const { return stream_; }

  // Allocates at least one byte, aligned to 256: a null pointer would be a size query.
  absl::Status on_device(uint64_t bytes, void** data) {
    Tensor memory;
    TF_RETURN_IF_ERROR(allocate(bytes + kAlignment, tensorflow::AllocatorAttributes(), &memory));
    const uintptr_t address = reinterpret_cast<uintptr_t>(memory.data());
    *data = reinterpret_cast<void*>((address + kAlignment - 1) / kAlignment * kAlignment);
    return absl::OkStatus();
  }

  // Allocates pinned host memory for asynchronous copies, for the duration of the call.
  absl::Status pinned(uint64_t bytes, Tensor* memory) {
    tensorflow::AllocatorAttributes attributes;
    attributes.set_on_host(true);
    attributes.set_gpu_compatible(true);
    pinned_in_use_ = true;
    return allocate(bytes, attributes, memory);
  }

  // Copies on the stream. Pinned memory must be new since the last wait; see also copy_pinned.
  absl::Status copy(void* to, const void* from, uint64_t bytes) {
    return bytes == 0
               ? absl::OkStatus()
               : checked("copy", cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_));
  }

  // Copies pinned memory that was there before the last wait.
  absl::Status copy_pinned(void* to, const void* from, uint64_t bytes) {
    pinned_in_use_ = true;
    return copy(to, from, bytes);
  }

  absl::Status zero(void* memory, uint64_t bytes) {
    return bytes == 0 ? absl::OkStatus()
                      : checked("memset", cudaMemsetAsync(memory, 0, bytes, stream_));
  }

  // Waits until the stream has finished its work so far. The thread sleeps, unless there is no
  // event to sleep on: the memory of a call that fails must not be in use either.
  absl::Status wait() {
    cudaEvent_t event;
    cudaError_t error =
        cudaEventCreateWithFlags(&event, cudaEventBlockingSync | cudaEventDisableTiming);
    if (error == cudaSuccess) {
      error = cudaEventRecord(event, stream_);
      if (error == cudaSuccess) error = cudaEventSynchronize(event);
      cudaEventDestroy(event);
    } else {
      error = cudaStreamSynchronize(stream_);
    }
    pinned_in_use_ = false;
    return checked("wait", error);
  }

  // Copies a tensor from the device to pinned memory, and waits.
  absl::Status fetch(const void* from, uint64_t bytes, Tensor* fetched) {
    TF_RETURN_IF_ERROR(pinned(bytes, fetched));
    TF_RETURN_IF_ERROR(copy(fetched->data(), from, bytes));
    return wait();
  }

  absl::Status fetch(const void* from, dr_cuda_result* result) {
    Tensor fetched;
    TF_RETURN_IF_ERROR(fetch(from, sizeof(*result), &fetched));
    std::memcpy(result, fetched.data(), sizeof(*result));
    return absl::OkStatus();
  }

  // Copies pageable host memory to the device, and waits.
  absl::Status send(void* to, const void* from, uint64_t bytes) {
    Tensor staged;
    TF_RETURN_IF_ERROR(pinned(bytes, &staged));
    std::memcpy(staged.data(), from, bytes);
    TF_RETURN_IF_ERROR(copy(to, staged.data(), bytes));
    return wait();
  }

 private:
  static constexpr uint64_t kAlignment = 256;

  absl::Status allocate(uint64_t bytes, tensorflow::AllocatorAttributes attributes,
                        Tensor* memory) {
    if (bytes >= uint64_t{1} << 62)
      return absl::ResourceExhaustedError(
          absl::StrCat("memory: expected less than 2^62 bytes, got ", bytes));
    TF_RETURN_IF_ERROR(kernel_->allocate_temp(
        tensorflow::DT_UINT8, tensorflow::TensorShape({static_cast<int64_t>(bytes)}), memory,
        attributes));
    memory_.push_back(*memory);
    return absl::OkStatus();
  }

  static absl::Status checked(const char* what, cudaError_t error) {
    if (error == cudaSuccess) return absl::OkStatus();
    return absl::InternalError(absl::StrCat("CUDA ", what, ": ", cudaGetErrorString(error)));
  }

  OpKernelContext* kernel_;
  cudaStream_t stream_;
  bool pinned_in_use_ = false;
  std::vector<Tensor> memory_;  // for the duration of the call
};

inline absl::Status copy_on_device(OpKernelContext* kernel, const Tensor& from, Tensor* to) {
  return DeviceCall(kernel).copy(to->data(), from.data(), from.TotalBytes());
}

}  // namespace deepreduce_tf
#endif
