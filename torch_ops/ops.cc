// The PyTorch operators: they check tensors and call the native core.
#include <torch/library.h>

#include <exception>

#include "arguments.h"
#include "support/host_scratch.h"

namespace deepreduce_torch {
namespace {

// Scratch memory and result of one call, freed with it.
class Call {
 public:
  Call() {
    context.allocate = [](void* user, size_t bytes) noexcept {
      return static_cast<Call*>(user)->scratch_.allocate(bytes);
    };
    context.output = [](void* user, size_t bytes) noexcept -> void* {
      Call* call = static_cast<Call*>(user);
      try {
        call->result = at::empty({static_cast<int64_t>(bytes)}, at::kByte);
      } catch (const std::exception&) {
        return nullptr;
      }
      // null would mean a failed allocation
      return bytes == 0 ? static_cast<void*>(call) : call->result.data_ptr();
    };
    context.user = this;
    context.simd = -1;
  }

  void check(int status) const { DR_CHECK_STATUS(status, context.message); }

  dr_context context{};
  at::Tensor result;

 private:
  deepreduce::HostScratch scratch_;
};

struct PayloadList {
  std::vector<const uint8_t*> data;
  std::vector<uint64_t> sizes;
  std::vector<at::Tensor> kept;
  explicit PayloadList(const std::vector<at::Tensor>& payloads) {
    for (const at::Tensor& payload : payloads) {
      expect_payload(payload);
      kept.push_back(payload.contiguous());
      data.push_back(kept.back().const_data_ptr<uint8_t>());
      sizes.push_back(static_cast<uint64_t>(payload.numel()));
    }
  }
};

}  // namespace

namespace host {

at::Tensor encode(const at::Tensor& gradient, const std::optional<at::Tensor>& residual,
                  const std::optional<at::Tensor>& velocity,
                  const std::optional<at::Tensor>& threshold, at::ArrayRef<double> codec_fields,
                  int64_t seed, int64_t step, int64_t tensor, int64_t rank) {
  expect_gradient(gradient);
  const dr_codec codec = codec_of(codec_fields);
  dr_encoding encoding{};
  encoding.gradient = gradient.const_data_ptr();
  encoding.dtype = dtype_code(gradient.scalar_type());
  encoding.d = static_cast<uint64_t>(gradient.numel());
  encoding.residual = state_data(residual, gradient.numel(), at::kCPU, "residual");
  encoding.velocity = state_data(velocity, gradient.numel(), at::kCPU, "velocity");
  float* remembered = state_data(threshold, 1, at::kCPU, "threshold");
  if (remembered != nullptr) encoding.threshold = *remembered;
  encoding.position = position_of(seed, step, tensor, rank);
  Call call;
  call.check(dr_encode(&call.context, &codec, &encoding));
  if (remembered != nullptr) *remembered = encoding.threshold;
  return call.result;
}

// `codec` is unused here: the payloads have the codec in their headers.
void decode_sum_(at::Tensor out, const std::vector<at::Tensor>& payloads, double scale,
                 std::optional<at::ArrayRef<double>>) {
  const PayloadList list(payloads);
  float* sum = state_data(out, out.numel(), at::kCPU, "out");
  Call call;
  call.check(dr_decode_sum(&call.context, list.data.data(), list.sizes.data(), list.data.size(),
                           sum, static_cast<uint64_t>(out.numel()), static_cast<float>(scale),
                           nullptr));
}

at::Tensor decode(const at::Tensor& payload, int64_t d) {
  expect_elements(d);
  at::Tensor out = at::zeros({d}, at::kFloat);
  decode_sum_(out, {payload}, 1.0, std::nullopt);
  return out;
}

std::tuple<at::Tensor, at::Tensor> decode_sparse(const std::vector<at::Tensor>& payloads, int64_t d,
                                                 double scale) {
  expect_elements(d);
  const PayloadList list(payloads);
  Call call;
  call.check(dr_decode_sparse(&call.context, list.data.data(), list.sizes.data(), list.data.size(),
                              static_cast<uint64_t>(d), static_cast<float>(scale)));
  const int64_t count = call.result.numel() / 8;
  // d < 2^31
  const at::Tensor indices = call.result.narrow(0, 0, 4 * count).view(at::kInt).to(at::kLong);
  return {indices, call.result.narrow(0, 4 * count, 4 * count).view(at::kFloat).clone()};
}

}  // namespace host
}  // namespace deepreduce_torch

// codec: the 20 numbers of Codec.fields. decode_sum_ can do without it; on a device it must then
// read the payloads first.
TORCH_LIBRARY(deepreduce, library) {
  library.def(
      "encode(Tensor gradient, Tensor(a!)? residual, Tensor(b!)? velocity, Tensor(c!)? threshold, float[] codec, int seed, int step, "
      "int tensor, int rank) -> Tensor");
  library.def(
      "decode_sum_(Tensor(a!) out, Tensor[] payloads, float scale, float[]? codec=None) -> ()");
  library.def("decode(Tensor payload, int d) -> Tensor");
  library.def("decode_sparse(Tensor[] payloads, int d, float scale) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(deepreduce, CPU, library) {
  namespace host = deepreduce_torch::host;
  library.impl("encode", &host::encode);
  library.impl("decode_sum_", &host::decode_sum_);
  library.impl("decode", &host::decode);
  library.impl("decode_sparse", &host::decode_sparse);
}
