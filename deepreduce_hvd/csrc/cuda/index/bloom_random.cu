// Bloom's policy P1: the positives with the smallest random numbers, found by histograms. The
// random number of a positive is a bijection of its number (for any key, random32 is a bijection of
// the counter). So no two are equal, and exactly `count` of them are not above the count-th
// smallest.
#include "cuda/index/bloom.cuh"

namespace deepreduce {
namespace cuda {
namespace {

constexpr uint32_t kBins = 65536;  // values of one half of a random number

// Counts all upper halves, or the lower halves of the numbers whose upper half is the current
// threshold.
__device__ void count_halves(const BloomPlan* plan, IndexSet positives, bool upper,
                             uint32_t* bins) {
  if (plan->active == 0) return;
  const uint64_t key = plan->key;
  const uint32_t threshold = plan->threshold;
  for_each_word(positives, [&](uint32_t, uint32_t at, uint32_t word, uint32_t number) {
    for_each_index(at, word, [&](uint32_t) {
      const uint32_t random = random32(key, number++);
      if (upper || random >> 16 == threshold)
        atomicAdd(bins + (upper ? random >> 16 : random & 0xFFFFu), 1u);
    });
  });
}

// Runs in one block. Extends the threshold by the half that contains the wanted-th smallest number.
__device__ void find_half(BloomPlan* plan, const uint32_t* bins, bool upper) {
  __shared__ uint32_t shared[33];
  if (plan->active == 0) return;
  const uint32_t wanted = plan->wanted;  // read before the barriers, written after them
  const uint32_t* mine = bins + threadIdx.x * (kBins / kThreads);
  uint32_t in_mine = 0, total;
  for (uint32_t bin = 0; bin < kBins / kThreads; ++bin) in_mine += mine[bin];
  uint32_t before = block_exclusive_sum(in_mine, shared, &total);
  // after the last barrier, so that threads may return
  if (before >= wanted || wanted > before + in_mine) return;
  uint32_t bin = 0;
  for (; wanted > before + mine[bin]; ++bin) before += mine[bin];
  const uint32_t half = threadIdx.x * (kBins / kThreads) + bin;
  plan->threshold = upper ? half : plan->threshold << 16 | half;
  plan->wanted = wanted - before;
}

__device__ void keep(const BloomPlan* plan, IndexSet positives) {
  if (plan->active == 0) return;
  const uint64_t key = plan->key;
  const uint32_t threshold = plan->threshold;
  for_each_word(positives, [&](uint32_t tile, uint32_t at, uint32_t word, uint32_t number) {
    uint32_t kept = 0;
    for_each_index(at, word, [&](uint32_t index) {
      if (random32(key, number++) <= threshold) kept |= 1u << (index % 32);
    });
    replace_word(positives, tile, at, kept);
  });
}

}  // namespace

void keep_random(Device& device, BloomPlan* plan, const IndexSet& positives) {
  const uint64_t mark = device.mark();
  const uint32_t blocks = blocks_for(positives.words);
  for (const bool upper : {true, false}) {
    uint32_t* bins = device.zeros<uint32_t>(kBins);
    launch<count_halves>(device, blocks, kThreads, 0, plan, positives, upper, bins);
    launch<find_half>(device, 1, kThreads, 0, plan, bins, upper);
  }
  launch<keep>(device, blocks, kThreads, 0, plan, positives);
  sum_tiles(device, positives);
  device.release(mark);
}

}  // namespace cuda
}  // namespace deepreduce
