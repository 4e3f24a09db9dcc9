// What every kernel file builds on: the stream and workspace of a call, launches, and failures
// found on the device.
//
// The same sources are compiled by nvcc and, with tests/cuda/emulator on the include path, by the
// host's compiler for tests. Rules for kernels:
//   - they live in an anonymous namespace, take grids of one dimension, and are started by launch
//   or launch_elementwise only;
//   - static __shared__ arrays are of plain types without initialisers; dynamic shared memory comes
//   from dynamic_shared<T>();
//   - all threads of a block reach each __syncthreads, all lanes of a mask each warp operation: no
//   thread returns early before one;
//   - those of more than 256 threads tell so by __launch_bounds__, so that a block's registers are
//   there on every device;
//   - counts live in device memory: the host sizes grids by upper bounds, kernels go by
//   grid_index() and grid_stride();
//   - floats are summed in one fixed order; atomics are on integers only. Built with --fmad=false,
//   without fast math.
#ifndef DEEPREDUCE_CUDA_DEVICE_CUH
#define DEEPREDUCE_CUDA_DEVICE_CUH

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "base.h"
#include "cuda/failures.h"
#include "support/half.h"
#include "support/host_device.h"

#ifndef __CUDACC__
#include "scheduler.h"
#endif

namespace deepreduce {
namespace cuda {

constexpr uint32_t kThreads = 256;  // of a block, unless there is a reason
// of a grid that strides; more than any device holds at a time
constexpr uint32_t kMostBlocks = 4096;
constexpr uint64_t kAlignment = 256;  // of every array in the workspace

// One call's stream, workspace and result. While measuring, arrays are addresses that nobody may
// follow, nothing is launched or copied, and what the arrays take at most is the size query: host
// code must do the same whatever is on the device.
class Device {
 public:
  // The size query.
  Device() : measuring_(true) {}
  // `workspace`: device memory, 256-byte aligned; `result`: device memory.
  Device(void* workspace, uint64_t workspace_bytes, cudaStream_t stream, dr_cuda_result* result);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  bool measuring() const { return measuring_; }
  cudaStream_t stream() const { return stream_; }
  dr_cuda_result* result() const { return result_; }  // device memory; null while measuring
  uint64_t most_used() const { return most_used_; }   // bytes of workspace, at its fullest

  // Room for `count` elements, not initialised (the emulator poisons it), aligned to 256 bytes. At
  // least one element.
  template <class T>
  T* array(uint64_t count) {
    static_assert(std::is_trivially_copyable<T>::value, "device memory holds plain data");
    if (count > (uint64_t{1} << 46) / sizeof(T)) Arena::out_of_memory(count, sizeof(T));
    return static_cast<T*>(take((count == 0 ? 1 : count) * sizeof(T)));
  }
  template <class T>
  T* zeros(uint64_t count) {
    T* memory = array<T>(count);
    zero(memory, count * sizeof(T));
    return memory;
  }
  // What is taken after mark() is given back by release(mark): only for scratch that later launches
  // no longer read. The stream keeps the order, so that memory may be taken again at once.
  uint64_t mark() const { return used_; }
  void release(uint64_t mark);

  // On the stream, device memory.
  void fill(void* memory, uint8_t byte, uint64_t bytes);
  void zero(void* memory, uint64_t bytes) { fill(memory, 0, bytes); }
  void copy(void* to, const void* from, uint64_t bytes);

  // Throws when the runtime refused what was asked of it last.
  void check(const char* what);

