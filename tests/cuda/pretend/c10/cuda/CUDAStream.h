// Replaces PyTorch's header of the same name, for a simulated device: the program waits only for
// copies to the host (../../device.cc).
#pragma once
#include <c10/core/Device.h>

extern "C" int64_t pretended_now();
extern "C" void pretended_wait(int64_t moment);

namespace c10::cuda {
struct CUDAStream {
  void* stream() const { return nullptr; }
  void synchronize() const { pretended_wait(pretended_now()); }
};
inline CUDAStream getCurrentCUDAStream(DeviceIndex = -1) { return {}; }
}  // namespace c10::cuda
