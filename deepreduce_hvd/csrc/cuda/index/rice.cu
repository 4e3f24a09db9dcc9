// Rice: a thread block encodes one block of 4096 indices of the format, in shared memory.
#include "cuda/algorithms.cuh"
#include "cuda/codecs.cuh"
#include "cuda/index/gap_bits.cuh"
#include "index/rice_layout.h"

namespace deepreduce {
namespace cuda {
namespace {

constexpr uint32_t kEach = kIndexBlock / kThreads;  // indices of a thread, one after another

__device__ uint32_t gap_at(const uint32_t* indices, uint32_t i) {
  return i == 0 ? indices[0] : indices[i] - indices[i - 1] - 1;
}

// Computes parameters[block], and the size of its data in bytes[block]. Up to most_blocks, missing
// blocks have 0 bytes.
__device__ void choose_parameters(const uint32_t* indices, const uint32_t* count_at,
                                  uint32_t most_blocks, uint32_t* parameters, uint32_t* bytes) {
  __shared__ uint32_t shared[3][33];
  const uint32_t count = *count_at, blocks = index_blocks(count);
  for (uint32_t block = blockIdx.x; block <= most_blocks; block += gridDim.x) {
    if (block >= blocks) {
      if (threadIdx.x == 0) bytes[block] = 0;
      continue;
    }
    const uint32_t first = block * kIndexBlock, n = indices_in_block(count, block);
    const uint32_t next = first == 0 ? 0 : indices[first - 1] + 1;
    const RiceCandidates candidates =
        rice_candidates(uint64_t{indices[first + n - 1]} + 1 - next - n, n);
    uint32_t mine[3] = {}, quotients[3];
    for (uint32_t i = threadIdx.x; i < n; i += kThreads) {
      const uint32_t gap = gap_at(indices, first + i) >> candidates.first;
      mine[0] += gap;
      mine[1] += gap >> 1;
      mine[2] += gap >> 2;
    }
    for (int c = 0; c < 3; ++c) block_exclusive_sum(mine[c], shared[c], &quotients[c]);
    if (threadIdx.x != 0) continue;
    const RiceParameter parameter = choose_rice_parameter(candidates, quotients, n);
    const uint64_t low_bits = uint64_t{n} * parameter.b;
    parameters[block] = parameter.b;
    bytes[block] = static_cast<uint32_t>((low_bits + 7) / 8 + (parameter.bits - low_bits + 7) / 8);
  }
}

// The best candidate takes no more bits than b = floor(log2(mean gap)) <= 30 does: per index, b low
// bits, a stop bit and less than two more unary bits, so less than 33. The data may begin at any
// byte of a word.
constexpr uint32_t kImageWords = (kIndexBlock * 33 / 8 + 2 + 3) / 4 + 1;

__device__ void put(uint32_t* image, uint32_t bit, uint32_t value, unsigned width) {
  const uint32_t word = bit / 32, place = bit % 32;
  if (value == 0) return;
  atomicOr(image + word, value << place);
  if (place + width > 32) atomicOr(image + word + 1, value >> (32 - place));
}

// starts: exclusive sums of bytes, with one more entry than blocks.
__device__ void write_blocks(const uint32_t* indices, const uint32_t* count_at,
                             const uint32_t* parameters, const uint32_t* starts, uint8_t* section,
                             uint64_t* section_bytes) {
  __shared__ uint32_t image[kImageWords];
  __shared__ uint32_t shared[33];
  const uint32_t count = *count_at, blocks = index_blocks(count);
  const uint64_t header = rice_head_bytes(blocks);
  if (grid_index() == 0) *section_bytes = header + starts[blocks];
  for (uint32_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const uint32_t first = block * kIndexBlock, n = indices_in_block(count, block),
                   b = parameters[block];
    const uint64_t at = header + starts[block];
    const uint32_t bytes = starts[block + 1] - starts[block], shift = at % 4,
                   words = (shift + bytes + 3) / 4;
    for (uint32_t word = threadIdx.x; word < words; word += kThreads) image[word] = 0;
    const uint32_t my_first = threadIdx.x * kEach,
                   my_end = my_first + kEach < n ? my_first + kEach : n;
    uint32_t quotients = 0, unused;
    for (uint32_t i = my_first; i < my_end; ++i) quotients += gap_at(indices, first + i) >> b;
    // its barriers come after the zeros are written
    const uint32_t before = block_exclusive_sum(quotients, shared, &unused);
    uint32_t unary = 8 * (shift + static_cast<uint32_t>(packed_bytes(n, b))) + before + my_first;
    for (uint32_t i = my_first; i < my_end; ++i, ++unary) {
      const uint32_t gap = gap_at(indices, first + i);
      unary += gap >> b;
      put(image, unary, 1, 1);
      put(image, 8 * shift + i * b, gap & ((1u << b) - 1), b);
    }
    __syncthreads();
    // aligned to words; the first and the last word may also belong to other blocks
    uint8_t* out = section + (at - shift);
    for (uint32_t word = threadIdx.x; word < words; word += kThreads) {
      if (4 * word >= shift && 4 * word + 4 <= shift + bytes) {
        reinterpret_cast<uint32_t*>(out)[word] = image[word];
        continue;
      }
      for (uint32_t byte = 4 * word; byte < 4 * word + 4; ++byte)
        if (byte >= shift && byte < shift + bytes)
          out[byte] = static_cast<uint8_t>(image[word] >> (8 * (byte % 4)));
    }
    if (threadIdx.x == 0) section[block] = static_cast<uint8_t>(b);
    if (block > 0 && threadIdx.x < kRiceEntryBytes) {
      const uint64_t entry = (indices[first - 1] + 1) | uint64_t{starts[block]} << 32;
      section[blocks + kRiceEntryBytes * (block - 1) + threadIdx.x] =
          static_cast<uint8_t>(entry >> (8 * threadIdx.x));
    }
    __syncthreads();
  }
}

// A block of the format, as described by the directory.
struct BlockIn {
  const uint8_t* data;
  uint64_t bytes;
  uint32_t n, b;
  uint32_t next;  // the smallest possible index
};

struct SharedMemory {
  // at place(i): the position of unary code i, later index i
  uint32_t found[kIndexBlock + kIndexBlock / kEach];
  uint32_t counts[33];
  uint64_t lows[33];
};
// The 16 entries of a thread start one bank after those of the previous thread.
__device__ uint32_t place(uint32_t i) { return i + i / kEach; }

// Decodes the indices of the block. All threads return the same result: whether the block is valid.
// One thread also checks `following`, which does not change the result. `following`: the smallest
// possible first index of the next block, from the directory; ~0 for the last block.
__device__ bool read_block(const BlockIn& in, uint32_t d, uint64_t following, SharedMemory& shared,
                           dr_cuda_result* result) {
  const uint32_t n = in.n, b = in.b;
  const uint64_t low_bytes = packed_bytes(n, b), unary_bytes = in.bytes - low_bytes;
  const uint8_t* unary = in.data + low_bytes;
  if (!expect_zero_padding(in.data, uint64_t{n} * b, result)) return false;
  const uint64_t most_unary_bytes = rice_most_unary_bytes(n, b, d);
  if (unary_bytes > most_unary_bytes) {
    refuse(result, Refused::unary_bytes, most_unary_bytes, unary_bytes);
    return false;
  }
  uint32_t codes = 0;
  for (uint64_t tile = 0; tile < unary_bytes && codes <= n; tile += 8 * kThreads) {
    const uint64_t at = tile + 8 * threadIdx.x;
    uint64_t word = at < unary_bytes ? load_bits(unary, unary_bytes, 8 * at) : 0;
    uint32_t inside;
    uint32_t i =
        codes + block_exclusive_sum(static_cast<uint32_t>(__popcll(word)), shared.counts, &inside);
    for (; word != 0; word &= word - 1, ++i)
      if (i < n)
        shared.found[place(i)] = static_cast<uint32_t>(8 * at) +
                                 static_cast<uint32_t>(__ffsll(static_cast<long long>(word)) - 1);
    codes += inside;
    __syncthreads();
  }
  if (codes != n || shared.found[place(n - 1)] / 8 + 1 != unary_bytes) {
    refuse(result, Refused::unary_codes, n, codes);
    return false;
  }
  const uint32_t my_first = threadIdx.x * kEach,
                 my_end = my_first + kEach < n ? my_first + kEach : n;
  uint64_t low = 0, unused;
  for (uint32_t i = my_first; i < my_end; ++i)
    low += load_field(in.data, in.bytes, uint64_t{i} * b, b);
  // the smallest possible index, if all quotients were 0; the barriers come after the reads of
  // `found` above
  uint64_t base = in.next + block_exclusive_sum(low, shared.lows, &unused) + my_first;
  for (uint32_t i = my_first; i < my_end; ++i, ++base) {
    base += load_field(in.data, in.bytes, uint64_t{i} * b, b);
    const uint64_t index = base + (uint64_t{shared.found[place(i)] - i} << b);
    shared.found[place(i)] = static_cast<uint32_t>(index);
    if (i + 1 != n) continue;
    // indices only grow, in 64 bits
    if (index >= d) refuse(result, Refused::index_beyond_d, d, index);
    if (index < d && following != ~uint64_t{0} && following != index + 1)
      refuse(result, Refused::block_start, index + 1, following);
  }
  __syncthreads();
  return true;
}

__device__ void read_blocks(const DeviceSection* section, uint32_t* indices,
                            dr_cuda_result* result) {
  __shared__ SharedMemory shared;
  if (block_skipped(section, result)) return;
  const uint32_t count = section->count, d = section->d, blocks = index_blocks(count);
  const uint64_t header = rice_head_bytes(blocks);
  if (section->bytes < header || (count == 0 && section->bytes != 0)) {
    refuse(result, Refused::index_section_bytes, header, section->bytes);
    return;
  }
  const uint64_t data_bytes = section->bytes - header;
  const uint8_t* const directory = section->data + blocks;
  for (uint32_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const uint8_t* entry = directory + kRiceEntryBytes * block;  // of the next block
    const uint64_t start = block == 0 ? 0 : load_u32(entry - kRiceEntryBytes + 4),
                   end = block + 1 < blocks ? load_u32(entry + 4) : data_bytes;
    const uint64_t following = block + 1 < blocks ? load_u32(entry) : ~uint64_t{0};
    const BlockIn in{section->data + header + start, end - start, indices_in_block(count, block),
                     section->data[block], block == 0 ? 0 : load_u32(entry - kRiceEntryBytes)};
    if (in.b > kLargestRiceParameter) {
      refuse(result, Refused::rice_parameter, kLargestRiceParameter, in.b);
      return;
    }
    if (!rice_block_fits(start, end, data_bytes, in.n, in.b)) {
      refuse(result, Refused::block_end, data_bytes, end);
      return;
    }
    if (!read_block(in, d, following, shared, result)) return;
    for (uint32_t i = threadIdx.x; i < in.n; i += kThreads)
      indices[block * kIndexBlock + i] = shared.found[place(i)];
    __syncthreads();
  }
}

uint64_t section_capacity(uint32_t d, uint32_t capacity, const double*) {
  const uint64_t blocks = index_blocks(std::min(d, capacity));
  // each of the two parts of a block's data ends with a partial byte
  return most_gap_bits(d, capacity) / 8 + blocks * (1 + kRiceEntryBytes + 2);
}

void encode(Device& device, DeviceIndexEncoding& encoding) {
  const uint64_t mark = device.mark();
  const uint32_t blocks = index_blocks(encoding.capacity);
  uint32_t* parameters = device.array<uint32_t>(blocks);
  uint32_t* starts = device.array<uint32_t>(uint64_t{blocks} + 1);
  launch<choose_parameters>(device, blocks_for(uint64_t{blocks} + 1, 1, 1), kThreads, 0,
                            encoding.indices, encoding.count, blocks, parameters, starts);
  exclusive_sum(device, starts, starts, uint64_t{blocks} + 1);
  launch<write_blocks>(device, blocks_for(blocks, 1, 1), kThreads, 0, encoding.indices,
                       encoding.count, parameters, starts, encoding.section.data,
                       encoding.section.bytes);
  device.release(mark);
}

uint32_t most_count(uint64_t bytes, uint32_t d) {
  return static_cast<uint32_t>(std::min<uint64_t>(d, 8 * bytes));
}

void decode(Device& device, const DeviceSection* section, uint32_t, uint32_t capacity, uint64_t,
            const double*, uint32_t* indices) {
  launch<read_blocks>(device, blocks_for(index_blocks(capacity), 1, 1), kThreads, 0, section,
                      indices, device.result());
}

}  // namespace

extern const DeviceIndexCodec rice_device_codec;
const DeviceIndexCodec rice_device_codec = {kRice,   "Rice", false,      section_capacity,
                                            nullptr, encode, most_count, decode};

}  // namespace cuda
}  // namespace deepreduce
