// For tests: the emulator, and the sums within warps and blocks.
#include <cstdio>
#include <stdexcept>

#include "cuda/algorithms.cuh"

using namespace deepreduce;
using namespace deepreduce::cuda;

namespace {

__device__ void block_sums(const uint32_t* in, uint32_t* before, uint32_t* totals) {
  __shared__ uint32_t shared[33];
  uint32_t total;
  const uint32_t i = grid_index();
  before[i] = block_exclusive_sum(in[i], shared, &total);
  if (threadIdx.x == 0) totals[blockIdx.x] = total;
}

// Each thread writes its element, all wait, and each reads the element of another thread: through
// shared memory, then by shuffles.
__device__ void exchange(uint32_t* by_memory, uint32_t* by_xor, uint32_t* by_up, uint32_t* votes,
                         uint32_t* odd_lanes) {
  uint32_t* shared = dynamic_shared<uint32_t>();
  shared[threadIdx.x] = grid_index();
  __syncthreads();
  by_memory[grid_index()] = shared[blockDim.x - 1 - threadIdx.x];
  by_xor[grid_index()] = __shfl_xor_sync(0xFFFFFFFFu, grid_index(), 5);
  by_up[grid_index()] = __shfl_up_sync(0xFFFFFFFFu, grid_index(), 3u);
  votes[grid_index()] = __ballot_sync(0xFFFFFFFFu, threadIdx.x % 3 == 0);
  if (threadIdx.x % 2 == 1) odd_lanes[grid_index()] = __shfl_sync(0xAAAAAAAAu, grid_index(), 7);
}

__device__ void one_misses_the_barrier() {
  if (threadIdx.x != 3) __syncthreads();
}

__device__ void one_misses_the_vote() {
  if (threadIdx.x != 3) __syncwarp();
}

__device__ void waits() { __syncthreads(); }

// Each thread reads what another thread wrote: in its own block, without waiting or after a
// barrier, or in the previous block.
__device__ void neighbours(uint32_t* numbers, bool waits, uint32_t distance) {
  const uint32_t i = grid_index();
  numbers[i] = i;
  if (waits) __syncthreads();
  if (i >= distance) numbers[gridDim.x * blockDim.x + i] = numbers[i - distance];
}

template <class Kernel>
int message_of(Kernel kernel, char* message) {
  try {
    kernel();
  } catch (const std::runtime_error& error) {
    std::snprintf(message, 512, "%s", error.what());
    return 1;
  }
  return 0;
}

}  // namespace

extern "C" {

void dr_test_block_sums(const uint32_t* in, uint32_t blocks, uint32_t threads, uint32_t* before,
                        uint32_t* totals) {
  alignas(256) static uint8_t workspace[256];
  Device device(workspace, sizeof(workspace), nullptr, nullptr);
  launch<block_sums>(device, blocks, threads, 0, in, before, totals);
}

void dr_test_exchange(uint32_t blocks, uint32_t threads, uint32_t* by_memory, uint32_t* by_xor,
                      uint32_t* by_up, uint32_t* votes, uint32_t* odd_lanes) {
  alignas(256) static uint8_t workspace[256];
  Device device(workspace, sizeof(workspace), nullptr, nullptr);
  launch<exchange>(device, blocks, threads, 4 * threads, by_memory, by_xor, by_up, votes,
                   odd_lanes);
}

// Kernels that break the rules: 0: not all threads reach a barrier; 1: not all lanes reach a vote;
// 2: a barrier in a kernel that was started without barriers.
int dr_test_broken_kernel(int which, char* message) {
  alignas(256) static uint8_t workspace[256];
  Device device(workspace, sizeof(workspace), nullptr, nullptr);
  if (which == 0)
    return message_of([&] { launch<one_misses_the_barrier>(device, 2, 64, 0); }, message);
  if (which == 1)
    return message_of([&] { launch<one_misses_the_vote>(device, 2, 64, 0); }, message);
  return message_of([&] { launch_elementwise<waits>(device, 2); }, message);
}

// For ThreadSanitizer: 0: no race; 1: a race within blocks; 2: a race between blocks.
void dr_test_race(int which) {
  alignas(256) static uint8_t workspace[4096];
  Device device(workspace, sizeof(workspace), nullptr, nullptr);
  uint32_t* numbers = device.array<uint32_t>(2 * 2 * 64);
  const uint32_t threads = 64;
  if (which == 2) return launch<neighbours>(device, 2, threads, 0, numbers, true, threads);
  launch<neighbours>(device, 1, threads, 0, numbers, which == 0, 1);
}

uint64_t dr_test_last_recorded_size() { return emulation::last_recorded_size(); }

}  // extern "C"
