// The sums of the gradients of one bucket on a CUDA device, step after step.
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/custom_class.h>

#include "repeated.h"

namespace deepreduce_torch {
namespace {

constexpr int64_t kResultBytes = sizeof(dr_cuda_result);
// Sizes of payloads change in each step, but a graph is for a maximum size. A maximum is this much
// larger than the size, and is replaced if it is too small, or this many times too large.
constexpr uint64_t kSpareShare = 4, kTooLarge = 4;

struct Sum {
  dr_codec codec;
  std::vector<const uint8_t*> payloads;  // of the first tensor, then of the next one
  std::vector<uint64_t> sizes, most_sizes;
  std::vector<dr_cuda_sum> sums;
  at::Tensor results;

  int start(dr_context* context, void* workspace, size_t* bytes, void* stream) {
    return dr_cuda_decode_sum(context, &codec, sums.data(), sums.size(), workspace, bytes, stream);
  }
  int record(dr_context* context, void* workspace, size_t* bytes, dr_cuda_graph** graph) {
    return dr_cuda_record_sums(context, &codec, sums.data(), sums.size(), workspace, bytes, graph);
  }
  int launch(dr_context* context, const dr_cuda_graph* graph, void* stream) const {
    return dr_cuda_launch_sums(context, graph, &codec, sums.data(), stream);
  }

  void allocate(at::Device device) {
    const int64_t count = static_cast<int64_t>(sums.size());
    results = device_bytes(count * kResultBytes, device).view({count, kResultBytes});
    uint8_t* result = results.mutable_data_ptr<uint8_t>();
    for (dr_cuda_sum& sum : sums) {
      sum.result = reinterpret_cast<dr_cuda_result*>(result);
      result += kResultBytes;
    }
  }
};

// start adds scale times the payloads of each tensor to its (d,) float32 `out`, without waiting,
// and returns (n, kResultBytes): a dr_cuda_result for each tensor. `starts` and `sizes`: of the
// payloads in `bytes`, the same number for each tensor. `fields`: the numbers of the codec of all
// payloads.
class BucketSums : public torch::CustomClassHolder {
 public:
  at::Tensor start(const std::vector<at::Tensor>& outs, const at::Tensor& bytes,
                   const std::vector<int64_t>& starts, const std::vector<int64_t>& sizes,
                   double scale, const std::vector<double>& fields) {
    DR_EXPECT(!outs.empty() && starts.size() == sizes.size() && sizes.size() % outs.size() == 0,
              "bucket: expected the same number of payloads for each of ", outs.size(),
              " tensors, got ", sizes.size(), " payloads");
    const at::Device device = bytes.device();
    DR_EXPECT(device.is_cuda() && bytes.scalar_type() == at::kByte && bytes.dim() == 1 &&
                  bytes.is_contiguous(),
              "payloads: expected 1-D Byte on a CUDA device, got ", describe(bytes));
    const c10::cuda::CUDAGuard guard(device);
    void* const stream = c10::cuda::getCurrentCUDAStream(device.index()).stream();
    Sum call;
    call.codec = codec_of(fields);
    DR_EXPECT(dr_cuda_supports(&call.codec) != 0,
              "codec: expected one with CUDA kernels, got one that works only on the host");
    Key key;
    key.add(stream);
    key.add(at::ArrayRef<double>(fields));
    add_payloads(call, key, bytes, starts, sizes);
    const size_t ranks = sizes.size() / outs.size();
    for (size_t i = 0; i < outs.size(); ++i) {
      dr_cuda_sum sum{};
      sum.payloads = call.payloads.data() + i * ranks;
      sum.sizes = call.sizes.data() + i * ranks;
      sum.most_sizes = call.most_sizes.data() + i * ranks;
      sum.payload_count = ranks;
      sum.out = state_data(outs[i], outs[i].numel(), device, "out");
      sum.d = static_cast<uint64_t>(outs[i].numel());
      sum.scale = static_cast<float>(scale);
      call.sums.push_back(sum);
      key.add(sum.d);
    }
    return calls_.run(call, key, /*repeats=*/true, device, stream).results;
  }

 private:
  void add_payloads(Sum& call, Key& key, const at::Tensor& bytes,
                    const std::vector<int64_t>& starts, const std::vector<int64_t>& sizes) {
    most_.resize(sizes.size(), 0);
    for (size_t i = 0; i < sizes.size(); ++i) {
      DR_EXPECT(
          starts[i] >= 0 && sizes[i] >= DR_HEADER_BYTES && starts[i] <= bytes.numel() - sizes[i],
          "payload: expected at least ", DR_HEADER_BYTES, " of ", bytes.numel(), " bytes, got ",
          sizes[i], " from ", starts[i]);
      const uint64_t size = static_cast<uint64_t>(sizes[i]);
      if (size > most_[i] || most_[i] > kTooLarge * size) most_[i] = size + size / kSpareShare;
      call.payloads.push_back(bytes.const_data_ptr<uint8_t>() + starts[i]);
      call.sizes.push_back(size);
      key.add(most_[i]);
    }
    call.most_sizes = most_;
  }

  std::vector<uint64_t> most_;
  Repeated<Sum> calls_;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(deepreduce, library) {
  library.class_<BucketSums>("BucketSums").def(torch::init<>()).def("start", &BucketSums::start);
}

}  // namespace deepreduce_torch
