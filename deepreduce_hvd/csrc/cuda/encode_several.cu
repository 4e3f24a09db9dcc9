// Encodings of several tensors, on one stream or on the branches of a graph.
#include <numeric>

#include "container/header.h"
#include "cuda/encode.cuh"

namespace deepreduce {
namespace cuda {

namespace {
uint64_t aligned(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }
}  // namespace

Encodings::Encodings(const dr_codec* codecs, const dr_cuda_encoding* encodings, uint64_t count,
                     uint32_t branches)
    : payload_capacities_(count), codecs_(codecs), encodings_(encodings) {
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
    cuda::encode(measured, codecs[i], Encoding{encodings[i], nullptr});
    payload_capacities_[i] = measured.payload_capacity();
    Branch& branch = *std::min_element(branches_.begin(), branches_.end(), fewer);
    branch.members.push_back(i);
    branch.elements += encodings[i].d + kThreads;  // the smallest tensors are work, too
    branch.bytes = std::max(branch.bytes, measured.most_used());
  }
  // the inputs come first; with them, the workspace is never empty
  workspace_bytes_ = aligned((count + 1) * sizeof(Inputs));
  for (Branch& branch : branches_) {
    branch.start = workspace_bytes_;
    branch.bytes = aligned(branch.bytes);
    workspace_bytes_ += branch.bytes;
  }
}

void Encodings::set_inputs(const dr_cuda_encoding* encodings, uint64_t count, void* workspace,
                           cudaStream_t stream) {
  std::vector<Inputs> inputs(count);
  std::transform(encodings, encodings + count, inputs.begin(), inputs_of);
  // the call reads the host's memory before it returns, because that is not pinned
  throw_if_failed(cudaMemcpyAsync(workspace, inputs.data(), count * sizeof(Inputs),
                                  cudaMemcpyHostToDevice, stream),
                  "copying inputs");
}

void Encodings::encode(uint32_t branch, void* workspace, cudaStream_t stream) const {
  const Branch& mine = branches_[branch];
  for (const uint64_t i : mine.members) {
    const Encoding encoding{encodings_[i], static_cast<const Inputs*>(workspace) + i};
    check_room(encoding, payload_capacities_[i]);
    Device device(static_cast<uint8_t*>(workspace) + mine.start, mine.bytes, stream,
                  encoding.result);
    cuda::encode(device, codecs_[i], encoding);
    if (encoding.header != nullptr) device.copy(encoding.header, encoding.payload, kHeaderBytes);
  }
}

}  // namespace cuda
}  // namespace deepreduce
