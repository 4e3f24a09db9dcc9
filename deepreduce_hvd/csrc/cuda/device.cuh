// The base of every kernel file: the stream and workspace of a call, launches, and failures found
// on the device.
//
// The same sources are compiled by nvcc and, for tests, by the host's compiler with
// tests/cuda/emulator on the include path. Rules for kernels:
//   - Kernels are __device__ functions in an anonymous namespace, run on one-dimensional grids, and
//     are started only by launch or launch_elementwise of launch.cuh.
//   - Static __shared__ arrays have plain types without initializers. Dynamic shared memory comes
//     from dynamic_shared<T>().
//   - All threads of a block reach each __syncthreads, and all lanes of a mask reach each warp
//     operation. No thread returns before one.
//   - Kernels with more than 256 threads are launched with their number as a template argument, so
//     that every device has enough registers for a block.
//   - Counts are in device memory. The host sizes grids by upper bounds, and kernels use
//     grid_index() and grid_stride(). A grid may have more blocks than the host asked for, because
//     tensors share launches. Work with a sort has exactly the blocks that it asked for, because
//     its launches are not kept (KeptLaunches::add_other).
//   - Floats are summed in one fixed order. Atomics operate on integers only. The build uses
//     --fmad=false and no fast math.
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

namespace deepreduce {
namespace cuda {

constexpr uint32_t kThreads = 256;  // per block, unless a kernel needs another number
// of a grid with a stride loop; more than any device runs at a time
constexpr uint32_t kMostBlocks = 4096;
constexpr uint64_t kAlignment = 256;  // bytes, of every array in the workspace

class KeptLaunches;

// The stream, workspace and result of one call. While measuring, arrays have invalid addresses, and
// nothing is launched or copied. The result of measuring is the peak size of the arrays. So host
// code must do the same whatever the device memory contains.
//
// A device can keep launches, fills and copies in place of starting them, to start those of several
// tensors together.
class Device {
 public:
  // Makes a device that measures the size of the workspace. `kept`: gets the launches, whose
  // addresses are invalid, or null.
  explicit Device(KeptLaunches* kept = nullptr) : measuring_(true), kept_(kept) {}
  // `workspace`: device memory, 256-byte aligned; `result`: device memory.
  Device(void* workspace, uint64_t workspace_bytes, cudaStream_t stream, dr_cuda_result* result);
  // Makes a device that keeps what it would start on a stream.
  Device(void* workspace, uint64_t workspace_bytes, KeptLaunches& kept, dr_cuda_result* result);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  bool measuring() const { return measuring_; }
  KeptLaunches* kept() const { return kept_; }  // null if work is started at once
  cudaStream_t stream() const { return stream_; }
  dr_cuda_result* result() const { return result_; }  // device memory; null while measuring
  uint64_t most_used() const { return most_used_; }   // peak size of the workspace in bytes
  // The maximum size of the payload of this encoding.
  void set_payload_capacity(uint64_t bytes) { payload_capacity_ = bytes; }
  uint64_t payload_capacity() const { return payload_capacity_; }

  // Returns memory for `count` elements, at least one. It is not initialized (the emulator poisons
  // it), and aligned to 256 bytes.
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
  // release(mark) releases everything taken after mark(). Use it only for scratch memory that later
  // launches do not read. The stream keeps launches in order, so the memory can be taken again at
  // once.
  uint64_t mark() const { return used_; }
  void release(uint64_t mark);

  // Set and copy device memory, on the stream.
  void fill(void* memory, uint8_t byte, uint64_t bytes);
  void zero(void* memory, uint64_t bytes) { fill(memory, 0, bytes); }
  void copy(void* to, const void* from, uint64_t bytes);

  // Throws if the last call of the CUDA runtime failed.
  void check(const char* what);

 private:
  void* take(uint64_t bytes);
  bool measuring_;
  uint8_t* memory_ = nullptr;
  uint64_t capacity_ = 0, used_ = 0, most_used_ = 0, payload_capacity_ = 0;
  cudaStream_t stream_ = nullptr;
  KeptLaunches* kept_ = nullptr;
  dr_cuda_result* result_ = nullptr;
};

// Throws a failure of the CUDA runtime.
void throw_if_failed(cudaError_t error, const char* what);

// Returns the number of blocks for `items` items, `each` per thread: at least one, at most
// kMostBlocks.
inline uint32_t blocks_for(uint64_t items, uint32_t each = 1, uint32_t threads = kThreads) {
  const uint64_t a_block = uint64_t{threads} * each;
  return static_cast<uint32_t>(
      std::min<uint64_t>(std::max<uint64_t>((items + a_block - 1) / a_block, 1), kMostBlocks));
}

__device__ inline uint32_t grid_index() { return blockIdx.x * blockDim.x + threadIdx.x; }
__device__ inline uint32_t grid_stride() { return gridDim.x * blockDim.x; }

// Returns the dynamic shared memory of the launch, 16-byte aligned.
template <class T>
__device__ inline T* dynamic_shared() {
#ifdef __CUDACC__
  extern __shared__ __align__(16) unsigned char dr_dynamic_shared[];
  return reinterpret_cast<T*>(dr_dynamic_shared);
#else
  return static_cast<T*>(emulation::dynamic_shared());
#endif
}

// Records a failure. Only the first one is kept.
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

// Returns whether a failure was recorded before. Other blocks may record one at the same time, so
// threads of a block can get different answers: see block_refused. The read is not volatile,
// because otherwise every warp of a grid would read the same word from the L2 cache.
__device__ inline bool refused(const dr_cuda_result* result) { return result->status != DR_OK; }
// Returns the same answer for all threads of the block. All must call it.
__device__ inline bool block_refused(const dr_cuda_result* result) {
  return __syncthreads_or(threadIdx.x == 0 && refused(result)) != 0;
}

// CUDA has no atomicAdd for the type uint64_t.
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

// Read 4 or 8 bytes at any address.
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
