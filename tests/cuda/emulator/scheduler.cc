#include "scheduler.h"

#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fiber.h"
#include "races.h"

// The section of __shared__ arrays. The symbols are weak, because a program without such arrays has
// no section.
extern "C" {
extern uint8_t __start_dr_shared[] __attribute__((weak, visibility("hidden")));
extern uint8_t __stop_dr_shared[] __attribute__((weak, visibility("hidden")));
}

namespace deepreduce {
namespace emulation {
namespace {

constexpr uint32_t kWarp = 32, kMostThreads = 1024, kMostShared = 48 * 1024;

enum class Waits : uint8_t { no, at_block, at_vote, at_exchange, done };

struct Thread {
  Waits waits = Waits::no;
  uint32_t mask = 0, from_lane = 0;
  uint64_t value = 0;  // in: the value of this thread; out: its result
  uint32_t block_meetings = 0, warp_meetings = 0;
};

struct Block {
  std::vector<Thread> threads;
  std::vector<std::unique_ptr<Fiber>> fibers[2];  // for even and odd blocks, see races.h
  uint32_t current = 0;
  Fiber& fiber(uint32_t thread) { return *fibers[blockIdx.x % 2][thread]; }
};

Options the_options;
Block block;
Races races;
const std::function<void()>* the_kernel = nullptr;
bool with_fibers = false;
alignas(64) uint8_t shared_memory[kMostShared];

void fiber_main() {
  for (;;) {  // a fiber runs one thread after another
    races.begin_thread();
    (*the_kernel)();
    races.end_thread();
    block.threads[block.current].waits = Waits::done;
    block.fiber(block.current).leave();
  }
}

// Returns the positions 0..n-1 in the order of the options.
std::vector<uint32_t> order_of(uint32_t n, uint64_t salt) {
  std::vector<uint32_t> order(n);
  for (uint32_t i = 0; i < n; ++i)
    order[i] = the_options.schedule == Schedule::reverse ? n - 1 - i : i;
  if (the_options.schedule != Schedule::shuffled) return order;
  uint64_t state = the_options.seed * 0x9E3779B97F4A7C15ull + salt;
  for (uint32_t i = n; i > 1; --i) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    std::swap(order[i - 1], order[static_cast<uint32_t>(state >> 33) % i]);
  }
  return order;
}

[[noreturn]] void fail(const std::string& what) {
  throw std::runtime_error("block " + std::to_string(blockIdx.x) + " of " +
                           std::to_string(gridDim.x) + ": " + what);
}

Thread& wait(Waits how) {
  if (!with_fibers)
    fail("thread " + std::to_string(threadIdx.x) +
         " waits in a kernel launched as one whose threads never do");
  const uint32_t at = block.current;
  block.threads[at].waits = how;
  block.fiber(at).leave();
  threadIdx.x = at;
  return block.threads[at];
}

// Resumes the lanes of a warp whose partners have all arrived. Returns whether there were any.
bool resolve_warp(uint32_t first, uint32_t lanes) {
  Thread* warp = block.threads.data() + first;
  bool any = false;
  for (uint32_t lane = 0; lane < lanes; ++lane) {
    const Waits how = warp[lane].waits;
    if (how != Waits::at_vote && how != Waits::at_exchange) continue;
    const uint32_t mask = warp[lane].mask;
    if ((mask >> lane & 1u) == 0)
      fail("thread " + std::to_string(first + lane) + " is not in its own mask");
    bool all = true;
    for (uint32_t other = 0; other < kWarp && all; ++other) {
      if ((mask >> other & 1u) == 0) continue;
      if (other >= lanes || warp[other].waits == Waits::done)
        fail("thread " + std::to_string(first + lane) + " waits for lane " + std::to_string(other) +
             ", which is not there");
      all = warp[other].waits == how && warp[other].mask == mask;
    }
    if (!all) continue;
    any = true;
    uint64_t values[kWarp] = {};
    uint32_t votes = 0;
    for (uint32_t other = 0; other < lanes; ++other) {
      values[other] = warp[other].value;
      if (mask >> other & 1u) votes |= static_cast<uint32_t>(warp[other].value & 1u) << other;
    }
    for (uint32_t other = 0; other < lanes; ++other) {
      if ((mask >> other & 1u) == 0) continue;
      if (how == Waits::at_vote) {
        warp[other].value = votes;
      } else {
        const uint32_t from = warp[other].from_lane;
        if (from >= kWarp || (mask >> from & 1u) == 0)
          fail("thread " + std::to_string(first + other) + " reads lane " + std::to_string(from) +
               ", which is not in the mask");
        warp[other].value = values[from];
      }
      warp[other].waits = Waits::no;
    }
  }
  return any;
}

void run_fibers(uint32_t threads, uint64_t salt) {
  block.threads.assign(threads, Thread());
  const std::vector<uint32_t> order = order_of(threads, salt);
  const uint32_t warps = (threads + kWarp - 1) / kWarp;
  // the order of the threads of each warp; warps are ordered by their first thread
  std::vector<std::vector<uint32_t>> lanes_of(warps);
  std::vector<uint32_t> warp_order;
  for (const uint32_t t : order) {
    if (lanes_of[t / kWarp].empty()) warp_order.push_back(t / kWarp);
    lanes_of[t / kWarp].push_back(t);
  }
  for (;;) {
    for (const uint32_t warp : warp_order) {
      const uint32_t first = warp * kWarp,
                     lanes = threads - first < kWarp ? threads - first : kWarp;
      do {
        for (const uint32_t t : lanes_of[warp]) {
          if (block.threads[t].waits != Waits::no) continue;
          block.current = t;
          threadIdx.x = t;
          races.enter(t);
          block.fiber(t).enter();
          races.left();
        }
      } while (resolve_warp(first, lanes));
    }
    uint32_t done = 0, at_barrier = 0, votes = 0, straggler = 0;
    for (uint32_t t = 0; t < threads; ++t) {
      const Thread& thread = block.threads[t];
      done += thread.waits == Waits::done;
      at_barrier += thread.waits == Waits::at_block;
      if (thread.waits == Waits::at_block) votes += thread.value != 0;
      if (thread.waits != Waits::at_block) straggler = t;
    }
    if (done == threads) return;
    if (at_barrier != threads)
      fail(std::to_string(at_barrier) + " of " + std::to_string(threads) +
           " threads wait at a barrier, " + std::to_string(done) +
           " have returned, the others wait for lanes of their warps; thread " +
           std::to_string(straggler) + " is not at the barrier");
    for (Thread& thread : block.threads) {
      thread.value = votes;
      thread.waits = Waits::no;
    }
  }
}

using Recorded = std::vector<std::function<void()>>;
thread_local Recorded* recording = nullptr;  // of the graph that this thread records
uint64_t recorded_size = 0;

}  // namespace

Options& options() { return the_options; }
void* dynamic_shared() { return shared_memory; }

void submit(std::function<void()> work) {
  if (recording == nullptr) return work();
  recording->push_back(std::move(work));
}
void begin_recording() { recording = new Recorded; }
void* end_recording() {
  recorded_size = recording->size();
  return std::exchange(recording, nullptr);
}
uint64_t last_recorded_size() { return recorded_size; }
void replay(void* recorded) {
  for (const std::function<void()>& work : *static_cast<Recorded*>(recorded)) work();
}
void forget(void* recorded) { delete static_cast<Recorded*>(recorded); }

uint32_t block_barrier(bool predicate) {
  Thread& mine = block.threads[block.current];
  mine.value = predicate;
  const uint32_t meeting = mine.block_meetings++;
  races.arrive(0, meeting);
  const uint32_t votes = static_cast<uint32_t>(wait(Waits::at_block).value);
  races.leave(0, meeting);
  return votes;
}

void warp_barrier(uint32_t mask) {
  const uint32_t warp = 1 + block.current / kWarp,
                 meeting = block.threads[block.current].warp_meetings++;
  races.arrive(warp, meeting);
  warp_vote(mask, false);
  races.leave(warp, meeting);
}

uint32_t warp_vote(uint32_t mask, bool predicate) {
  Thread& mine = block.threads[block.current];
  mine.value = predicate;
  mine.mask = mask;
  return static_cast<uint32_t>(wait(Waits::at_vote).value);
}

uint64_t warp_exchange(uint32_t mask, uint64_t value, uint32_t from_lane) {
  Thread& mine = block.threads[block.current];
  mine.value = value;
  mine.mask = mask;
  mine.from_lane = from_lane;
  return wait(Waits::at_exchange).value;
}

void run(uint32_t blocks, uint32_t threads, uint32_t shared_bytes, bool fibers,
         const std::function<void()>& kernel) {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  gridDim.x = blocks;
  blockDim.x = threads;
  if (blocks == 0 || threads == 0 || threads > kMostThreads || shared_bytes > kMostShared)
    throw std::runtime_error("launch of " + std::to_string(blocks) + " blocks of " +
                             std::to_string(threads) + " threads with " +
                             std::to_string(shared_bytes) + " bytes of shared memory");
  the_kernel = &kernel;
  with_fibers = fibers;
#ifdef DR_EMULATION_RACES
  fibers = true;
#endif
  for (auto& of_blocks : block.fibers)
    while (fibers && of_blocks.size() < threads) of_blocks.emplace_back(new Fiber(fiber_main));
  if (!fibers && block.threads.empty()) block.threads.resize(1);
  block.current = 0;
  uint64_t salt = blocks * uint64_t{31} + threads;
  races.launch(threads);
  const std::vector<uint32_t> elementwise =
      fibers ? std::vector<uint32_t>() : order_of(threads, salt);
  for (const uint32_t b : order_of(blocks, salt)) {
    blockIdx.x = b;
    if (!fibers) {
      for (const uint32_t t : elementwise) {
        threadIdx.x = t;
        kernel();
      }
      continue;
    }
    races.begin_block(b);
    const size_t static_bytes = static_cast<size_t>(__stop_dr_shared - __start_dr_shared);
    if (static_bytes != 0) std::memset(__start_dr_shared, the_options.poison, static_bytes);
    std::memset(shared_memory, the_options.poison, shared_bytes);
    races.begin_shared(__start_dr_shared, static_bytes);
    races.begin_shared(shared_memory, sizeof(shared_memory));
    try {
      run_fibers(threads, salt + b);
    } catch (...) {
      for (auto& of_blocks : block.fibers) of_blocks.clear();  // still inside the kernel
      throw;
    }
    races.finish();
  }
}

}  // namespace emulation
}  // namespace deepreduce