 private:
  void* take(uint64_t bytes);
  bool measuring_;
  uint8_t* memory_ = nullptr;
  uint64_t capacity_ = 0, used_ = 0, most_used_ = 0;
  cudaStream_t stream_ = nullptr;
  dr_cuda_result* result_ = nullptr;
};

// Blocks for that many items, `each` of them a thread; at least one, at most kMostBlocks.
inline uint32_t blocks_for(uint64_t items, uint32_t each = 1, uint32_t threads = kThreads) {
  const uint64_t a_block = uint64_t{threads} * each;
  return static_cast<uint32_t>(
      std::min<uint64_t>(std::max<uint64_t>((items + a_block - 1) / a_block, 1), kMostBlocks));
}

#ifdef __CUDACC__
#define DR_LAUNCH(needs_fibers)                               \
  kernel<<<blocks, threads, shared_bytes, device.stream()>>>( \
      static_cast<Parameters>(arguments)...);                 \
  device.check("launch")
#else
#define DR_LAUNCH(needs_fibers)                               \
  emulation::run(blocks, threads, shared_bytes, needs_fibers, \
                 [&] { kernel(static_cast<Parameters>(arguments)...); })
#endif

// Starts kernel<<<blocks, threads, shared_bytes>>>(arguments...) on the call's stream; does nothing
// while measuring. Static and dynamic shared memory are at most 48 KB together, as much as a kernel
// has without being given more.
template <class... Parameters, class... Arguments>
void launch(Device& device, void (*kernel)(Parameters...), uint32_t blocks, uint32_t threads,
            uint32_t shared_bytes, Arguments... arguments) {
  if (device.measuring()) return;
  DR_LAUNCH(true);
}

// The same for kernels whose threads never wait for one another: no __syncthreads, no warp
// operation. The emulator runs them as a plain loop.
template <class... Parameters, class... Arguments>
void launch_elementwise(Device& device, void (*kernel)(Parameters...), uint32_t blocks,
                        Arguments... arguments) {
  if (device.measuring()) return;
  constexpr uint32_t threads = kThreads, shared_bytes = 0;
  DR_LAUNCH(false);
}
#undef DR_LAUNCH

__device__ inline uint32_t grid_index() { return blockIdx.x * blockDim.x + threadIdx.x; }
__device__ inline uint32_t grid_stride() { return gridDim.x * blockDim.x; }

// The shared memory that the launch asked for, 16-byte aligned.
template <class T>
__device__ inline T* dynamic_shared() {
#ifdef __CUDACC__
  extern __shared__ __align__(16) unsigned char dr_dynamic_shared[];
  return reinterpret_cast<T*>(dr_dynamic_shared);
#else
  return static_cast<T*>(emulation::dynamic_shared());
#endif
}

// Records a failure; the first one stays.
__device__ inline void refuse(dr_cuda_result* result, Refused what, uint64_t expected,
                              uint64_t got) {
  int32_t status = DR_OK;
  switch (what) {
    case Refused::nothing:
      return;
#define DR_CASE(name, its_status, text) \
  case Refused::name:                   \
    status = its_status;                \
    break;
      DR_CUDA_FAILURES(DR_CASE)
#undef DR_CASE
  }
  if (atomicCAS(&result->status, static_cast<int32_t>(DR_OK), status) != DR_OK) return;
  result->code = static_cast<int32_t>(what);
  result->expected = expected;
  result->got = got;
}

// Whether something was refused before. Other blocks may refuse meanwhile: threads of a block can
// see different answers, see block_refused. Not volatile: each warp of a grid would then ask the
// same word of the L2 cache.
__device__ inline bool refused(const dr_cuda_result* result) { return result->status != DR_OK; }
// The same answer for all threads of the block; all must call it.
__device__ inline bool block_refused(const dr_cuda_result* result) {
  return __syncthreads_or(threadIdx.x == 0 && refused(result)) != 0;
}

// uint64_t is not among the types that CUDA's atomics name.
__device__ inline uint64_t atomic_add(uint64_t* at, uint64_t value) {
  return atomicAdd(reinterpret_cast<unsigned long long*>(at),
                   static_cast<unsigned long long>(value));
}
__device__ inline uint64_t atomic_or(uint64_t* at, uint64_t value) {
  return atomicOr(reinterpret_cast<unsigned long long*>(at),
                  static_cast<unsigned long long>(value));
}
__device__ inline uint64_t atomic_max(uint64_t* at, uint64_t value) {
  return atomicMax(reinterpret_cast<unsigned long long*>(at),
                   static_cast<unsigned long long>(value));
}
__device__ inline uint64_t atomic_min(uint64_t* at, uint64_t value) {
  return atomicMin(reinterpret_cast<unsigned long long*>(at),
                   static_cast<unsigned long long>(value));
}

// 4 or 8 bytes at any address.
__device__ inline uint32_t load_u32(const uint8_t* at) {
  return static_cast<uint32_t>(at[0]) | static_cast<uint32_t>(at[1]) << 8 |
         static_cast<uint32_t>(at[2]) << 16 | static_cast<uint32_t>(at[3]) << 24;
}
__device__ inline uint64_t load_u64(const uint8_t* at) {
  return load_u32(at) | static_cast<uint64_t>(load_u32(at + 4)) << 32;
}

}  // namespace cuda
}  // namespace deepreduce
#endif
