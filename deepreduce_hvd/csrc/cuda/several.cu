#include "cuda/several.cuh"

#include <numeric>

#include "container/header.h"

namespace deepreduce {
namespace cuda {
namespace {

uint64_t aligned(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// The call reads the host's memory before it returns, because that is not pinned.
void copy_from_host(void* to, const std::vector<uint8_t>& from, cudaStream_t stream) {
  if (from.empty()) return;
  throw_if_failed(cudaMemcpyAsync(to, from.data(), from.size(), cudaMemcpyHostToDevice, stream),
                  "copying a table");
}

// The table of sums: the inputs of all of them, and then all payloads.
const Payload* payloads_in(const void* table, uint64_t count) {
  return reinterpret_cast<const Payload*>(static_cast<const SumInputs*>(table) + count);
}

}  // namespace

void Branches::set(uint64_t i, uint64_t elements, uint64_t bytes) {
  elements_[i] = elements;
  bytes_[i] = bytes;
}

void Branches::divide(uint32_t most, uint64_t table_bytes) {
  const uint64_t count = elements_.size();
  branches_.assign(std::max<uint64_t>(1, std::min<uint64_t>(most, count)), Branch{});
  std::vector<uint64_t> order(count);
  std::iota(order.begin(), order.end(), uint64_t{0});
  // the largest first, each to the branch with the fewest elements
  std::stable_sort(order.begin(), order.end(),
                   [&](uint64_t a, uint64_t b) { return elements_[a] > elements_[b]; });
  const auto fewer = [](const Branch& a, const Branch& b) { return a.elements < b.elements; };
  for (const uint64_t i : order) {
    Branch& branch = *std::min_element(branches_.begin(), branches_.end(), fewer);
    branch.members.push_back(i);
    branch.elements += elements_[i] + kThreads;  // the smallest tensors are work, too
    branch.bytes = std::max(branch.bytes, aligned(bytes_[i]));
  }
  // never empty, so that the caller's workspace is not null
  workspace_bytes_ = aligned(table_bytes + 1);
  for (Branch& branch : branches_) {
    branch.start = workspace_bytes_;
    workspace_bytes_ += branch.bytes;
  }
}

Device Branches::device(uint32_t branch, void* workspace, cudaStream_t stream,
                        dr_cuda_result* result) const {
  const Branch& mine = branches_[branch];
  return Device(static_cast<uint8_t*>(workspace) + mine.start, mine.bytes, stream, result);
}

Encodings::Encodings(const dr_codec* codecs, const dr_cuda_encoding* encodings, uint64_t count,
                     uint32_t most_branches)
    : codecs_(codecs), encodings_(encodings), payload_capacities_(count), branches_(count) {
  for (uint64_t i = 0; i < count; ++i) {
    check(codecs[i], encodings[i]);
    Device measured;
    encode(measured, codecs[i], Encoding{encodings[i], nullptr});
    payload_capacities_[i] = measured.payload_capacity();
    branches_.set(i, encodings[i].d, measured.most_used());
  }
  branches_.divide(most_branches, count * sizeof(Inputs));
}

void Encodings::set_table(const dr_cuda_encoding* encodings, uint64_t count, void* workspace,
                          cudaStream_t stream) {
  std::vector<uint8_t> table(count * sizeof(Inputs));
  std::transform(encodings, encodings + count, reinterpret_cast<Inputs*>(table.data()), inputs_of);
  copy_from_host(workspace, table, stream);
}

void Encodings::start(uint32_t branch, void* workspace, cudaStream_t stream) const {
  for (const uint64_t i : branches_.members(branch)) {
    const Encoding encoding{encodings_[i], static_cast<const Inputs*>(workspace) + i};
    check_room(encoding, payload_capacities_[i]);
    Device device = branches_.device(branch, workspace, stream, encoding.result);
    encode(device, codecs_[i], encoding);
    if (encoding.header != nullptr) device.copy(encoding.header, encoding.payload, kHeaderBytes);
  }
}

Sums::Sums(const dr_codec& codec, const dr_cuda_sum* sums, uint64_t count, uint32_t most_branches)
    : codec_(codec), sums_(sums), count_(count), first_(count), branches_(count) {
  uint64_t payloads = 0;
  for (uint64_t i = 0; i < count; ++i) {
    const dr_cuda_sum& sum = sums[i];
    if (sum.d > kMaxElements)
      invalid_argument("out: expected at most %llu elements, got %llu",
                       static_cast<unsigned long long>(kMaxElements),
                       static_cast<unsigned long long>(sum.d));
    first_[i] = payloads;
    payloads += sum.payload_count;
    Device measured;
    for (uint64_t p = 0; p < sum.payload_count; ++p) {
      const uint64_t mark = measured.mark();
      decode_sum(measured, codec, p, nullptr, described(codec, sum.d, nullptr, sum.most_sizes[p]),
                 nullptr, sum.d);
      measured.release(mark);
    }
    branches_.set(i, sum.d, measured.most_used());
  }
  branches_.divide(most_branches, count * sizeof(SumInputs) + payloads * sizeof(Payload));
}

void Sums::set_table(const dr_codec& codec, const dr_cuda_sum* sums, uint64_t count,
                     void* workspace, cudaStream_t stream) {
  uint64_t payloads = 0;
  for (uint64_t i = 0; i < count; ++i) payloads += sums[i].payload_count;
  std::vector<uint8_t> table(count * sizeof(SumInputs) + payloads * sizeof(Payload));
  SumInputs* inputs = reinterpret_cast<SumInputs*>(table.data());
  Payload* payload = reinterpret_cast<Payload*>(inputs + count);
  for (uint64_t i = 0; i < count; ++i) {
    const dr_cuda_sum& sum = sums[i];
    inputs[i] = {sum.out, sum.scale};
    for (uint64_t p = 0; p < sum.payload_count; ++p)
      *payload++ = described(codec, sum.d, sum.payloads[p], sum.sizes[p]);
  }
  copy_from_host(workspace, table, stream);
}

void Sums::start(uint32_t branch, void* workspace, cudaStream_t stream) const {
  for (const uint64_t i : branches_.members(branch)) {
    const dr_cuda_sum& sum = sums_[i];
    Device device = branches_.device(branch, workspace, stream, sum.result);
    device.zero(sum.result, sizeof(dr_cuda_result));
    for (uint64_t p = 0; p < sum.payload_count; ++p) {
      const uint64_t mark = device.mark();
      decode_sum(device, codec_, p, payloads_in(workspace, count_) + first_[i] + p,
                 described(codec_, sum.d, nullptr, sum.most_sizes[p]),
                 static_cast<const SumInputs*>(workspace) + i, sum.d);
      device.release(mark);
    }
  }
}

}  // namespace cuda
}  // namespace deepreduce
