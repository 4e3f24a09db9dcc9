// The encodings of several tensors.
#include "container/header.h"
#include "cuda/several.cuh"

namespace deepreduce {
namespace cuda {

Encodings::Encodings(const dr_codec* codecs, const dr_cuda_encoding* encodings, uint64_t count,
                     uint32_t most_branches)
    : Several(count, most_branches),
      codecs_(codecs),
      encodings_(encodings),
      payload_capacities_(count) {
  for (uint64_t i = 0; i < count; ++i) {
    check(codecs[i], encodings[i]);
    payload_capacities_[i] = measure(i, encodings[i].d);
  }
  divide(count * sizeof(Inputs));
}

void Encodings::check_rooms() const {
  for (uint64_t i = 0; i < payload_capacities_.size(); ++i)
    check_room(encodings_[i], payload_capacities_[i]);
}

void Encodings::set_table(const dr_cuda_encoding* encodings, uint64_t count, void* workspace,
                          cudaStream_t stream) {
  std::vector<uint8_t> table(count * sizeof(Inputs));
  std::transform(encodings, encodings + count, reinterpret_cast<Inputs*>(table.data()), inputs_of);
  copy_from_host(workspace, table, stream);
}

void Encodings::work(uint64_t i, const void* table, Device& device) const {
  static const Inputs unread{};  // its address stands for those in the table
  const Inputs* inputs = table == nullptr ? &unread : static_cast<const Inputs*>(table) + i;
  const Encoding encoding{encodings_[i], inputs};
  encode(device, codecs_[i], encoding);
  // tensors with and without a header have the same launches, so that these can be merged
  if (encoding.header != nullptr || device.kept() != nullptr)
    device.copy(encoding.header != nullptr ? encoding.header : encoding.payload, encoding.payload,
                kHeaderBytes);
}

}  // namespace cuda
}  // namespace deepreduce
