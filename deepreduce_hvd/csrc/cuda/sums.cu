// The sums of the payloads of several tensors.
#include "container/header.h"
#include "cuda/several.cuh"

namespace deepreduce {
namespace cuda {
namespace {

// The table of sums: the inputs of all of them, and then all payloads.
const Payload* payloads_in(const void* table, uint64_t count) {
  return reinterpret_cast<const Payload*>(static_cast<const SumInputs*>(table) + count);
}

}  // namespace

Sums::Sums(const dr_codec& codec, const dr_cuda_sum* sums, uint64_t count, uint32_t most_branches)
    : Several(count, most_branches), codec_(codec), sums_(sums), count_(count), first_(count) {
  uint64_t payloads = 0;
  for (uint64_t i = 0; i < count; ++i) {
    if (sums[i].d > kMaxElements)
      invalid_argument("out: expected at most %llu elements, got %llu",
                       static_cast<unsigned long long>(kMaxElements),
                       static_cast<unsigned long long>(sums[i].d));
    first_[i] = payloads;
    payloads += sums[i].payload_count;
    measure(i, sums[i].d);
  }
  divide(count * sizeof(SumInputs) + payloads * sizeof(Payload));
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

void Sums::work(uint64_t i, const void* table, Device& device) const {
  const dr_cuda_sum& sum = sums_[i];
  const SumInputs* inputs = table == nullptr ? nullptr : static_cast<const SumInputs*>(table) + i;
  const Payload* payloads = table == nullptr ? nullptr : payloads_in(table, count_) + first_[i];
  device.zero(sum.result, sizeof(dr_cuda_result));
  for (uint64_t p = 0; p < sum.payload_count; ++p) {
    const uint64_t mark = device.mark();
    decode_sum(device, codec_, p, payloads == nullptr ? nullptr : payloads + p,
               described(codec_, sum.d, nullptr, sum.most_sizes[p]), inputs, sum.d);
    device.release(mark);
  }
}

}  // namespace cuda
}  // namespace deepreduce
