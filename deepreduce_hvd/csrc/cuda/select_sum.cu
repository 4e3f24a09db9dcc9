// The two passes over the whole gradient: check that it is finite, and add it to the memory.
#include "cuda/algorithms.cuh"
#include "cuda/select.cuh"

namespace deepreduce {
namespace cuda {
namespace {

enum MemoryKind { kNone, kAdds, kMomentum };

// Loads `n` of 4 elements. `aligned`: use vector accesses if all 4 exist.
template <class T>
struct __align__(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) Four {
  T each[4];
};

template <class T>
__device__ Four<T> load(const T* at, uint32_t n, bool aligned) {
  if (aligned && n == 4) return *reinterpret_cast<const Four<T>*>(at);
  Four<T> four = {};
  for (uint32_t i = 0; i < 4; ++i)
    if (i < n) four.each[i] = at[i];
  return four;
}

template <class T>
__device__ void store(T* at, uint32_t n, bool aligned, const Four<T>& four) {
  if (aligned && n == 4) {
    *reinterpret_cast<Four<T>*>(at) = four;
    return;
  }
  for (uint32_t i = 0; i < 4; ++i)
    if (i < n) at[i] = four.each[i];
}

__device__ bool is_aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

// Return where vector `v` of this thread begins in the tile, and how many elements it has there, up
// to 4.
__device__ uint32_t first_of(uint32_t tile, uint32_t v) {
  return tile * kTile + (v * kThreads + threadIdx.x) * 4;
}
__device__ uint32_t length_at(uint32_t first, uint32_t d) {
  return first >= d ? 0 : d - first < 4 ? d - first : 4;
}

template <class Number>
__device__ const typename Number::Storage* gradient_of(const Inputs* inputs) {
  return static_cast<const typename Number::Storage*>(inputs->gradient);
}

template <class Number>
__device__ void finite(const Inputs* inputs, uint32_t d, uint32_t tiles, dr_cuda_result* result) {
  const auto* gradient = gradient_of<Number>(inputs);
  const bool aligned = is_aligned(gradient);
  bool bad = false;
  // from the last tile down (below 0 the counter wraps): `add` begins with the first tiles, which
  // are then still in the cache
  for (uint32_t tile = tiles - 1 - blockIdx.x; tile < tiles; tile -= gridDim.x) {
    // load all vectors before using the first one
    Four<typename Number::Storage> numbers[kVectors];
    for (uint32_t v = 0; v < kVectors; ++v)
      numbers[v] = load(gradient + first_of(tile, v), length_at(first_of(tile, v), d), aligned);
    for (uint32_t v = 0; v < kVectors; ++v)
      for (int i = 0; i < 4; ++i)
        bad |= magnitude_bits(Number::to_float(numbers[v].each[i])) >= 0x7F800000u;
  }
  if (bad) result->non_finite = 1;  // all threads that write it write the same value
}

template <class Number, int memory>
__device__ void add(const Inputs* inputs, uint32_t d, float* residual, float* velocity,
                    float momentum, Candidates candidates, const dr_cuda_result* result) {
  __shared__ uint64_t sums[33];
  __shared__ uint32_t place;
  if (result->non_finite != 0) return;
  const auto* gradient = gradient_of<Number>(inputs);
  const bool aligned = is_aligned(gradient) && is_aligned(residual) && is_aligned(velocity);
  const bool collects = candidates.limit != nullptr;
  const uint32_t limit = collects ? *candidates.limit : UINT32_MAX;
  const uint32_t tiles = (d + kTile - 1) / kTile;
  for (uint32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    Four<typename Number::Storage> added[kVectors];
    Four<float> sum[kVectors], speed[kVectors];
    for (uint32_t v = 0; v < kVectors; ++v) {  // load all before using the first one
      const uint32_t first = first_of(tile, v), n = length_at(first, d);
      added[v] = load(gradient + first, n, aligned);
      if (memory != kNone) sum[v] = load(residual + first, n, aligned);
      if (memory == kMomentum) speed[v] = load(velocity + first, n, aligned);
    }
    uint64_t collected = 0;  // numbers per vector, 16 bits each
    for (uint32_t v = 0; v < kVectors; ++v) {
      const uint32_t first = first_of(tile, v), n = length_at(first, d);
      for (int i = 0; i < 4; ++i) {
        const float number = Number::to_float(added[v].each[i]);
        if (memory == kMomentum)
          speed[v].each[i] = next_velocity(momentum, speed[v].each[i], number);
        sum[v].each[i] =
            memory == kNone
                ? number
                : next_sum(sum[v].each[i], memory == kMomentum ? speed[v].each[i] : number);
        // limit >= 1 excludes missing elements, which are 0
        collected += static_cast<uint64_t>(magnitude_bits(sum[v].each[i]) >= limit) << (16 * v);
      }
      if (memory == kMomentum) store(velocity + first, n, aligned, speed[v]);
      if (memory != kNone) store(residual + first, n, aligned, sum[v]);
    }
    if (!collects) continue;
    uint64_t total;
    uint64_t before = block_exclusive_sum(collected, sums, &total);
    if (threadIdx.x == 0) {
      uint32_t count = 0;
      for (uint32_t v = 0; v < kVectors; ++v)
        count += static_cast<uint32_t>(total >> (16 * v) & 0xFFFFu);
      place = atomicAdd(candidates.found, count);
      candidates.starts[tile] = place;
      candidates.counts[tile] = count;
    }
    __syncthreads();
    uint32_t vector_start = place;
    for (uint32_t v = 0; v < kVectors; ++v) {
      uint32_t at = vector_start + static_cast<uint32_t>(before >> (16 * v) & 0xFFFFu);
      vector_start += static_cast<uint32_t>(total >> (16 * v) & 0xFFFFu);
      if ((collected >> (16 * v) & 0xFFFFu) == 0) continue;
      for (uint32_t i = 0; i < 4; ++i) {
        if (magnitude_bits(sum[v].each[i]) < limit) continue;
        if (at < candidates.capacity) {
          candidates.indices[at] = first_of(tile, v) + i;
          candidates.values[at] = sum[v].each[i];
        }
        ++at;
      }
    }
    __syncthreads();
  }
}

template <class Number, int memory>
void start_add(Device& device, const dr_codec& codec, const Encoding& encoding,
               const Candidates& candidates) {
  launch<add<Number, memory>>(device, std::min(tiles_of(encoding.d), kMostBlocks), kThreads, 0,
                              encoding.inputs, static_cast<uint32_t>(encoding.d), encoding.residual,
                              encoding.velocity, static_cast<float>(codec.memory.parameters[0]),
                              candidates, device.result());
}

}  // namespace

void find_non_finite(Device& device, const Encoding& encoding) {
  with_numbers(encoding.dtype, [&](auto number) {
    using Number = decltype(number);
    launch_elementwise<finite<Number>>(device, blocks_for(encoding.d, 4 * kVectors),
                                       encoding.inputs, static_cast<uint32_t>(encoding.d),
                                       tiles_of(encoding.d), device.result());
  });
}

void accumulate(Device& device, const dr_codec& codec, const Encoding& encoding,
                const Candidates& candidates) {
  if (encoding.d == 0 || (encoding.residual == nullptr && candidates.limit == nullptr)) return;
  with_numbers(encoding.dtype, [&](auto number) {
    using Number = decltype(number);
    switch (codec.memory.id) {
      case kNoMemory:
        return start_add<Number, kNone>(device, codec, encoding, candidates);
      case kMomentumCorrection:
        return start_add<Number, kMomentum>(device, codec, encoding, candidates);
      default:
        return start_add<Number, kAdds>(device, codec, encoding, candidates);
    }
  });
}

}  // namespace cuda
}  // namespace deepreduce
