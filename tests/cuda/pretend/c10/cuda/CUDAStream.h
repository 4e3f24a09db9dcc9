// In place of PyTorch's header of this name, for a pretended device: only copies to the host are to
// be waited for (../../device.cc).
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
