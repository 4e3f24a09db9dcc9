// Runs the blocks of a kernel on the host, one after another. The threads of a block are fibers,
// which switch at barriers and warp operations. Only one kernel runs at a time, from whatever
// thread it is started. Only tests link scheduler.cc.
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

// The order in which blocks run, and in which threads run between barriers. No result may depend on
// it.
enum class Schedule : int { forward = 0, reverse = 1, shuffled = 2 };
struct Options {
  Schedule schedule = Schedule::forward;
  uint64_t seed = 1;      // seed of `shuffled`
  uint8_t poison = 0xA5;  // initial bytes of shared memory and workspace
};
Options& options();

// Runs the kernel. Without fibers a barrier is an error. Errors are std::runtime_error, for
// instance a barrier that some threads do not reach, or an invalid mask.
void run(uint32_t blocks, uint32_t threads, uint32_t shared_bytes, bool fibers,
         const std::function<void()>& kernel);

// Does the work of a stream: at once, or only in replay() if a graph is being recorded.
void submit(std::function<void()> work);
void begin_recording();
// Returns the work since begin_recording, for replay() and forget().
void* end_recording();
// Returns the number of launches, copies and fills of the last recording.
uint64_t last_recorded_size();
void replay(void* recorded);
void forget(void* recorded);

void* dynamic_shared();
// Waits for all threads of the block. Returns the number of threads with a true predicate.
uint32_t block_barrier(bool predicate);
// Waits for the lanes of the mask. They then see each other's writes.
void warp_barrier(uint32_t mask);
// Waits for the lanes of the mask. Returns the set of lanes with a true predicate.
uint32_t warp_vote(uint32_t mask, bool predicate);
// Waits for the lanes of the mask. Returns the value of lane `from_lane`.
uint64_t warp_exchange(uint32_t mask, uint64_t value, uint32_t from_lane);

}  // namespace emulation
}  // namespace deepreduce
#endif
