// Runs a kernel's blocks one after another on the host; the threads of a block are fibers that
// leave one another at barriers and warp operations. One kernel at a time, whatever thread it comes
// from. Only tests link it (tests/cuda/scheduler.cc).
#ifndef DEEPREDUCE_EMULATION_SCHEDULER_H
#define DEEPREDUCE_EMULATION_SCHEDULER_H

#include <cstddef>
#include <cstdint>
#include <functional>

struct dim3 {
  uint32_t x, y, z;
};

namespace deepreduce {
namespace emulation {

inline dim3 threadIdx{0, 0, 0}, blockIdx{0, 0, 0}, blockDim{1, 1, 1}, gridDim{1, 1, 1};

// The order in which blocks, and threads within what they may do without waiting, run. No result
// may depend on it.
enum class Schedule : int { forward = 0, reverse = 1, shuffled = 2 };
struct Options {
  Schedule schedule = Schedule::forward;
  uint64_t seed = 1;      // of shuffled
  uint8_t poison = 0xA5;  // what shared memory and workspace hold before anything is written
};
Options& options();

// Runs the kernel. Without fibers a barrier is an error. Errors (a barrier that some threads do not
// reach, a mask that does not fit) are std::runtime_error.
void run(uint32_t blocks, uint32_t threads, uint32_t shared_bytes, bool fibers,
         const std::function<void()>& kernel);

void* dynamic_shared();
// Waits for all threads of the block; how many came with the predicate set.
uint32_t block_barrier(bool predicate);
// Waits for the lanes of the mask, which then see what the others wrote.
void warp_barrier(uint32_t mask);
// Waits for the lanes of the mask; the set of those that came with the predicate set.
uint32_t warp_vote(uint32_t mask, bool predicate);
// Waits for the lanes of the mask; the value of that lane.
uint64_t warp_exchange(uint32_t mask, uint64_t value, uint32_t from_lane);

}  // namespace emulation
}  // namespace deepreduce
#endif
