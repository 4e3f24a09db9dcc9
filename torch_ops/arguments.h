// Checks and conversions of arguments, shared by the operators of all devices.
#ifndef DEEPREDUCE_TORCH_ARGUMENTS_H
#define DEEPREDUCE_TORCH_ARGUMENTS_H

// not ATen/ATen.h, which takes seconds to compile
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "api/deepreduce.h"

namespace deepreduce_torch {

// The message starts with the status, so that Python can raise the right type of error.
#define DR_CHECK_STATUS(status, message) \
  TORCH_CHECK((status) == DR_OK, "deepreduce status ", (status), ": ", (message))
#define DR_EXPECT(condition, ...) \
  TORCH_CHECK(condition, "deepreduce status ", int{DR_INVALID_ARGUMENT}, ": ", __VA_ARGS__)

inline std::string describe(const at::Tensor& tensor) {
  return c10::str(tensor.scalar_type(), " of shape ", tensor.sizes(), " on ", tensor.device(),
                  tensor.is_contiguous() ? "" : ", not contiguous");
}

inline int dtype_code(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return DR_FLOAT32;
    case at::kHalf:
      return DR_FLOAT16;
    case at::kBFloat16:
      return DR_BFLOAT16;
    case at::kDouble:
      return DR_FLOAT64;
    default:
      return -1;
  }
}

inline void expect_gradient(const at::Tensor& gradient) {
  DR_EXPECT(
      gradient.dim() == 1 && gradient.is_contiguous() && dtype_code(gradient.scalar_type()) >= 0,
      "gradient: expected contiguous 1-D Float, Half, BFloat16 or Double, got ",
      describe(gradient));
}

inline void expect_payload(const at::Tensor& payload) {
  DR_EXPECT(payload.scalar_type() == at::kByte && payload.dim() == 1,
            "payload: expected 1-D Byte, got ", describe(payload));
}

inline void expect_elements(int64_t d) { DR_EXPECT(d >= 0, "d: expected at least 0, got ", d); }

// Returns null if there is no tensor. An empty tensor has no memory in PyTorch, so it gives a
// pointer that is never read.
inline float* state_data(const std::optional<at::Tensor>& state, int64_t d, at::Device device,
                         const char* name) {
  if (!state.has_value()) return nullptr;
  DR_EXPECT(state->scalar_type() == at::kFloat && state->dim() == 1 && state->numel() == d &&
                state->is_contiguous(),
            name, ": expected contiguous Float of shape [", d, "], got ", describe(*state));
  DR_EXPECT(state->device() == device, name, ": expected a tensor on ", device, ", got ",
            describe(*state));
  static float nothing = 0;
  return d == 0 ? &nothing : state->mutable_data_ptr<float>();
}

inline dr_codec codec_of(at::ArrayRef<double> fields) {
  dr_context context{};
  dr_codec codec;
  const int status = dr_read_codec(&context, fields.data(), fields.size(), &codec);
  DR_CHECK_STATUS(status, context.message);
  return codec;
}

inline dr_position position_of(int64_t seed, int64_t step, int64_t tensor, int64_t rank) {
  return {static_cast<uint64_t>(seed), static_cast<uint64_t>(step), static_cast<uint64_t>(tensor),
          static_cast<uint64_t>(rank)};
}

// The operators on host tensors (ops.cc). They also do what a device leaves to the host.
namespace host {
at::Tensor encode(const at::Tensor& gradient, const std::optional<at::Tensor>& residual,
                  const std::optional<at::Tensor>& velocity,
                  const std::optional<at::Tensor>& threshold, at::ArrayRef<double> codec_fields,
                  int64_t seed, int64_t step, int64_t tensor, int64_t rank);
void decode_sum_(at::Tensor out, const std::vector<at::Tensor>& payloads, double scale,
                 std::optional<at::ArrayRef<double>> codec_fields);
std::tuple<at::Tensor, at::Tensor> decode_sparse(const std::vector<at::Tensor>& payloads, int64_t d,
                                                 double scale);
}  // namespace host

}  // namespace deepreduce_torch
#endif
