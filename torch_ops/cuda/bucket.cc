// The encodings of the gradients of one bucket on a CUDA device. Launching their kernels takes the
// host longer than running them takes the device. So if a step has the same codecs and memories as
// an earlier one, its launches are recorded as a CUDA graph, which later steps start by a single
// call.
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "../arguments.h"
#include "cuda/deepreduce_cuda.h"

namespace deepreduce_torch {
namespace {

constexpr int64_t kFields = 20;  // numbers that describe a codec
constexpr int64_t kReportBytes = sizeof(dr_cuda_result) + DR_HEADER_BYTES;
constexpr int64_t kRoomAlignment = 256;

using OptionalTensors = std::vector<std::optional<at::Tensor>>;

at::Tensor device_bytes(int64_t bytes, at::Device device) {
  return at::empty({std::max<int64_t>(bytes, 1)}, at::TensorOptions(at::kByte).device(device));
}

struct FreeGraph {
  void operator()(dr_cuda_graph* graph) const { dr_cuda_free(graph); }
};

// What a graph depends on: everything of a step except gradients and random numbers.
using Key = std::vector<uint64_t>;

uint64_t bits_of(double number) {
  uint64_t bits;
  std::memcpy(&bits, &number, sizeof(bits));
  return bits;
}
uint64_t bits_of(const void* address) { return reinterpret_cast<uintptr_t>(address); }

// One step's encodings, and the memory that they write.
struct Step {
  std::vector<dr_codec> codecs;
  std::vector<dr_cuda_encoding> encodings;
  std::vector<at::Tensor> rooms;
  at::Tensor reports;

  // Allocates memory for payloads of the encodings' capacities, and for reports.
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

struct Recorded {
  Key key;
  Step step;
  at::Tensor workspace;
  std::unique_ptr<dr_cuda_graph, FreeGraph> graph;
};

// Args of start: one entry for each gradient, but kFields numbers for each codec. It returns,
// without waiting, memory for each payload, and (n, kReportBytes) reports: a dr_cuda_result
// followed by the payload's header, which contains the payload's size. The next call may write the
// same memory.
class BucketEncodings : public torch::CustomClassHolder {
 public:
  explicit BucketEncodings(std::vector<std::string> names) : names_(std::move(names)) {}

  std::tuple<std::vector<at::Tensor>, at::Tensor> start(
      const std::vector<at::Tensor>& gradients, const OptionalTensors& residuals,
      const OptionalTensors& velocities, const std::vector<double>& fields, int64_t seed,
      const std::vector<int64_t>& steps, const std::vector<int64_t>& keys, int64_t rank) {
    const size_t count = names_.size();
    DR_EXPECT(gradients.size() == count && residuals.size() == count &&
                  velocities.size() == count && steps.size() == count && keys.size() == count &&
                  fields.size() == count * kFields && count > 0,
              "bucket: expected ", count, " gradients, got ", gradients.size());
    const at::Device device = gradients[0].device();
    DR_EXPECT(device.is_cuda(), "parameter ", names_[0], ": gradient: expected a CUDA tensor, got ",
              describe(gradients[0]));
    const c10::cuda::CUDAGuard guard(device);
    void* const stream = c10::cuda::getCurrentCUDAStream(device.index()).stream();
    Step step;
    Key key{bits_of(stream)};
    bool repeats = true;
    for (size_t i = 0; i < count; ++i) {
      add(step, key, i, device, gradients[i], residuals[i], velocities[i],
          at::ArrayRef<double>(fields.data() + i * kFields, kFields),
          position_of(seed, steps[i], keys[i], rank));
      repeats = repeats && dr_cuda_repeats(&step.codecs[i]) != 0;
    }
    if (recorded_.has_value() && recorded_->key == key) {
      launch(step, stream);
    } else {
      const bool again = repeats && key == last_;
      last_ = key;
      if (again && may_record_ && record(step, key, device)) {
        launch(step, stream);
      } else {
        encode(step, device, stream);
        return {step.rooms, step.reports};
      }
    }
    return {recorded_->step.rooms, recorded_->step.reports};
  }

 private:
  void add(Step& step, Key& key, size_t i, at::Device device, const at::Tensor& gradient,
           const std::optional<at::Tensor>& residual, const std::optional<at::Tensor>& velocity,
           at::ArrayRef<double> fields, const dr_position& position) {
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
    encoding.position = position;
    step.codecs.push_back(codec_of(fields));
    DR_EXPECT(dr_cuda_supports(&step.codecs.back()) != 0, of,
              "codec: expected one with CUDA kernels, got one that works only on the host");
    step.encodings.push_back(encoding);
    key.insert(key.end(), {static_cast<uint64_t>(encoding.dtype), encoding.d,
                           bits_of(encoding.residual), bits_of(encoding.velocity)});
    for (const double number : fields) key.push_back(bits_of(number));
  }

  static void encode(Step& step, at::Device device, void* stream) {
    dr_context context{};
    size_t bytes = 0;
    const auto call = [&](void* workspace) {
      const int status = dr_cuda_encode(&context, step.codecs.data(), step.encodings.data(),
                                        step.encodings.size(), workspace, &bytes, stream);
      DR_CHECK_STATUS(status, context.message);
    };
    call(nullptr);
    step.allocate(device);
    const at::Tensor workspace = device_bytes(static_cast<int64_t>(bytes), device);
    call(workspace.mutable_data_ptr());
  }

  // Returns whether the step was recorded. If not, a driver cannot do it, and it is not tried
  // again.
  bool record(const Step& step, const Key& key, at::Device device) {
    recorded_.reset();
    Recorded made{key, step, at::Tensor(), nullptr};
    dr_context context{};
    size_t bytes = 0;
    dr_cuda_graph* graph = nullptr;
    const auto call = [&](void* workspace) {
      return dr_cuda_record(&context, made.step.codecs.data(), made.step.encodings.data(),
                            made.step.encodings.size(), workspace, &bytes, &graph);
    };
    const int status = call(nullptr);
    DR_CHECK_STATUS(status, context.message);
    made.step.allocate(device);
    made.workspace = device_bytes(static_cast<int64_t>(bytes), device);
    if (call(made.workspace.mutable_data_ptr()) != DR_OK) return may_record_ = false;
    made.graph.reset(graph);
    recorded_ = std::move(made);
    return true;
  }

  void launch(const Step& step, void* stream) const {
    dr_context context{};
    const int status =
        dr_cuda_launch(&context, recorded_->graph.get(), step.encodings.data(), stream);
    DR_CHECK_STATUS(status, context.message);
  }

  const std::vector<std::string> names_;
  std::optional<Recorded> recorded_;
  Key last_;
  bool may_record_ = true;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(deepreduce, library) {
  library.class_<BucketEncodings>("BucketEncodings")
      .def(torch::init<std::vector<std::string>>())
      .def("start", &BucketEncodings::start);
}

}  // namespace deepreduce_torch
