// The part of CUDA that the kernels use, for compilation by the host's compiler (see scheduler.h).
// Kernels are ordinary functions. Each thread of a block is a fiber, so that barriers and warp
// operations can wait. Grids and blocks have one dimension.
#ifndef DEEPREDUCE_EMULATION_CUDA_RUNTIME_H
#define DEEPREDUCE_EMULATION_CUDA_RUNTIME_H

#include <cstdint>
#include <cstring>

#include "scheduler.h"

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
// in a separate section, so that the scheduler can poison all of them before each block
#define __shared__ static __attribute__((section("dr_shared"), aligned(16)))

using deepreduce::emulation::blockDim;
using deepreduce::emulation::blockIdx;
using deepreduce::emulation::gridDim;
using deepreduce::emulation::threadIdx;
constexpr int warpSize = 32;

struct __align__(8) uint2 {
  uint32_t x, y;
};
struct __align__(16) uint4 {
  uint32_t x, y, z, w;
};
struct __align__(8) float2 {
  float x, y;
};
struct __align__(16) float4 {
  float x, y, z, w;
};
struct __align__(16) double2 {
  double x, y;
};
struct __align__(16) ulonglong2 {
  unsigned long long x, y;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// Barriers and warp operations.
inline void __syncthreads() { deepreduce::emulation::block_barrier(0); }
inline int __syncthreads_count(int predicate) {
  return static_cast<int>(deepreduce::emulation::block_barrier(predicate != 0));
}
inline int __syncthreads_or(int predicate) {
  return deepreduce::emulation::block_barrier(predicate != 0) != 0;
}
inline int __syncthreads_and(int predicate) {
  return deepreduce::emulation::block_barrier(predicate == 0) == 0;
}
inline void __syncwarp(uint32_t mask = 0xFFFFFFFFu) { deepreduce::emulation::warp_barrier(mask); }
inline uint32_t __ballot_sync(uint32_t mask, int predicate) {
  return deepreduce::emulation::warp_vote(mask, predicate != 0);
}
inline int __any_sync(uint32_t mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(uint32_t mask, int predicate) {
  return __ballot_sync(mask, predicate) == mask;
}

namespace deepreduce {
namespace emulation {
template <class T>
T shuffle(uint32_t mask, T value, uint32_t from_lane) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "warp shuffles move 4 or 8 bytes");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = warp_exchange(mask, bits, from_lane);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}
}  // namespace emulation
}  // namespace deepreduce

template <class T>
T __shfl_sync(uint32_t mask, T value, int lane, int width = 32) {
  const uint32_t mine = threadIdx.x % 32,
                 first = mine / static_cast<uint32_t>(width) * static_cast<uint32_t>(width);
  return deepreduce::emulation::shuffle(
      mask, value, first + static_cast<uint32_t>(lane) % static_cast<uint32_t>(width));
}
template <class T>
T __shfl_up_sync(uint32_t mask, T value, uint32_t delta, int width = 32) {
  const uint32_t mine = threadIdx.x % 32, within = mine % static_cast<uint32_t>(width);
  return deepreduce::emulation::shuffle(mask, value, within < delta ? mine : mine - delta);
}
template <class T>
T __shfl_down_sync(uint32_t mask, T value, uint32_t delta, int width = 32) {
  const uint32_t mine = threadIdx.x % 32, within = mine % static_cast<uint32_t>(width);
  return deepreduce::emulation::shuffle(
      mask, value, within + delta >= static_cast<uint32_t>(width) ? mine : mine + delta);
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T value, int lanes, int width = 32) {
  const uint32_t mine = threadIdx.x % 32, other = mine ^ static_cast<uint32_t>(lanes);
  return deepreduce::emulation::shuffle(
      mask, value,
      other / static_cast<uint32_t>(width) > mine / static_cast<uint32_t>(width) ? mine : other);
}

