// Scratch memory for the bindings: blocks of one call, reused by the thread's next call.
//
// Allocating new pages takes longer than most of the work on them. The core itself allocates
// nothing (api/deepreduce.h).
#ifndef DEEPREDUCE_HOST_SCRATCH_H
#define DEEPREDUCE_HOST_SCRATCH_H

#include <cstdlib>
#include <new>
#include <vector>

#include "api/deepreduce.h"

namespace deepreduce {

class HostScratch {
 public:
  HostScratch() = default;
  HostScratch(const HostScratch&) = delete;
  HostScratch& operator=(const HostScratch&) = delete;
  ~HostScratch() { pool().take_back(used_); }

  // Returns null if there is no memory.
  void* allocate(size_t bytes) noexcept {
    try {
      used_.emplace_back();  // before there is a block that could be lost
    } catch (const std::bad_alloc&) {
      return nullptr;
    }
    used_.back() = pool().give(bytes);
    return used_.back().memory;
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
    void take_back(const std::vector<Block>& blocks) noexcept {
      for (const Block& block : blocks)
        if (block.memory != nullptr && !keep(block)) std::free(block.memory);
    }

   private:
    bool keep(const Block& block) {
      if (kept_ + block.bytes > kKept) return false;
      try {
        blocks_.push_back(block);
      } catch (const std::bad_alloc&) {
        return false;
      }
      kept_ += block.bytes;
      return true;
    }

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
