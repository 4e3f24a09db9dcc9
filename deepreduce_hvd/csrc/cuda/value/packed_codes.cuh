// Codes of 1 to 8 bits, packed by a block and written to a section at any address.
#ifndef DEEPREDUCE_CUDA_VALUE_PACKED_CODES_CUH
#define DEEPREDUCE_CUDA_VALUE_PACKED_CODES_CUH

#include "cuda/device.cuh"

namespace deepreduce {
namespace cuda {

constexpr uint32_t kCodeTile = 8 * kThreads;  // codes that a block packs at a time: whole bytes

// Host: returns the maximum number of codes, of at least one bit, in `bytes` bytes.
inline uint32_t most_codes(uint64_t bytes) {
  return static_cast<uint32_t>(std::min<uint64_t>(UINT32_MAX, 8 * bytes));
}

// Copies to any address: bytes up to a multiple of 4, then words, then bytes. All threads of the
// block must call it.
__device__ inline void copy_out(const uint8_t* shared, uint8_t* to, uint32_t bytes) {
  const uint32_t lead =
      smaller(bytes, static_cast<uint32_t>((4 - reinterpret_cast<uintptr_t>(to) % 4) % 4));
  const uint32_t words = (bytes - lead) / 4;
  for (uint32_t w = threadIdx.x; w < words; w += blockDim.x)
    *reinterpret_cast<uint32_t*>(to + lead + 4 * w) = load_u32(shared + lead + 4 * w);
  for (uint32_t i = threadIdx.x; i < bytes; i += blockDim.x)
    if (i < lead || i >= lead + 4 * words) to[i] = shared[i];
}

// Packs a tile and writes it to byte `start` of the `code_bytes` bytes at `to`. codes and packed:
// (kCodeTile,) in shared memory; codes past the last one are 0. All kThreads threads of the block
// must call it. `codes` can be written again after it, `packed` after the next barrier.
__device__ inline void write_codes(const uint8_t* codes, uint8_t* packed, unsigned bits,
                                   uint64_t start, uint64_t code_bytes, uint8_t* to) {
  __syncthreads();
  uint64_t word = 0;
  for (unsigned j = 0; j < 8; ++j)
    word |= static_cast<uint64_t>(codes[8 * threadIdx.x + j]) << (j * bits);
  for (unsigned byte = 0; byte < bits; ++byte)
    packed[threadIdx.x * bits + byte] = static_cast<uint8_t>(word >> 8 * byte);
  __syncthreads();
  copy_out(packed, to + start,
           static_cast<uint32_t>(smaller<uint64_t>(uint64_t{kThreads} * bits, code_bytes - start)));
}

}  // namespace cuda
}  // namespace deepreduce
#endif
