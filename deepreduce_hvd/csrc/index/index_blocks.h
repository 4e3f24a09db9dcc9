// What Huffman and Rice share: indices in blocks, and a directory of where blocks start.
#ifndef DEEPREDUCE_INDEX_BLOCKS_H
#define DEEPREDUCE_INDEX_BLOCKS_H

#include "base.h"
#include "support/host_device.h"

namespace deepreduce {

constexpr uint32_t kIndexBlock = 4096;  // indices per block; the last one may have fewer

DR_HOST_DEVICE inline uint32_t index_blocks(uint32_t count) {
  return static_cast<uint32_t>((uint64_t{count} + kIndexBlock - 1) / kIndexBlock);
}

// Returns the number of indices in a block.
DR_HOST_DEVICE inline uint32_t indices_in_block(uint32_t count, uint32_t block) {
  return smaller(count - block * kIndexBlock, kIndexBlock);
}

// Returns the field of a directory for a block that starts `start` bytes after the directory.
inline uint32_t block_start_field(uint64_t start) {
  if (start > UINT32_MAX)
    invalid_argument(
        "index section: expected at most 4294967295 bytes, got more; compress more or split the tensor");
  return static_cast<uint32_t>(start);
}

// Checks the smallest index that a block can have, which its directory entry repeats.
inline void expect_block_start(const char* section, uint32_t block, uint64_t expected,
                               uint32_t got) {
  if (got != expected)
    corrupt_payload("%s: expected block %u to start at %llu, got %u", section, block,
                    static_cast<unsigned long long>(expected), got);
}

}  // namespace deepreduce
#endif
