#include "cuda/algorithms.cuh"

#ifdef __CUDACC__
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_reduce.cuh>
#include <cub/device/device_scan.cuh>
#else
#include <numeric>
#include <vector>
#endif

namespace deepreduce {
namespace cuda {
namespace {

constexpr uint32_t kScanThreads = 1024;
constexpr uint64_t kMostInOneBlock = uint64_t{16} * kScanThreads;

#ifdef __CUDACC__
struct Larger {
  __host__ __device__ uint32_t operator()(uint32_t a, uint32_t b) const { return a < b ? b : a; }
};

// Calls CUB twice: once for the size of its scratch memory, and once to run it.
template <class Call>
void with_scratch(Device& device, const char* what, Call call) {
  const uint64_t mark = device.mark();
  size_t bytes = 0;
  if (call(nullptr, bytes) != cudaSuccess) device.check(what);
  void* scratch = device.array<uint8_t>(bytes);
  if (!device.measuring() && call(scratch, bytes) != cudaSuccess) device.check(what);
  device.release(mark);
}
#define DR_ALGORITHM(what, cub_call, host_loop)             \
  if (device.kept() != nullptr) device.kept()->add_other(); \
  with_scratch(device, what, [&](void* scratch, size_t& bytes) { return cub_call; })
#else
#define DR_ALGORITHM(what, cub_call, host_loop)             \
  if (device.kept() != nullptr) device.kept()->add_other(); \
  if (!device.measuring()) emulation::submit([=] { host_loop; })

template <class Key>
void sort_on_host(const Key* keys, Key* sorted_keys, const uint32_t* items, uint32_t* sorted_items,
                  uint64_t n, int first_bit, int last_bit) {
  const Key mask = last_bit - first_bit >= static_cast<int>(8 * sizeof(Key))
                       ? ~Key{0}
                       : (Key{1} << (last_bit - first_bit)) - 1;
  std::vector<uint64_t> order(n);
  std::iota(order.begin(), order.end(), uint64_t{0});
  std::stable_sort(order.begin(), order.end(), [&](uint64_t a, uint64_t b) {
    return ((keys[a] >> first_bit) & mask) < ((keys[b] >> first_bit) & mask);
  });
  for (uint64_t i = 0; i < n; ++i) {
    sorted_keys[i] = keys[order[i]];
    if (items != nullptr) sorted_items[i] = items[order[i]];
  }
}
#endif

// A prefix sum in one block.
template <class T, bool inclusive>
__device__ void scan_in_one_block(const T* in, T* out, uint64_t n) {
  __shared__ T sums[33];
  T before = 0, total;
  for (uint64_t start = 0; start < n; start += kScanThreads, before += total) {
    const uint64_t i = start + threadIdx.x;
    const T mine = i < n ? in[i] : T(0);
    const T sum = before + block_exclusive_sum(mine, sums, &total);
    if (i < n) out[i] = inclusive ? sum + mine : sum;
    __syncthreads();  // sums is used again
  }
}

// Keeps a prefix sum, if launches are kept and it is short. Returns whether it did.
template <class T, bool inclusive>
bool keeps_scan(Device& device, const T* in, T* out, uint64_t n) {
  if (device.kept() == nullptr || n > kMostInOneBlock) return false;
  launch<scan_in_one_block<T, inclusive>, kScanThreads>(device, 1, kScanThreads, 0, in, out, n);
  return true;
}

template <class T>
void exclusive(Device& device, const T* in, T* out, uint64_t n) {
  if (keeps_scan<T, false>(device, in, out, n)) return;
  DR_ALGORITHM("exclusive sum",
               cub::DeviceScan::ExclusiveSum(scratch, bytes, in, out, static_cast<int64_t>(n),
                                             device.stream()),
               std::exclusive_scan(in, in + n, out, T(0)));
}

template <class T>
void inclusive(Device& device, const T* in, T* out, uint64_t n) {
  if (keeps_scan<T, true>(device, in, out, n)) return;
  DR_ALGORITHM("inclusive sum",
               cub::DeviceScan::InclusiveSum(scratch, bytes, in, out, static_cast<int64_t>(n),
                                             device.stream()),
               std::inclusive_scan(in, in + n, out));
}

template <class T>
void sum_of(Device& device, const T* in, T* out, uint64_t n) {
  DR_ALGORITHM(
      "sum",
      cub::DeviceReduce::Sum(scratch, bytes, in, out, static_cast<int64_t>(n), device.stream()),
      *out = std::accumulate(in, in + n, T(0)));
}

template <class Key>
void sort_keys(Device& device, const Key* keys, Key* sorted_keys, uint64_t n, int first_bit,
               int last_bit) {
  DR_ALGORITHM(
      "sort",
      cub::DeviceRadixSort::SortKeys(scratch, bytes, keys, sorted_keys, static_cast<int64_t>(n),
                                     first_bit, last_bit, device.stream()),
      sort_on_host(keys, sorted_keys, nullptr, nullptr, n, first_bit, last_bit));
}

template <class Key>
void sort_with_items(Device& device, const Key* keys, Key* sorted_keys, const uint32_t* items,
                     uint32_t* sorted_items, uint64_t n, int first_bit, int last_bit) {
  DR_ALGORITHM("sort",
               cub::DeviceRadixSort::SortPairs(scratch, bytes, keys, sorted_keys, items,
                                               sorted_items, static_cast<int64_t>(n), first_bit,
                                               last_bit, device.stream()),
               sort_on_host(keys, sorted_keys, items, sorted_items, n, first_bit, last_bit));
}

}  // namespace

void exclusive_sum(Device& device, const uint32_t* in, uint32_t* out, uint64_t n) {
  exclusive(device, in, out, n);
}
void exclusive_sum(Device& device, const uint64_t* in, uint64_t* out, uint64_t n) {
  exclusive(device, in, out, n);
}
void inclusive_sum(Device& device, const uint32_t* in, uint32_t* out, uint64_t n) {
  inclusive(device, in, out, n);
}
void inclusive_sum(Device& device, const uint64_t* in, uint64_t* out, uint64_t n) {
  inclusive(device, in, out, n);
}

void inclusive_max(Device& device, const uint32_t* in, uint32_t* out, uint64_t n) {
  DR_ALGORITHM(
      "inclusive maximum",
      cub::DeviceScan::InclusiveScan(scratch, bytes, in, out, Larger(), static_cast<int64_t>(n),
                                     device.stream()),
      std::inclusive_scan(in, in + n, out, [](uint32_t a, uint32_t b) { return a < b ? b : a; }));
}

void sum(Device& device, const uint32_t* in, uint32_t* out, uint64_t n) {
  sum_of(device, in, out, n);
}
void sum(Device& device, const uint64_t* in, uint64_t* out, uint64_t n) {
  sum_of(device, in, out, n);
}

void largest(Device& device, const uint32_t* in, uint32_t* out, uint64_t n) {
  DR_ALGORITHM(
      "largest",
      cub::DeviceReduce::Max(scratch, bytes, in, out, static_cast<int64_t>(n), device.stream()),
      *out = n == 0 ? 0 : *std::max_element(in, in + n));
}

void sort(Device& device, const uint32_t* keys, uint32_t* sorted_keys, uint64_t n, int first_bit,
          int last_bit) {
  sort_keys(device, keys, sorted_keys, n, first_bit, last_bit);
}
void sort(Device& device, const uint64_t* keys, uint64_t* sorted_keys, uint64_t n, int first_bit,
          int last_bit) {
  sort_keys(device, keys, sorted_keys, n, first_bit, last_bit);
}
void sort_pairs(Device& device, const uint32_t* keys, uint32_t* sorted_keys, const uint32_t* items,
                uint32_t* sorted_items, uint64_t n, int first_bit, int last_bit) {
  sort_with_items(device, keys, sorted_keys, items, sorted_items, n, first_bit, last_bit);
}
void sort_pairs(Device& device, const uint64_t* keys, uint64_t* sorted_keys, const uint32_t* items,
                uint32_t* sorted_items, uint64_t n, int first_bit, int last_bit) {
  sort_with_items(device, keys, sorted_keys, items, sorted_items, n, first_bit, last_bit);
}

}  // namespace cuda
}  // namespace deepreduce
