// Encodings of several tensors, on one stream or on the branches of a graph.
#include <numeric>

#include "container/header.h"
#include "cuda/encode.cuh"

namespace deepreduce {
namespace cuda {

Encodings::Encodings(const dr_codec* codecs, const dr_cuda_encoding* encodings, uint64_t count,
                     uint32_t branches)
    : codecs_(codecs), encodings_(encodings) {
  branches_.resize(std::max<uint64_t>(1, std::min<uint64_t>(branches, count)), Branch{});
  std::vector<uint64_t> order(count);
  std::iota(order.begin(), order.end(), uint64_t{0});
  // the largest first, each to the branch with the fewest elements
  std::stable_sort(order.begin(), order.end(),
                   [&](uint64_t a, uint64_t b) { return encodings[a].d > encodings[b].d; });
  const auto fewer = [](const Branch& a, const Branch& b) { return a.elements < b.elements; };
  for (const uint64_t i : order) {
    check(codecs[i], encodings[i]);
    Device measured;
    cuda::encode(measured, codecs[i], encodings[i]);
    Branch& branch = *std::min_element(branches_.begin(), branches_.end(), fewer);
    branch.members.push_back(i);
    branch.elements += encodings[i].d + kThreads;  // the smallest tensors are work, too
    branch.bytes = std::max(branch.bytes, measured.most_used());
  }
  for (Branch& branch : branches_) {
    branch.start = workspace_bytes_;
    branch.bytes = (branch.bytes + kAlignment - 1) / kAlignment * kAlignment;
    workspace_bytes_ += branch.bytes;
  }
  // so that the caller's workspace is not null
  workspace_bytes_ = std::max(workspace_bytes_, kAlignment);
}

void Encodings::encode(uint32_t branch, void* workspace, cudaStream_t stream) const {
  const Branch& mine = branches_[branch];
  for (const uint64_t i : mine.members) {
    const dr_cuda_encoding& encoding = encodings_[i];
    check_room(encoding);
    Device device(static_cast<uint8_t*>(workspace) + mine.start, mine.bytes, stream,
                  encoding.result);
    cuda::encode(device, codecs_[i], encoding);
    if (encoding.header != nullptr) device.copy(encoding.header, encoding.payload, kHeaderBytes);
  }
}

bool repeats(const dr_codec& codec) {
  const Stages stages = stages_of(codec);
  return codec.sparsifier.id != kRandomK && !stages.index->random && !stages.value->random;
}

}  // namespace cuda
}  // namespace deepreduce
