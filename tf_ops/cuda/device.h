// What the kernels on a GPU share: TensorFlow's stream there, its allocators' memory for one call,
// and the wait for what must be known on the host.
#ifndef DEEPREDUCE_TF_OPS_CUDA_DEVICE_H
#define DEEPREDUCE_TF_OPS_CUDA_DEVICE_H

#include "placement.h"

#include <cstdint>
#include <string>
#include <vector>

#include "../core.h"
#include "deepreduce_cuda.h"

namespace deepreduce_tf {

// A kernel that waits for its device. TensorFlow runs what is cheap on the thread that starts the
// next operations, and what is expensive on one of its own: so the wait holds up nobody. (An
// AsyncOpKernel would be called back on one of two threads that serve all events of the device.)
class WaitingKernel : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;
  bool IsExpensive() override { return true; }
};

// One call of a kernel on its device. TensorFlow gives memory out again in the order of the stream,
// so that what is freed here may still be in use there; pinned memory is the host's, which is given
// out again at once: what uses it is waited for before the call is over.
class DeviceCall {
 public:
  explicit DeviceCall(OpKernelContext* kernel) : kernel_(kernel), stream_(stream_of(kernel)) {}
  ~DeviceCall() {
    if (pinned_in_use_) wait().IgnoreError();  // after a failure only
  }
  DeviceCall(const DeviceCall&) = delete;
  DeviceCall& operator=(const DeviceCall&) = delete;

  void* stream() const { return stream_; }

  // At least one byte, aligned to 256: a null pointer would be a size query.
  absl::Status on_device(uint64_t bytes, void** data) {
    Tensor memory;
    TF_RETURN_IF_ERROR(allocate(bytes + kAlignment, tensorflow::AllocatorAttributes(), &memory));
    const uintptr_t address = reinterpret_cast<uintptr_t>(memory.data());
    *data = reinterpret_cast<void*>((address + kAlignment - 1) / kAlignment * kAlignment);
    return absl::OkStatus();
  }

  // Host memory that copies run to and from without a detour; it lives as long as the call.
  absl::Status pinned(uint64_t bytes, Tensor* memory) {
    tensorflow::AllocatorAttributes attributes;
    attributes.set_on_host(true);
    attributes.set_gpu_compatible(true);
    pinned_in_use_ = true;
    return allocate(bytes, attributes, memory);
  }

  // On the stream; either may be pinned or device memory.
  absl::Status copy(void* to, const void* from, uint64_t bytes) {
    return bytes == 0
               ? absl::OkStatus()
               : checked("copy", cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_));
  }

  absl::Status zero(void* memory, uint64_t bytes) {
    return bytes == 0 ? absl::OkStatus()
                      : checked("memset", cudaMemsetAsync(memory, 0, bytes, stream_));
  }

  // Until the stream has done what it was given so far; the thread sleeps.
  absl::Status wait() {
    cudaEvent_t event;
    TF_RETURN_IF_ERROR(checked(
        "event", cudaEventCreateWithFlags(&event, cudaEventBlockingSync | cudaEventDisableTiming)));
    cudaError_t error = cudaEventRecord(event, stream_);
    if (error == cudaSuccess) error = cudaEventSynchronize(event);
    cudaEventDestroy(event);
    pinned_in_use_ = false;
    return checked("wait", error);
  }

  // The bytes of a tensor on the device, in pinned memory, waited for.
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

  // Pageable memory of the host to the device, waited for.
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
  std::vector<Tensor> memory_;  // until the call is over
};

inline absl::Status copy_on_device(OpKernelContext* kernel, const Tensor& from, Tensor* to) {
  return DeviceCall(kernel).copy(to->data(), from.data(), from.TotalBytes());
}

}  // namespace deepreduce_tf
#endif
