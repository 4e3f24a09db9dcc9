#include "cuda/several.cuh"

#include <numeric>

#include "support/bits.h"

namespace deepreduce {
namespace cuda {
namespace {

// Maximum size of the workspace of a batch, whose tensors need their parts at the same time. One
// tensor alone may need more.
constexpr uint64_t kMostBatchBytes = uint64_t{32} << 20;
constexpr uint64_t kMostTensors = 65535;  // of a batch: CUDA's limit of gridDim.y
// CUDA may wait for the stream before it copies more bytes than this from memory that is not
// pinned.
constexpr uint64_t kMostCopied = 64 << 10;

uint64_t aligned(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Returns whether two tensors have the same launches, except for grids and arguments.
bool same_kernels(const KeptLaunches& one, const KeptLaunches& other) {
  return std::equal(one.launches().begin(), one.launches().end(), other.launches().begin(),
                    other.launches().end(), [](const KeptLaunch& a, const KeptLaunch& b) {
                      return a.start == b.start && a.grid.threads == b.grid.threads;
                    });
}

}  // namespace

uint64_t Several::measure(uint64_t i, uint64_t elements) {
  Device in_order;
  work(i, nullptr, in_order);
  Size& size = sizes_[i];
  size.elements = elements;
  size.bytes = in_order.most_used();
  if (sizes_.size() > 1) {
    Device keeps(&size.launches);
    work(i, nullptr, keeps);
    size.merged_bytes = aligned(keeps.most_used());
  }
  return in_order.payload_capacity();
}

void Several::divide(uint64_t table_bytes) {
  std::vector<bool> divided(sizes_.size());
  add_merged_branches(divided);
  add_branches(divided);
  // never empty, so that the caller's workspace is not null
  arguments_start_ = workspace_bytes_ = aligned(table_bytes + 1);
  for (const Branch& branch : branches_)
    for (const Batch& batch : branch.batches)
      if (batch.merges) workspace_bytes_ += arguments_bytes(batch);
  for (Branch& branch : branches_) {
    branch.start = workspace_bytes_;
    workspace_bytes_ += branch.bytes;
  }
}

// Makes a branch of tensors with the same kernels and similar sizes, so that the largest grid
// suits all of them.
void Several::add_merged_branches(std::vector<bool>& divided) {
  for (uint64_t first = 0; first < sizes_.size(); ++first) {
    if (divided[first] || !sizes_[first].launches.complete()) continue;
    std::vector<uint64_t> members;
    for (uint64_t i = first; i < sizes_.size(); ++i)
      if (!divided[i] && sizes_[i].launches.complete() &&
          bit_length(static_cast<uint32_t>(sizes_[i].elements)) ==
              bit_length(static_cast<uint32_t>(sizes_[first].elements)) &&
          same_kernels(sizes_[i].launches, sizes_[first].launches))
        members.push_back(i);
    if (members.size() < 2) continue;
    Branch branch{};
    for (const uint64_t i : members) {
      divided[i] = true;
      const uint64_t bytes = sizes_[i].merged_bytes;
      if (branch.batches.empty() || branch.batches.back().bytes + bytes > kMostBatchBytes ||
          branch.batches.back().members.size() == kMostTensors)
        branch.batches.push_back(Batch{{}, true, 0, {}});
      branch.batches.back().members.push_back(i);
      branch.batches.back().bytes += bytes;
      branch.bytes = std::max(branch.bytes, branch.batches.back().bytes);
    }
    branches_.push_back(std::move(branch));
  }
}

// Divides the other tensors: the largest first, each to the branch with the fewest elements.
void Several::add_branches(const std::vector<bool>& divided) {
  std::vector<uint64_t> order;
  for (uint64_t i = 0; i < sizes_.size(); ++i)
    if (!divided[i]) order.push_back(i);
  if (order.empty() && !branches_.empty()) return;
  std::stable_sort(order.begin(), order.end(),
                   [&](uint64_t a, uint64_t b) { return sizes_[a].elements > sizes_[b].elements; });
  const auto begin = static_cast<std::ptrdiff_t>(branches_.size());
  branches_.resize(branches_.size() +
                   std::max<uint64_t>(1, std::min<uint64_t>(most_branches_, order.size())));
  const auto fewer = [](const Branch& a, const Branch& b) { return a.elements < b.elements; };
  for (const uint64_t i : order) {
    Branch& branch = *std::min_element(branches_.begin() + begin, branches_.end(), fewer);
    const uint64_t bytes = aligned(sizes_[i].bytes);
    branch.batches.push_back(Batch{{i}, false, bytes, {}});
    branch.elements += sizes_[i].elements + kThreads;  // the smallest tensors are work, too
    branch.bytes = std::max(branch.bytes, bytes);
  }
}

uint64_t Several::arguments_bytes(const Batch& batch) const {
  uint64_t bytes = 0;
  for (const KeptLaunch& launch : sizes_[batch.members[0]].launches.launches())
    bytes += aligned(batch.members.size() * launch.arguments.size());
  return bytes;
}

std::vector<uint8_t> Several::merge(void* workspace) {
  std::vector<uint8_t> arguments;
  for (Branch& branch : branches_)
    for (Batch& batch : branch.batches)
      if (batch.merges) merge(batch, workspace, branch.start, arguments);
  return arguments;
}

void Several::merge(Batch& batch, void* workspace, uint64_t start,
                    std::vector<uint8_t>& arguments) const {
  uint8_t* const memory = static_cast<uint8_t*>(workspace);
  std::vector<KeptLaunches> kept(batch.members.size());
  for (size_t m = 0; m < batch.members.size(); ++m) {
    const uint64_t i = batch.members[m], bytes = sizes_[i].merged_bytes;
    Device device(memory + start, bytes, kept[m], result_of(i));
    work(i, workspace, device);
    start += bytes;
  }
  for (size_t position = 0; position < kept[0].launches().size(); ++position) {
    const KeptLaunch& first = kept[0].launches()[position];
    Merged merged{first.start, first.grid, memory + arguments_start_ + arguments.size()};
    for (const KeptLaunches& one : kept) {
      const KeptLaunch& launch = one.launches()[position];
      merged.grid.blocks = std::max(merged.grid.blocks, launch.grid.blocks);
      merged.grid.shared_bytes = std::max(merged.grid.shared_bytes, launch.grid.shared_bytes);
      arguments.insert(arguments.end(), launch.arguments.begin(), launch.arguments.end());
    }
    arguments.resize(aligned(arguments.size()));
    batch.launches.push_back(merged);
  }
}

void Several::start(uint32_t branch, void* workspace, cudaStream_t stream) const {
  const Branch& mine = branches_[branch];
  for (const Batch& batch : mine.batches) {
    if (batch.merges) {
      for (const Merged& launch : batch.launches)
        launch.start(launch.arguments, static_cast<uint32_t>(batch.members.size()), launch.grid,
                     stream);
      continue;
    }
    const uint64_t i = batch.members[0];
    Device device(static_cast<uint8_t*>(workspace) + mine.start, batch.bytes, stream, result_of(i));
    work(i, workspace, device);
  }
}

// Each call reads the host's memory before it returns, because that is not pinned.
void copy_from_host(void* to, const std::vector<uint8_t>& from, cudaStream_t stream) {
  for (uint64_t at = 0; at < from.size(); at += kMostCopied)
    throw_if_failed(cudaMemcpyAsync(static_cast<uint8_t*>(to) + at, from.data() + at,
                                    std::min<uint64_t>(kMostCopied, from.size() - at),
                                    cudaMemcpyHostToDevice, stream),
                    "copying a table");
}

}  // namespace cuda
}  // namespace deepreduce
