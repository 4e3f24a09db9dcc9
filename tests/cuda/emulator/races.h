// What the scheduler reports to ThreadSanitizer. Only the kernels are built with it; the scheduler
// is not, and defines DR_EMULATION_RACES instead. Each thread of a block is a separate thread. The
// threads of a kernel see everything written before the launch. Threads that met at a barrier, or
// lanes at __syncwarp, see each other's writes. Nothing else orders threads: not the order of
// blocks, not shuffles and not votes.
#ifndef DEEPREDUCE_EMULATION_RACES_H
#define DEEPREDUCE_EMULATION_RACES_H

#include <cstddef>
#include <cstdint>

#ifdef DR_EMULATION_RACES

#include <vector>

extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void __tsan_java_init(unsigned long begin, unsigned long bytes);
void __tsan_java_alloc(unsigned long at, unsigned long bytes);
void __tsan_java_free(unsigned long at, unsigned long bytes);
}

namespace deepreduce {
namespace emulation {

class Races {
 public:
  // Threads see everything done before they were created. So the threads of both kinds of blocks
  // are created before a block runs.
  void launch(uint32_t threads) {
    for (std::vector<void*>& of_blocks : threads_)
      while (of_blocks.size() < threads) of_blocks.push_back(__tsan_create_fiber(0));
    __tsan_release(&launched_);
  }
  // The threads are not those of the previous block, and its shared memory belongs to no thread.
  void begin_block(uint32_t block) { block_ = block; }
  void begin_shared(void* at, size_t bytes) {
    const unsigned long address = reinterpret_cast<unsigned long>(at) / 8 * 8,
                        length =
                            (reinterpret_cast<unsigned long>(at) + bytes + 7) / 8 * 8 - address;
    if (length == 0) return;
    if (!started_) __tsan_java_init(0x1000, 0x7fffffffe000);
    started_ = true;
    for (const unsigned long known : known_)
      if (known == address) __tsan_java_free(address, length);
    known_.push_back(address);
    __tsan_java_alloc(address, length);
  }
  // Called after a block. Only the host then sees its writes.
  void finish() { __tsan_acquire(&finished_); }
  void enter(uint32_t thread) {
    host_ = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(threads_[block_ % 2][thread], kNoOrder);
  }
  void left() { __tsan_switch_to_fiber(host_, kNoOrder); }
  // Called by the threads themselves.
  void begin_thread() { __tsan_acquire(&launched_); }
  void end_thread() { __tsan_release(&finished_); }
  void arrive(uint32_t group, uint32_t meeting) { __tsan_release(meeting_point(group, meeting)); }
  void leave(uint32_t group, uint32_t meeting) { __tsan_acquire(meeting_point(group, meeting)); }

 private:
  static constexpr unsigned kNoOrder = 1;
  // Returns the meeting point of a block (group 0) or of its warps (groups from 1 on). There are
  // several, because a thread that leaves one meeting must not see what others do before the next
  // one.
  void* meeting_point(uint32_t group, uint32_t meeting) {
    return points_ + ((block_ * uint64_t{40} + group) * 2 + meeting % 2) % kPoints;
  }
  static constexpr uint64_t kPoints = 1 << 20;
  uint64_t launched_ = 0, finished_ = 0, points_[kPoints];
  std::vector<void*> threads_[2];
  std::vector<unsigned long> known_;
  void* host_ = nullptr;
  uint32_t block_ = 0;
  bool started_ = false;
};

}  // namespace emulation
}  // namespace deepreduce

#else

namespace deepreduce {
namespace emulation {

struct Races {
  void launch(uint32_t) {}
  void begin_block(uint32_t) {}
  void begin_shared(void*, size_t) {}
  void finish() {}
  void enter(uint32_t) {}
  void left() {}
  void begin_thread() {}
  void end_thread() {}
  void arrive(uint32_t, uint32_t) {}
  void leave(uint32_t, uint32_t) {}
};

}  // namespace emulation
}  // namespace deepreduce

#endif
#endif
