// Replaces PyTorch's header of the same name, for a simulated device (../../device.cc).
#pragma once
#include <c10/core/DeviceGuard.h>

namespace c10::cuda {
struct CUDAGuard {
  explicit CUDAGuard(Device device) : guard_(device) {}
  c10::DeviceGuard guard_;
};
}  // namespace c10::cuda
