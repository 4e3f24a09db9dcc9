// Device-wide algorithms: CUB with nvcc, plain loops in the emulator. Only algorithms.cu contains
// both and includes CUB. If launches are kept, short prefix sums are one block of our own, and
// other algorithms cannot be kept. Also sums within warps and blocks. All take scratch memory from
// the workspace and release it.
//
// `capacity` is known on the host. It is at least the number of valid elements. Elements beyond the
// valid ones are also scanned, summed and sorted. For scans they may have any value, for sums they
// must be 0, and for sorts they must have the largest key, so that they come last.
#ifndef DEEPREDUCE_CUDA_ALGORITHMS_CUH
#define DEEPREDUCE_CUDA_ALGORITHMS_CUH

#include "cuda/launch.cuh"

namespace deepreduce {
namespace cuda {

// Exclusive prefix sum: out[i] = in[0] + ... + in[i - 1]. out may equal in. Sums wrap around.
void exclusive_sum(Device&, const uint32_t* in, uint32_t* out, uint64_t capacity);
void exclusive_sum(Device&, const uint64_t* in, uint64_t* out, uint64_t capacity);
// Inclusive prefix sum: out[i] = in[0] + ... + in[i].
void inclusive_sum(Device&, const uint32_t* in, uint32_t* out, uint64_t capacity);
void inclusive_sum(Device&, const uint64_t* in, uint64_t* out, uint64_t capacity);
// out[i] = max(in[0] ... in[i])
void inclusive_max(Device&, const uint32_t* in, uint32_t* out, uint64_t capacity);

// *out = the sum, or the largest, of all elements
void sum(Device&, const uint32_t* in, uint32_t* out, uint64_t capacity);
void sum(Device&, const uint64_t* in, uint64_t* out, uint64_t capacity);
void largest(Device&, const uint32_t* in, uint32_t* out, uint64_t capacity);

// Stable ascending radix sorts by the key bits [first_bit, last_bit). Input and output must not
// overlap.
void sort(Device&, const uint32_t* keys, uint32_t* sorted_keys, uint64_t capacity,
          int first_bit = 0, int last_bit = 32);
void sort(Device&, const uint64_t* keys, uint64_t* sorted_keys, uint64_t capacity,
          int first_bit = 0, int last_bit = 64);
void sort_pairs(Device&, const uint32_t* keys, uint32_t* sorted_keys, const uint32_t* items,
                uint32_t* sorted_items, uint64_t capacity, int first_bit = 0, int last_bit = 32);
void sort_pairs(Device&, const uint64_t* keys, uint64_t* sorted_keys, const uint32_t* items,
                uint32_t* sorted_items, uint64_t capacity, int first_bit = 0, int last_bit = 64);

// Returns the sum of `value` over this lane and the lanes before it. All 32 lanes must call it.
template <class T>
__device__ inline T warp_inclusive_sum(T value) {
  const uint32_t lane = threadIdx.x % 32;
  for (uint32_t delta = 1; delta < 32; delta *= 2) {
    const T before = __shfl_up_sync(0xFFFFFFFFu, value, delta);
    if (lane >= delta) value += before;
  }
  return value;
}

template <class T>
__device__ inline T warp_sum(T value) {
  for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, lanes);
  return value;
}

// Returns the sum over the threads before this one, and the sum over the block in *total. All
// threads of the block must call it, in whole warps. `shared`: 33 elements of shared memory of the
// block; they can be used again after the next barrier of the block.
template <class T>
__device__ inline T block_exclusive_sum(T value, T* shared, T* total) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const T inclusive = warp_inclusive_sum(value);
  if (lane == 31) shared[warp] = inclusive;
  __syncthreads();
  if (warp == 0) {
    const T mine = lane < warps ? shared[lane] : T(0);
    const T upto = warp_inclusive_sum(mine);
    __syncwarp();
    shared[lane] = upto - mine;
    if (lane == 31) shared[32] = upto;
  }
  __syncthreads();
  *total = shared[32];
  return shared[warp] + inclusive - value;
}

// Adds the sum over the block to *at, with one atomic operation per block, because atomics of many
// warps on one address would wait for each other. Called like block_exclusive_sum.
__device__ inline void add_block_sum(uint64_t value, uint64_t* shared, uint64_t* at) {
  uint64_t total;
  block_exclusive_sum(value, shared, &total);
  if (threadIdx.x == 0 && total != 0) atomic_add(at, total);
}

}  // namespace cuda
}  // namespace deepreduce
#endif
