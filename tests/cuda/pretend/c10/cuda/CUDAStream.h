// Replaces PyTorch's header of the same name, for a simulated device: the program waits only for
// copies to the host (../../device.cc).
#pragma once
#include <c10/core/Device.h>

extern "C" int64_t pretended_stream();
extern "C" void pretended_before_kernel();
extern "C" int64_t pretended_now(int64_t stream);
extern "C" void pretended_wait(int64_t stream, int64_t moment);

namespace c10::cuda {
struct CUDAStream {
  int64_t number;
  // the operators ask for it before they launch kernels
  void* stream() const {
    pretended_before_kernel();
    return nullptr;
  }
  void synchronize() const { pretended_wait(number, pretended_now(number)); }
};
inline CUDAStream getCurrentCUDAStream(DeviceIndex = -1) { return {pretended_stream()}; }
}  // namespace c10::cuda
