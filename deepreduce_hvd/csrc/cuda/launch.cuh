// Launches of kernels: at once, or kept, so that the same launches of several tensors become one.
//
// Most tensors of a network are small, and starting a kernel for each of them takes longer than
// running it. So the launches of tensors of similar size are kept, and each kernel is started once
// for all of them. The y index of a block is then the number of its tensor. All tensors get the
// largest grid and the most shared memory of any of them.
#ifndef DEEPREDUCE_CUDA_LAUNCH_CUH
#define DEEPREDUCE_CUDA_LAUNCH_CUH

#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "cuda/device.cuh"

#ifndef __CUDACC__
#include "scheduler.h"
#endif

namespace deepreduce {
namespace cuda {

// The grid of a launch. Static and dynamic shared memory of a block together are at most 48 KB, the
// limit of a kernel that does not ask for more.
struct Grid {
  uint32_t blocks, threads, shared_bytes;
};

// The arguments of a kernel, in device memory.
template <class... Parameters>
struct Arguments {};
template <class First, class... Rest>
struct Arguments<First, Rest...> {
  static_assert(std::is_trivially_copyable<First>::value && !std::is_reference<First>::value,
                "the arguments of a kernel are copied to the device");
  First first;
  Arguments<Rest...> rest;
};

template <class... None>
Arguments<> as_arguments() {
  return {};
}
template <class First, class... Rest>
Arguments<First, Rest...> as_arguments(First first, Rest... rest) {
  return {first, as_arguments<Rest...>(rest...)};
}

template <auto kernel, class... Done>
__device__ void call(const Arguments<>&, Done... done) {
  kernel(done...);
}
template <auto kernel, class First, class... Rest, class... Done>
__device__ void call(const Arguments<First, Rest...>& from, Done... done) {
  call<kernel>(from.rest, done..., from.first);
}

#ifdef __CUDACC__
template <auto kernel, uint32_t most_threads, class... Parameters>
__global__ void __launch_bounds__(most_threads) once(Parameters... parameters) {
  kernel(parameters...);
}
template <auto kernel, uint32_t most_threads, class... Parameters>
__global__ void __launch_bounds__(most_threads) for_each(const Arguments<Parameters...>* tensors) {
  call<kernel>(tensors[blockIdx.y]);
}
// Throws if the last launch failed, and names its kernel.
void check_launch(const void* kernel);
#endif

// Starts a kernel for `count` tensors. `tensors`: the Arguments of each, in device memory.
using StartForEach = void (*)(const void* tensors, uint32_t count, const Grid&, cudaStream_t);

template <auto kernel, uint32_t most_threads, bool fibers, class... Parameters>
void start_for_each(const void* tensors, uint32_t count, const Grid& grid,
                    [[maybe_unused]] cudaStream_t stream) {
  const auto* arguments = static_cast<const Arguments<Parameters...>*>(tensors);
#ifdef __CUDACC__
  const auto started = for_each<kernel, most_threads, Parameters...>;
  started<<<dim3(grid.blocks, count), grid.threads, grid.shared_bytes, stream>>>(arguments);
  check_launch(reinterpret_cast<const void*>(started));
#else
  emulation::submit([=] {
    for (uint32_t n = 0; n < count; ++n) {
      // no result may depend on the order of tensors
      const bool forward = emulation::options().schedule == emulation::Schedule::forward;
      const uint32_t i = forward ? n : count - 1 - n;
      emulation::run(grid.blocks, grid.threads, grid.shared_bytes, fibers,
                     [&] { call<kernel>(arguments[i]); });
    }
  });
#endif
}

// A launch for one tensor. Those with the same `start` have the same kernel and size of arguments.
struct KeptLaunch {
  StartForEach start;
  Grid grid;
  std::vector<uint8_t> arguments;
};

// The launches for one tensor.
class KeptLaunches {
 public:
  void add(KeptLaunch launch) { launches_.push_back(std::move(launch)); }
  // Notes that this tensor has work that cannot be kept.
  void add_other() { complete_ = false; }
  bool complete() const { return complete_; }
  const std::vector<KeptLaunch>& launches() const { return launches_; }

 private:
  std::vector<KeptLaunch> launches_;
  bool complete_ = true;
};

template <auto kernel, uint32_t most_threads, bool fibers, class... Parameters, class... Given>
void launch_with(Device& device, void (*)(Parameters...), const Grid& grid, Given... given) {
  if (KeptLaunches* kept = device.kept()) {
    const auto arguments = as_arguments<Parameters...>(static_cast<Parameters>(given)...);
    std::vector<uint8_t> bytes(sizeof(arguments));
    std::memcpy(bytes.data(), &arguments, sizeof(arguments));
    return kept->add(
        {start_for_each<kernel, most_threads, fibers, Parameters...>, grid, std::move(bytes)});
  }
  if (device.measuring()) return;
#ifdef __CUDACC__
  const auto started = once<kernel, most_threads, Parameters...>;
  started<<<grid.blocks, grid.threads, grid.shared_bytes, device.stream()>>>(
      static_cast<Parameters>(given)...);
  check_launch(reinterpret_cast<const void*>(started));
#else
  emulation::submit([=] {
    emulation::run(grid.blocks, grid.threads, grid.shared_bytes, fibers,
                   [&] { kernel(static_cast<Parameters>(given)...); });
  });
#endif
}

// Starts a kernel on the stream of the call, or keeps the launch. Does nothing while measuring.
// `threads` is at most `most_threads`.
template <auto kernel, uint32_t most_threads = kThreads, class... Given>
void launch(Device& device, uint32_t blocks, uint32_t threads, uint32_t shared_bytes,
            Given... given) {
  launch_with<kernel, most_threads, true>(device, kernel, Grid{blocks, threads, shared_bytes},
                                          given...);
}

// The same for kernels whose threads never wait for each other, so without __syncthreads and warp
// operations. The emulator runs them as a plain loop.
template <auto kernel, class... Given>
void launch_elementwise(Device& device, uint32_t blocks, Given... given) {
  launch_with<kernel, kThreads, false>(device, kernel, Grid{blocks, kThreads, 0}, given...);
}

}  // namespace cuda
}  // namespace deepreduce
#endif