// Atomics. Only one fiber runs at a time, and it switches only at barriers. The operations are
// atomic so that ThreadSanitizer accepts concurrent access.
template <class T>
T atomicAdd(T* at, T value) {
  return __atomic_fetch_add(at, value, __ATOMIC_RELAXED);
}
template <class T>
T atomicSub(T* at, T value) {
  return __atomic_fetch_sub(at, value, __ATOMIC_RELAXED);
}
template <class T>
T atomicOr(T* at, T value) {
  return __atomic_fetch_or(at, value, __ATOMIC_RELAXED);
}
template <class T>
T atomicAnd(T* at, T value) {
  return __atomic_fetch_and(at, value, __ATOMIC_RELAXED);
}
template <class T>
T atomicXor(T* at, T value) {
  return __atomic_fetch_xor(at, value, __ATOMIC_RELAXED);
}
template <class T>
T atomicExch(T* at, T value) {
  return __atomic_exchange_n(at, value, __ATOMIC_RELAXED);
}
template <class T>
T atomicCAS(T* at, T expected, T value) {
  __atomic_compare_exchange_n(at, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;  // the previous value
}
template <class T>
T atomicMax(T* at, T value) {
  const T old = __atomic_load_n(at, __ATOMIC_RELAXED);
  return old < value ? atomicExch(at, value) : old;
}
template <class T>
T atomicMin(T* at, T value) {
  const T old = __atomic_load_n(at, __ATOMIC_RELAXED);
  return value < old ? atomicExch(at, value) : old;
}
inline void __threadfence() {}
inline void __threadfence_block() {}

// Bits.
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<uint32_t>(x)); }
inline int __clzll(long long x) {
  return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x));
}
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(static_cast<uint64_t>(a) * b >> 32);
}
inline uint32_t __brev(uint32_t x) {
  uint32_t result = 0;
  for (int bit = 0; bit < 32; ++bit) result |= (x >> bit & 1u) << (31 - bit);
  return result;
}
template <class T>
T __ldg(const T* at) {
  return *at;
}
template <class T>
T __ldcs(const T* at) {
  return *at;
}
template <class T>
void __stcs(T* at, T value) {
  *at = value;
}

// The runtime: device memory is host memory, and a stream executes everything at once, unless a
// graph is recorded. All streams belong to the recording.
typedef struct EmulatedStream* cudaStream_t;
enum cudaError_t { cudaSuccess = 0 };
inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaMemsetAsync(void* to, int byte, size_t bytes, cudaStream_t) {
  deepreduce::emulation::submit([=] {
    if (bytes != 0) std::memset(to, byte, bytes);
  });
  return cudaSuccess;
}
enum cudaMemcpyKind {
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToDevice = 3,
  cudaMemcpyDefault = 4
};
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                                   cudaStream_t) {
  deepreduce::emulation::submit([=] {
    if (bytes != 0) std::memmove(to, from, bytes);
  });
  return cudaSuccess;
}
enum { cudaStreamNonBlocking = 1 };
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = nullptr;
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
typedef struct EmulatedEvent* cudaEvent_t;
enum { cudaEventBlockingSync = 1, cudaEventDisableTiming = 2 };
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = nullptr;
  return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }

typedef void* cudaGraph_t;
typedef void* cudaGraphExec_t;
enum cudaStreamCaptureMode { cudaStreamCaptureModeRelaxed = 2 };
inline cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
  deepreduce::emulation::begin_recording();
  return cudaSuccess;
}
inline cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  *graph = deepreduce::emulation::end_recording();
  return cudaSuccess;
}
inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t* instance, cudaGraph_t graph,
                                        unsigned long long) {
  *instance = graph;
  return cudaSuccess;
}
inline cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t instance, cudaStream_t) {
  deepreduce::emulation::replay(instance);
  return cudaSuccess;
}
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t instance) {
  deepreduce::emulation::forget(instance);
  return cudaSuccess;
}

#endif
