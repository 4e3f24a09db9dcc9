#include "cuda/device.cuh"

#include <cstdio>

#include "cuda/launch.cuh"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace deepreduce {
namespace cuda {

namespace {
// In the emulator there are gaps between arrays, which AddressSanitizer guards.
#ifdef __CUDACC__
constexpr uint64_t kDistance = 0;
#else
constexpr uint64_t kDistance = kAlignment;
#endif

uint64_t rounded(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

__device__ void fill_bytes(uint8_t* memory, uint32_t word, uint64_t bytes) {
  const bool aligned = reinterpret_cast<uintptr_t>(memory) % sizeof(word) == 0;
  const uint64_t words = aligned ? bytes / sizeof(word) : 0;
  for (uint64_t i = grid_index(); i < words; i += grid_stride())
    reinterpret_cast<uint32_t*>(memory)[i] = word;
  for (uint64_t i = words * sizeof(word) + grid_index(); i < bytes; i += grid_stride())
    memory[i] = static_cast<uint8_t>(word);
}

__device__ void copy_bytes(uint8_t* to, const uint8_t* from, uint64_t bytes) {
  for (uint64_t i = grid_index(); i < bytes; i += grid_stride()) to[i] = from[i];
}
}  // namespace

Device::Device(void* workspace, uint64_t workspace_bytes, cudaStream_t stream,
               dr_cuda_result* result)
    : measuring_(false), capacity_(workspace_bytes), stream_(stream), result_(result) {
  if (reinterpret_cast<uintptr_t>(workspace) % kAlignment != 0)
    invalid_argument("workspace: expected memory aligned to %llu bytes, got %p",
                     static_cast<unsigned long long>(kAlignment), workspace);
  memory_ = static_cast<uint8_t*>(workspace);
#if defined(__SANITIZE_ADDRESS__)
  __asan_poison_memory_region(workspace, workspace_bytes);
#endif
}

Device::Device(void* workspace, uint64_t workspace_bytes, KeptLaunches& kept,
               dr_cuda_result* result)
    : Device(workspace, workspace_bytes, cudaStream_t{}, result) {
  kept_ = &kept;
}

Device::~Device() {
#if defined(__SANITIZE_ADDRESS__)
  if (!measuring_) __asan_unpoison_memory_region(memory_, capacity_);
#endif
}

void* Device::take(uint64_t bytes) {
  const uint64_t start = used_;
  used_ = start + rounded(bytes) + kDistance;
  most_used_ = std::max(most_used_, used_);
  // any address will do
  if (measuring_) return reinterpret_cast<void*>(static_cast<uintptr_t>(kAlignment + start));
  if (used_ > capacity_)
    invalid_argument("workspace: expected at least %llu bytes, got %llu",
                     static_cast<unsigned long long>(used_),
                     static_cast<unsigned long long>(capacity_));
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(memory_ + start, bytes);
#endif
#ifndef __CUDACC__
  std::memset(memory_ + start, emulation::options().poison, bytes);
#endif
  return memory_ + start;
}

void Device::release(uint64_t mark) {
#if defined(__SANITIZE_ADDRESS__)
  if (!measuring_) __asan_poison_memory_region(memory_ + mark, used_ - mark);
#endif
  used_ = mark;
}

void Device::fill(void* memory, uint8_t byte, uint64_t bytes) {
  if (bytes == 0) return;
  if (kept_ != nullptr)
    return launch_elementwise<fill_bytes>(*this, blocks_for(bytes / sizeof(uint32_t), 4),
                                          static_cast<uint8_t*>(memory), byte * 0x01010101u, bytes);
  if (measuring_) return;
  if (cudaMemsetAsync(memory, byte, bytes, stream_) != cudaSuccess) check("filling memory");
}

void Device::copy(void* to, const void* from, uint64_t bytes) {
  if (bytes == 0) return;
  if (kept_ != nullptr)
    return launch_elementwise<copy_bytes>(*this, blocks_for(bytes), static_cast<uint8_t*>(to),
                                          static_cast<const uint8_t*>(from), bytes);
  if (measuring_) return;
  if (cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_) != cudaSuccess)
    check("copying memory");
}

void throw_if_failed(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  Failure failure;
  failure.status = DR_CUDA_ERROR;
  std::snprintf(failure.message, sizeof(failure.message), "CUDA, %s: %s", what,
                cudaGetErrorString(error));
  throw failure;
}

void Device::check(const char* what) { throw_if_failed(cudaGetLastError(), what); }

#ifdef __CUDACC__
void check_launch(const void* kernel) {
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return;
  const char* name = nullptr;
#if CUDART_VERSION >= 12030
  cudaFuncGetName(&name, kernel);
#endif
  throw_if_failed(error, name == nullptr ? "launch" : name);
}
#endif

}  // namespace cuda
}  // namespace deepreduce
