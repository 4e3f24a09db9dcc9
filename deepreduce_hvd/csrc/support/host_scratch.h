// Scratch memory for the bindings: blocks of one call, reused by the thread's next call.
//
// Allocating new pages takes longer than most of the work on them. The core itself allocates
// nothing (api/deepreduce.h).
#ifndef DEEPREDUCE_HOST_SCRATCH_H
#define DEEPREDUCE_HOST_SCRATCH_H

#include <cstdlib>
#include <vector>

#include "api/deepreduce.h"

namespace deepreduce {

class HostScratch {
 public:
  HostScratch() = default;
  HostScratch(const HostScratch&) = delete;
  HostScratch& operator=(const HostScratch&) = delete;
  ~HostScratch() { pool().take_back(used_); }

  void* allocate(size_t bytes) {
    const Block block = pool().give(bytes);
    if (block.memory != nullptr) used_.push_back(block);
    return block.memory;
  }

 private:
  struct Block {
    void* memory;
    size_t bytes;
  };

  // Memory that one thread keeps between calls, at most kKept bytes.
  class Pool {
   public:
    ~Pool() {
      for (const Block& block : blocks_) std::free(block.memory);
    }
    Block give(size_t bytes) {
      auto best = blocks_.end();
      for (auto at = blocks_.begin(); at != blocks_.end(); ++at)
        if (at->bytes >= bytes && at->bytes / 2 <= bytes + kSmall &&
            (best == blocks_.end() || at->bytes < best->bytes))
          best = at;
      if (best == blocks_.end()) {
        const size_t rounded = (bytes + 63) / 64 * 64;
        return {std::aligned_alloc(64, rounded), rounded};
      }
      const Block block = *best;
      kept_ -= block.bytes;
      *best = blocks_.back();
      blocks_.pop_back();
      return block;
    }
    void take_back(const std::vector<Block>& blocks) {
      for (const Block& block : blocks) {
        if (kept_ + block.bytes > kKept) {
          std::free(block.memory);
          continue;
        }
        blocks_.push_back(block);
        kept_ += block.bytes;
      }
    }

   private:
    static constexpr size_t kKept = size_t{32} << 20, kSmall = 4096;
    std::vector<Block> blocks_;
    size_t kept_ = 0;
  };

  static Pool& pool() {
    thread_local Pool pool;
    return pool;
  }

  std::vector<Block> used_;
};

}  // namespace deepreduce
#endif
