// The PyTorch operators on CUDA devices. They use the caller's device and current stream and
// PyTorch's allocators. When a length or a failure must be known, they read a few bytes from the
// device. Codecs without device support use the host operators, through pinned memory.
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <cstddef>
#include <cstring>
#include <set>

#include "repeated.h"

namespace deepreduce_torch {
namespace {

constexpr int64_t kHeaderBytes = DR_HEADER_BYTES;

void check(const dr_context& context, int status) { DR_CHECK_STATUS(status, context.message); }

void* current_stream(const at::Tensor& tensor) {
  return c10::cuda::getCurrentCUDAStream(tensor.device().index()).stream();
}

// Allocates pinned host memory of the same shape, for asynchronous copies.
at::Tensor pinned_like(const at::Tensor& tensor) {
  return at::empty(tensor.sizes(), tensor.options().device(at::kCPU).pinned_memory(true));
}

// Copies device tensors to pinned memory, and waits once for each device; returns host tensors
// unchanged.
std::vector<at::Tensor> to_host(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> copies;
  std::set<c10::DeviceIndex> devices;
  for (const at::Tensor& tensor : tensors) {
    copies.push_back(tensor.is_cuda() ? pinned_like(tensor) : tensor);
    if (!tensor.is_cuda()) continue;
    copies.back().copy_(tensor, /*non_blocking=*/true);
    devices.insert(tensor.device().index());
  }
  for (const c10::DeviceIndex device : devices)
    c10::cuda::getCurrentCUDAStream(device).synchronize();
  return copies;
}

dr_cuda_result as_result(const at::Tensor& host) {
  DR_EXPECT(host.device().is_cpu() && host.scalar_type() == at::kByte &&
                host.numel() == sizeof(dr_cuda_result),
            "result: expected ", sizeof(dr_cuda_result), " Byte on cpu, got ", describe(host));
  dr_cuda_result result;
  std::memcpy(&result, host.const_data_ptr(), sizeof(result));
  return result;
}

// Throws if a dr_cuda_result that was copied to the host is a failure. `parameter`: name of the
// parameter whose sum failed, if it is a sum.
void raise_failure(const at::Tensor& host, c10::string_view parameter) {
  const dr_cuda_result result = as_result(host);
  dr_context context{};
  const int status = dr_cuda_message(&context, &result);
  if (parameter.empty()) return check(context, status);
  DR_CHECK_STATUS(
      status, c10::str("parameter ", parameter, ": rank ", result.payload, ": ", context.message));
}

bool supports(at::ArrayRef<double> codec_fields) {
  const dr_codec codec = codec_of(codec_fields);
  return dr_cuda_supports(&codec) != 0;
}

at::Tensor encode_on_host(const at::Tensor& gradient, const std::optional<at::Tensor>& residual,
                          const std::optional<at::Tensor>& velocity,
                          const std::optional<at::Tensor>& threshold,
                          at::ArrayRef<double> codec_fields, int64_t seed, int64_t step,
                          int64_t tensor, int64_t rank) {
  std::vector<at::Tensor> given{gradient};
  const std::optional<at::Tensor>* states[] = {&residual, &velocity, &threshold};
  for (const std::optional<at::Tensor>* state : states)
    if (state->has_value()) given.push_back(**state);
  const std::vector<at::Tensor> copies = to_host(given);
  std::optional<at::Tensor> on_host[3];
  size_t next = 1;
  for (int i = 0; i < 3; ++i)
    if (states[i]->has_value()) on_host[i] = copies[next++];
  const at::Tensor made = host::encode(copies[0], on_host[0], on_host[1], on_host[2], codec_fields,
                                       seed, step, tensor, rank);
  for (int i = 0; i < 3; ++i)
    if (states[i]->has_value()) (*states[i])->copy_(*on_host[i], true);
  at::Tensor pinned = pinned_like(made);
  std::memcpy(pinned.mutable_data_ptr(), made.const_data_ptr(), made.nbytes());
  return pinned.to(gradient.device(), true);
}

at::Tensor encode(const at::Tensor& gradient, const std::optional<at::Tensor>& residual,
                  const std::optional<at::Tensor>& velocity,
                  const std::optional<at::Tensor>& threshold, at::ArrayRef<double> codec_fields,
                  int64_t seed, int64_t step, int64_t tensor, int64_t rank) {
  expect_gradient(gradient);
  const c10::cuda::CUDAGuard guard(gradient.device());
  // a hint for the host; the device does not use or change it
  state_data(threshold, 1, gradient.device(), "threshold");
  if (!supports(codec_fields))
    return encode_on_host(gradient, residual, velocity, threshold, codec_fields, seed, step, tensor,
                          rank);
  const dr_codec codec = codec_of(codec_fields);
  dr_cuda_encoding encoding{};
  encoding.gradient = gradient.const_data_ptr();
  encoding.dtype = dtype_code(gradient.scalar_type());
  encoding.d = static_cast<uint64_t>(gradient.numel());
  encoding.residual = state_data(residual, gradient.numel(), gradient.device(), "residual");
  encoding.velocity = state_data(velocity, gradient.numel(), gradient.device(), "velocity");
  encoding.position = position_of(seed, step, tensor, rank);
  dr_context context{};
  size_t workspace_bytes = 0;
  check(context, dr_cuda_encode(&context, &codec, &encoding, 1, nullptr, &workspace_bytes,
                                current_stream(gradient)));
  const at::Tensor room = device_bytes(encoding.payload_capacity, gradient.device());
  const at::Tensor report = device_bytes(sizeof(dr_cuda_result), gradient.device());
  encoding.payload = room.mutable_data_ptr<uint8_t>();
  encoding.result = static_cast<dr_cuda_result*>(report.mutable_data_ptr());
  const at::Tensor workspace = device_bytes(workspace_bytes, gradient.device());
  check(context, dr_cuda_encode(&context, &codec, &encoding, 1, workspace.mutable_data_ptr(),
                                &workspace_bytes, current_stream(gradient)));
  const at::Tensor result = to_host({report})[0];
  raise_failure(result, "");
  const int64_t bytes = static_cast<int64_t>(as_result(result).payload_bytes);
  // copy it, unless it nearly fills the memory
  const at::Tensor payload = room.narrow(0, 0, bytes);
  return bytes < room.numel() / 2 ? payload.clone() : payload;
}

struct DevicePayloads {
  std::vector<at::Tensor> tensors;
  std::vector<const uint8_t*> data;
  std::vector<uint64_t> sizes;
  DevicePayloads(const std::vector<at::Tensor>& payloads, at::Device device) {
    for (const at::Tensor& payload : payloads) {
      expect_payload(payload);
      tensors.push_back(payload.to(device, /*non_blocking=*/true).contiguous());
      data.push_back(tensors.back().const_data_ptr<uint8_t>());
      sizes.push_back(static_cast<uint64_t>(payload.numel()));
    }
  }
};

void decode_sum_on_host(const at::Tensor& out, const std::vector<at::Tensor>& payloads,
                        double scale) {
  std::vector<at::Tensor> given = payloads;
  given.push_back(out);
  std::vector<at::Tensor> copies = to_host(given);
  const at::Tensor sum = copies.back();
  copies.pop_back();
  host::decode_sum_(sum, copies, scale, std::nullopt);
  at::Tensor(out).copy_(sum, true);
}

// Starts the sum of payloads of one codec. The returned dr_cuda_result, in device memory, has the
// outcome.
at::Tensor start_decode_sum(const at::Tensor& out, const DevicePayloads& payloads, double scale,
                            const dr_codec& codec) {
  const at::Tensor result = device_bytes(sizeof(dr_cuda_result), out.device());
  dr_cuda_sum sum{};
  sum.payloads = payloads.data.data();
  sum.sizes = sum.most_sizes = payloads.sizes.data();
  sum.payload_count = payloads.sizes.size();
  sum.out = state_data(out, out.numel(), out.device(), "out");
  sum.d = static_cast<uint64_t>(out.numel());
  sum.scale = static_cast<float>(scale);
  sum.result = static_cast<dr_cuda_result*>(result.mutable_data_ptr());
  dr_context context{};
  size_t workspace_bytes = 0;
  const auto call = [&](void* workspace) {
    check(context, dr_cuda_decode_sum(&context, &codec, &sum, 1, workspace, &workspace_bytes,
                                      current_stream(out)));
  };
  call(nullptr);
  const at::Tensor workspace = device_bytes(workspace_bytes, out.device());
  call(workspace.mutable_data_ptr());
  return result;
}

void expect_on_device(const at::Tensor& out) {
  DR_EXPECT(out.is_cuda(), "out: expected a CUDA tensor like the payloads, got ", describe(out));
}

// Returns the codec that decodes a payload. A start that is too short for a header gives any codec:
// every decoder refuses such a payload.
dr_codec codec_of_payload(const at::Tensor& start) {
  dr_context context{};
  dr_header header{};
  dr_read_header(&context, start.const_data_ptr<uint8_t>(), static_cast<uint64_t>(start.numel()),
                 &header);
  dr_codec codec;
  dr_decoding_codec(&header, &codec);
  return codec;
}

// Sums payloads of one codec. Payloads that the device cannot decode (a Bloom filter of other
// settings than it was given) are decoded on the host, in their place in the order.
void decode_sum_alike(const at::Tensor& out, const std::vector<at::Tensor>& payloads, double scale,
                      const dr_codec& codec) {
  for (size_t first = 0; first < payloads.size();) {
    const std::vector<at::Tensor> rest(payloads.begin() + static_cast<std::ptrdiff_t>(first),
                                       payloads.end());
    const at::Tensor result =
        to_host({start_decode_sum(out, DevicePayloads(rest, out.device()), scale, codec)})[0];
    const dr_cuda_result found = as_result(result);
    if (found.status != DR_UNKNOWN_CODEC) return raise_failure(result, "");
    decode_sum_on_host(out, {rest[found.payload]}, scale);
    first += found.payload + 1;
  }
}

// Sums payloads of unknown codecs: reads their headers first. Runs of one codec are summed
// together, in the given order.
void decode_sum_unknown(const at::Tensor& out, const std::vector<at::Tensor>& payloads,
                        double scale) {
  std::vector<at::Tensor> starts;
  for (const at::Tensor& payload : payloads) {
    expect_payload(payload);
    starts.push_back(payload.narrow(0, 0, std::min(payload.numel(), kHeaderBytes)));
  }
  const std::vector<at::Tensor> headers = to_host(starts);
  for (size_t first = 0, last = 0; first < payloads.size(); first = last) {
    const dr_codec codec = codec_of_payload(headers[first]);
    for (; last < payloads.size(); ++last) {
      const dr_codec other = codec_of_payload(headers[last]);
      if (other.index.id != codec.index.id || other.value.id != codec.value.id) break;
    }
    const std::vector<at::Tensor> run(payloads.begin() + first, payloads.begin() + last);
    if (dr_cuda_supports(&codec) == 0) {
      decode_sum_on_host(out, run, scale);
    } else {
      decode_sum_alike(out, run, scale, codec);
    }
  }
}

void decode_sum_(at::Tensor out, const std::vector<at::Tensor>& payloads, double scale,
                 std::optional<at::ArrayRef<double>> codec_fields) {
  expect_on_device(out);
  const c10::cuda::CUDAGuard guard(out.device());
  state_data(out, out.numel(), out.device(), "out");
  if (codec_fields.has_value() && supports(*codec_fields)) {
    decode_sum_alike(out, payloads, scale, codec_of(*codec_fields));
  } else {
    decode_sum_unknown(out, payloads, scale);
  }
}

at::Tensor decode(const at::Tensor& payload, int64_t d) {
  expect_elements(d);
  const c10::cuda::CUDAGuard guard(payload.device());
  at::Tensor out = at::zeros({d}, at::TensorOptions(at::kFloat).device(payload.device()));
  decode_sum_unknown(out, {payload}, 1.0);
  return out;
}

// Runs on the host, because the length of a sparse sum depends on where payloads overlap.
std::tuple<at::Tensor, at::Tensor> decode_sparse(const std::vector<at::Tensor>& payloads, int64_t d,
                                                 double scale) {
  for (const at::Tensor& payload : payloads) expect_payload(payload);
  const c10::cuda::CUDAGuard guard(payloads.at(0).device());
  const auto [indices, values] = host::decode_sparse(to_host(payloads), d, scale);
  return {indices.to(payloads[0].device()), values.to(payloads[0].device())};
}

}  // namespace
}  // namespace deepreduce_torch

// Only builds with CUDA have these.
TORCH_LIBRARY_FRAGMENT(deepreduce, library) {
  library.def("cuda_supports(float[] codec) -> bool", &deepreduce_torch::supports);
  library.def("raise_failure(Tensor result, str parameter='') -> ()",
              &deepreduce_torch::raise_failure);
}

TORCH_LIBRARY_IMPL(deepreduce, CUDA, library) {
  library.impl("encode", &deepreduce_torch::encode);
  library.impl("decode_sum_", &deepreduce_torch::decode_sum_);
  library.impl("decode", &deepreduce_torch::decode);
  library.impl("decode_sparse", &deepreduce_torch::decode_sparse);
}
