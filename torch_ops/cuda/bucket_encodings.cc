// The encodings of the gradients of one bucket on a CUDA device, step after step.
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/custom_class.h>

#include "repeated.h"

namespace deepreduce_torch {
namespace {

constexpr int64_t kReportBytes = sizeof(dr_cuda_result) + DR_HEADER_BYTES;
constexpr int64_t kRoomAlignment = 256;

using OptionalTensors = std::vector<std::optional<at::Tensor>>;

struct Encode {
  std::vector<dr_codec> codecs;
  std::vector<dr_cuda_encoding> encodings;
  std::vector<at::Tensor> rooms;
  at::Tensor reports;

  int start(dr_context* context, void* workspace, size_t* bytes, void* stream) {
    return dr_cuda_encode(context, codecs.data(), encodings.data(), encodings.size(), workspace,
                          bytes, stream);
  }
  int record(dr_context* context, void* workspace, size_t* bytes, dr_cuda_graph** graph) {
    return dr_cuda_record_encodings(context, codecs.data(), encodings.data(), encodings.size(),
                                    workspace, bytes, graph);
  }
  int launch(dr_context* context, const dr_cuda_graph* graph, void* stream) const {
    return dr_cuda_launch_encodings(context, graph, encodings.data(), stream);
  }

  void allocate(at::Device device) {
    int64_t bytes = 0;
    std::vector<int64_t> starts;
    for (const dr_cuda_encoding& encoding : encodings) {
      starts.push_back(bytes);
      const int64_t capacity = static_cast<int64_t>(encoding.payload_capacity);
      bytes += (capacity + kRoomAlignment - 1) / kRoomAlignment * kRoomAlignment;
    }
    const at::Tensor memory = device_bytes(bytes, device);
    const int64_t count = static_cast<int64_t>(encodings.size());
    reports = device_bytes(count * kReportBytes, device).view({count, kReportBytes});
    for (int64_t i = 0; i < count; ++i) {
      dr_cuda_encoding& encoding = encodings[i];
      rooms.push_back(memory.narrow(0, starts[i], static_cast<int64_t>(encoding.payload_capacity)));
      encoding.payload = rooms.back().mutable_data_ptr<uint8_t>();
      uint8_t* report = reports.mutable_data_ptr<uint8_t>() + i * kReportBytes;
      encoding.result = reinterpret_cast<dr_cuda_result*>(report);
      encoding.header = report + sizeof(dr_cuda_result);
    }
  }
};

// Args of start: one entry for each gradient, but DR_CODEC_FIELDS numbers for each codec. It
// returns, without waiting, memory that will begin with each payload, and (n, kReportBytes)
// reports: a dr_cuda_result followed by the payload's header, which contains the payload's size.
class BucketEncodings : public torch::CustomClassHolder {
 public:
  explicit BucketEncodings(std::vector<std::string> names) : names_(std::move(names)) {}

  std::tuple<std::vector<at::Tensor>, at::Tensor> start(
      const std::vector<at::Tensor>& gradients, const OptionalTensors& residuals,
      const OptionalTensors& velocities, const std::vector<double>& fields, int64_t seed,
      const std::vector<int64_t>& steps, const std::vector<int64_t>& keys, int64_t rank) {
    const size_t count = names_.size();
    DR_EXPECT(count > 0 && gradients.size() == count && residuals.size() == count &&
                  velocities.size() == count && steps.size() == count && keys.size() == count &&
                  fields.size() == count * DR_CODEC_FIELDS,
              "bucket: expected ", count, " gradients, residuals, velocities, steps, keys and ",
              "codecs of ", DR_CODEC_FIELDS, " numbers, got ", gradients.size(), ", ",
              residuals.size(), ", ", velocities.size(), ", ", steps.size(), ", ", keys.size(),
              " and ", fields.size(), " numbers");
    const at::Device device = gradients[0].device();
    DR_EXPECT(device.is_cuda(), "parameter ", names_[0], ": gradient: expected a CUDA tensor, got ",
              describe(gradients[0]));
    const c10::cuda::CUDAGuard guard(device);
    void* const stream = c10::cuda::getCurrentCUDAStream(device.index()).stream();
    Encode call;
    Key key;
    key.add(stream);
    bool repeats = true;
    for (size_t i = 0; i < count; ++i) {
      call.encodings.push_back(encoding_of(i, device, gradients[i], residuals[i], velocities[i]));
      call.encodings.back().position = position_of(seed, steps[i], keys[i], rank);
      const at::ArrayRef<double> numbers(fields.data() + i * DR_CODEC_FIELDS, DR_CODEC_FIELDS);
      call.codecs.push_back(codec_of(numbers));
      DR_EXPECT(dr_cuda_supports(&call.codecs.back()) != 0, "parameter ", names_[i],
                ": codec: expected one with CUDA kernels, got one that works only on the host");
      repeats = repeats && dr_cuda_repeats(&call.codecs.back()) != 0;
      key.add(numbers);
      key.add(static_cast<uint64_t>(call.encodings.back().dtype));
      key.add(call.encodings.back().d);
      key.add(call.encodings.back().residual);
      key.add(call.encodings.back().velocity);
    }
    const Encode& done = calls_.run(call, key, repeats, device, stream);
    return {done.rooms, done.reports};
  }

 private:
  dr_cuda_encoding encoding_of(size_t i, at::Device device, const at::Tensor& gradient,
                               const std::optional<at::Tensor>& residual,
                               const std::optional<at::Tensor>& velocity) const {
    DR_EXPECT(gradient.device() == device && gradient.dim() == 1 && gradient.is_contiguous() &&
                  dtype_code(gradient.scalar_type()) >= 0,
              "parameter ", names_[i],
              ": gradient: expected contiguous 1-D Float, Half, BFloat16 or Double on ", device,
              ", got ", describe(gradient));
    const std::string of = "parameter " + names_[i] + ": ";
    dr_cuda_encoding encoding{};
    encoding.gradient = gradient.const_data_ptr();
    encoding.dtype = dtype_code(gradient.scalar_type());
    encoding.d = static_cast<uint64_t>(gradient.numel());
    encoding.residual = state_data(residual, gradient.numel(), device, (of + "residual").c_str());
    encoding.velocity = state_data(velocity, gradient.numel(), device, (of + "velocity").c_str());
    return encoding;
  }

  const std::vector<std::string> names_;
  Repeated<Encode> calls_;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(deepreduce, library) {
  library.class_<BucketEncodings>("BucketEncodings")
      .def(torch::init<std::vector<std::string>>())
      .def("start", &BucketEncodings::start);
}

}  // namespace deepreduce_torch
