// The PyTorch operators: tensors are checked here, the work is the native core's.
#include <torch/library.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "deepreduce.h"
#include "host_scratch.h"

namespace {

// Scratch and result of one call, freed with it.
class Call {
 public:
  Call() {
    context.allocate = [](void* user, size_t bytes) { return static_cast<Call*>(user)->scratch_.allocate(bytes); };
    context.output = [](void* user, size_t bytes) -> void* {
      Call* call = static_cast<Call*>(user);
      call->result = at::empty({static_cast<int64_t>(bytes)}, at::kByte);
      // a null pointer would mean a failed allocation
      return bytes == 0 ? static_cast<void*>(call) : call->result.data_ptr();
    };
    context.user = this;
    context.simd = -1;
  }

  // The status leads the message, so that the Python side can raise the error by its cause.
  void check(int status) const { TORCH_CHECK(status == DR_OK, "deepreduce status ", status, ": ", context.message); }

  dr_context context{};
  at::Tensor result;

 private:
  deepreduce::HostScratch scratch_;
};

#define DR_EXPECT(condition, ...) TORCH_CHECK(condition, "deepreduce status ", int{DR_INVALID_ARGUMENT}, ": ", __VA_ARGS__)

std::string describe(const at::Tensor& tensor) {
  return c10::str(tensor.scalar_type(), " of shape ", tensor.sizes(), " on ", tensor.device(), tensor.is_contiguous() ? "" : ", not contiguous");
}

int dtype_code(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return DR_FLOAT32;
    case at::kHalf: return DR_FLOAT16;
    case at::kBFloat16: return DR_BFLOAT16;
    case at::kDouble: return DR_FLOAT64;
    default: return -1;
  }
}

float* state_data(const std::optional<at::Tensor>& state, int64_t d, const char* name) {
  if (!state.has_value()) return nullptr;
  DR_EXPECT(state->scalar_type() == at::kFloat && state->dim() == 1 && state->numel() == d && state->is_contiguous(), name,
            ": expected contiguous Float of shape [", d, "], got ", describe(*state));
  return state->mutable_data_ptr<float>();
}

struct PayloadList {
  std::vector<const uint8_t*> data;
  std::vector<uint64_t> sizes;
  std::vector<at::Tensor> kept;
  explicit PayloadList(const std::vector<at::Tensor>& payloads) {
    for (const at::Tensor& payload : payloads) {
      DR_EXPECT(payload.scalar_type() == at::kByte && payload.dim() == 1, "payload: expected 1-D Byte, got ", describe(payload));
      kept.push_back(payload.contiguous());
      data.push_back(kept.back().const_data_ptr<uint8_t>());
      sizes.push_back(static_cast<uint64_t>(payload.numel()));
    }
  }
};

at::Tensor encode(const at::Tensor& gradient, const std::optional<at::Tensor>& residual, const std::optional<at::Tensor>& velocity,
                  const std::optional<at::Tensor>& threshold, at::ArrayRef<double> codec_fields, int64_t seed, int64_t step,
                  int64_t tensor, int64_t rank) {
  DR_EXPECT(gradient.dim() == 1 && gradient.is_contiguous() && dtype_code(gradient.scalar_type()) >= 0,
            "gradient: expected contiguous 1-D Float, Half, BFloat16 or Double, got ", describe(gradient));
  DR_EXPECT(codec_fields.size() == 4 * (1 + DR_STAGE_PARAMETERS), "codec: expected 20 numbers, got ", codec_fields.size());
  dr_codec codec;
  dr_stage* stages[] = {&codec.sparsifier, &codec.index, &codec.value, &codec.memory};
  const double* field = codec_fields.data();
  for (dr_stage* stage : stages) {
    stage->id = static_cast<int32_t>(*field++);
    for (double& parameter : stage->parameters) parameter = *field++;
  }
  dr_encoding encoding{};
  encoding.gradient = gradient.const_data_ptr();
  encoding.dtype = dtype_code(gradient.scalar_type());
  encoding.d = static_cast<uint64_t>(gradient.numel());
  encoding.residual = state_data(residual, gradient.numel(), "residual");
  encoding.velocity = state_data(velocity, gradient.numel(), "velocity");
  float* remembered = state_data(threshold, 1, "threshold");
  if (remembered != nullptr) encoding.threshold = *remembered;
  encoding.position = {static_cast<uint64_t>(seed), static_cast<uint64_t>(step), static_cast<uint64_t>(tensor),
                       static_cast<uint64_t>(rank)};
  Call call;
  call.check(dr_encode(&call.context, &codec, &encoding));
  if (remembered != nullptr) *remembered = encoding.threshold;
  return call.result;
}

void decode_sum_(at::Tensor out, const std::vector<at::Tensor>& payloads, double scale) {
  const PayloadList list(payloads);
  float* sum = state_data(out, out.numel(), "out");
  Call call;
  call.check(dr_decode_sum(&call.context, list.data.data(), list.sizes.data(), list.data.size(), sum,
                           static_cast<uint64_t>(out.numel()), static_cast<float>(scale)));
}

at::Tensor decode(const at::Tensor& payload, int64_t d) {
  DR_EXPECT(d >= 0, "d: expected at least 0, got ", d);
  at::Tensor out = at::zeros({d}, at::kFloat);
  decode_sum_(out, {payload}, 1.0);
  return out;
}

std::tuple<at::Tensor, at::Tensor> decode_sparse(const std::vector<at::Tensor>& payloads, int64_t d, double scale) {
  DR_EXPECT(d >= 0, "d: expected at least 0, got ", d);
  const PayloadList list(payloads);
  Call call;
  call.check(dr_decode_sparse(&call.context, list.data.data(), list.sizes.data(), list.data.size(), static_cast<uint64_t>(d),
                              static_cast<float>(scale)));
  const int64_t count = call.result.numel() / 8;
  const at::Tensor indices = call.result.narrow(0, 0, 4 * count).view(at::kInt).to(at::kLong);  // d < 2^31
  return {indices, call.result.narrow(0, 4 * count, 4 * count).view(at::kFloat).clone()};
}

}  // namespace

TORCH_LIBRARY(deepreduce, library) {
  library.def(
      "encode(Tensor gradient, Tensor(a!)? residual, Tensor(b!)? velocity, Tensor(c!)? threshold, float[] codec, int seed, int step, "
      "int tensor, int rank) -> Tensor");
  library.def("decode_sum_(Tensor(a!) out, Tensor[] payloads, float scale) -> ()");
  library.def("decode(Tensor payload, int d) -> Tensor");
  library.def("decode_sparse(Tensor[] payloads, int d, float scale) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(deepreduce, CPU, library) {
  library.impl("encode", &encode);
  library.impl("decode_sum_", &decode_sum_);
  library.impl("decode", &decode);
  library.impl("decode_sparse", &decode_sparse);
}
