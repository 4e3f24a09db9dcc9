// DeepreduceDecodeSum on a GPU. Messages and sum stay there. With hints, one read of 48 bytes gives
// the outcome. Without hints, the messages are read to find the starts and the codec of the
// payloads. The host decodes again what the device refuses or does not support, so the sum or the
// error is that of the host's kernel.
#include "device.h"

#include <optional>

#include "../decode.h"
#include "../slot.h"

namespace deepreduce_tf {
namespace {

class DecodeSumOnDeviceOp : public WaitingKernel {
 public:
  explicit DecodeSumOnDeviceOp(tensorflow::OpKernelConstruction* construction)
      : WaitingKernel(construction), decode_(construction) {
    OP_REQUIRES(construction, decode_.records == 0,
                absl::InvalidArgumentError(absl::StrCat(
                    "DeepreduceDecodeSum on a GPU: expected no record (host only), got ",
                    decode_.records)));
  }

  void Compute(OpKernelContext* kernel) override {
    OP_REQUIRES_OK(kernel, decode_.check(kernel));
    const Tensor& messages = kernel->input(DecodeSum::kMessages);
    const Tensor& wanted = kernel->input(DecodeSum::kShape);
    DeviceCall device(kernel);
    Call call;
    OneVariablesPayloads payloads;  // on the device
    OP_REQUIRES_OK(kernel, decode_.expect(kernel, &payloads));
    std::optional<Tensor> on_host;
    dr_codec codec{};
    if (decode_.hints != 0 && !DecodeSum::takes_shape_of_payload(wanted)) {
      OP_REQUIRES_OK(kernel, from_hints(kernel, &payloads, &codec));
    } else {
      OP_REQUIRES_OK(kernel,
                     device.fetch(messages.data(), messages.TotalBytes(), &on_host.emplace()));
      OP_REQUIRES_OK(kernel, payloads.split(call, *on_host, decode_.variable));
    }
    tensorflow::TensorShape shape;
    OP_REQUIRES_OK(kernel, decode_.wanted_shape(call, wanted, payloads, &shape));
    if (on_host.has_value()) {
      codec = codec_of_payloads(call, payloads);
      for (const uint8_t*& payload : payloads.data)
        payload = bytes_of(messages) + (payload - bytes_of(*on_host));
    }
    Tensor* sum = nullptr;
    OP_REQUIRES_OK(kernel, decode_.allocate_sum(kernel, shape, &sum));
    const bool adds = decode_.initials == 1;
    if (adds) OP_REQUIRES_OK(kernel, decode_.check_initial(kernel, shape));
    OP_REQUIRES_OK(kernel, adds ? device.copy(sum->data(), kernel->input(DecodeSum::kLists).data(),
                                              sum->TotalBytes())
                                : device.zero(sum->data(), sum->TotalBytes()));
    bool done = false;
    OP_REQUIRES_OK(kernel, add_up(kernel, call, device, codec, payloads, sum, &done));
    if (!done) OP_REQUIRES_OK(kernel, add_up_on_host(kernel, call, device, on_host, sum));
  }

 private:
  absl::Status from_hints(OpKernelContext* kernel, OneVariablesPayloads* payloads,
                          dr_codec* codec) const {
    const Tensor& lengths = kernel->input(decode_.hint_input());
    const Tensor& table = kernel->input(decode_.hint_input() + 1);
    if (lengths.dims() != 1)
      return absl::InvalidArgumentError(
          absl::StrCat("lengths: expected a vector, got shape ", lengths.shape().DebugString()));
    // a schedule changes the selection, not the encoding
    TF_RETURN_IF_ERROR(codec_at(table, 0, codec));
    return payloads->split_by(lengths, kernel->input(DecodeSum::kMessages), decode_.variable);
  }

  // Returns the codec that decodes payloads in host memory: that of the first one with indices.
  // Those without need no codec.
  static dr_codec codec_of_payloads(Call& call, const OneVariablesPayloads& payloads) {
    dr_header header{};
    for (size_t i = 0; i < payloads.data.size() && header.index_id == 0; ++i)
      // what is refused here is also refused later
      if (dr_inspect(&call.context, payloads.data[i], payloads.sizes[i], &header) != DR_OK)
        header = {};
    dr_codec codec;
    dr_decoding_codec(&header, &codec);
    return codec;
  }

  absl::Status add_up(OpKernelContext* kernel, Call& call, DeviceCall& device,
                      const dr_codec& codec, const OneVariablesPayloads& payloads, Tensor* sum,
                      bool* done) const {
    if (dr_cuda_supports(&codec) == 0) return absl::OkStatus();
    void *result, *workspace;
    TF_RETURN_IF_ERROR(device.on_device(sizeof(dr_cuda_result), &result));
    size_t workspace_bytes = 0;
    dr_cuda_sum one{};
    one.payloads = payloads.data.data();
    one.sizes = one.most_sizes = payloads.sizes.data();
    one.payload_count = payloads.sizes.size();
    one.out = sum->flat<float>().data();
    one.d = static_cast<uint64_t>(sum->NumElements());
    one.scale = decode_.scale(kernel);
    one.result = static_cast<dr_cuda_result*>(result);
    const auto start = [&](void* memory) {
      return dr_cuda_decode_sum(&call.context, &codec, &one, 1, memory, &workspace_bytes,
                                device.stream());
    };
    int status = start(nullptr);
    if (status == DR_OK) {
      TF_RETURN_IF_ERROR(device.on_device(workspace_bytes, &workspace));
      status = start(workspace);
    }
    if (status == DR_CUDA_ERROR)
      return status_of(status, named(decode_.variable, call.context.message));
    if (status != DR_OK) return absl::OkStatus();
    dr_cuda_result found;
    TF_RETURN_IF_ERROR(device.fetch(result, &found));
    *done = found.status == DR_OK;
    return absl::OkStatus();
  }

  absl::Status add_up_on_host(OpKernelContext* kernel, Call& call, DeviceCall& device,
                              std::optional<Tensor>& on_host, Tensor* sum) const {
    const Tensor& messages = kernel->input(DecodeSum::kMessages);
    if (!on_host.has_value())
      TF_RETURN_IF_ERROR(device.fetch(messages.data(), messages.TotalBytes(), &on_host.emplace()));
    OneVariablesPayloads payloads;
    TF_RETURN_IF_ERROR(decode_.expect(kernel, &payloads));
    TF_RETURN_IF_ERROR(payloads.split(call, *on_host, decode_.variable));
    Tensor total;
    if (decode_.initials == 1) {
      TF_RETURN_IF_ERROR(
          device.fetch(kernel->input(DecodeSum::kLists).data(), sum->TotalBytes(), &total));
    } else {
      TF_RETURN_IF_ERROR(device.pinned(sum->TotalBytes(), &total));
      std::memset(total.data(), 0, total.TotalBytes());
    }
    TF_RETURN_IF_ERROR(decode_.add_up(kernel, call, payloads, static_cast<float*>(total.data()),
                                      sum->NumElements()));
    TF_RETURN_IF_ERROR(device.copy_pinned(sum->data(), total.data(), total.TotalBytes()));
    return device.wait();
  }

  const DecodeSum decode_;
};

REGISTER_KERNEL_BUILDER(Name("DeepreduceDecodeSum")
                            .DR_PLACED.TypeConstraint<float>("T")
                            .HostMemory("scale")
                            .HostMemory("shape")
                            .HostMemory("ranks")
                            .HostMemory("seconds")
                            .HostMemory("hints"),
                        DecodeSumOnDeviceOp);

}  // namespace
}  // namespace deepreduce_tf
