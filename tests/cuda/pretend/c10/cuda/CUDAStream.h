// In place of PyTorch's header of this name, for a pretended device: it works at once, there is nothing to wait for.
#pragma once
#include <c10/core/Device.h>

namespace c10::cuda {
struct CUDAStream {
  void* stream() const { return nullptr; }
  void synchronize() const {}
};
inline CUDAStream getCurrentCUDAStream(DeviceIndex = -1) { return {}; }
}  // namespace c10::cuda
