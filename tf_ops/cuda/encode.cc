// DeepreduceEncode on a GPU. Gradient, memory and payload stay on the GPU; numbers are on the host.
// One read of 48 bytes gives the payload's length. Codecs without device support use the host,
// through pinned memory.
#include "device.h"

#include "../slot.h"

namespace deepreduce_tf {
namespace {

class EncodeOnDeviceOp : public WaitingKernel {
 public:
  explicit EncodeOnDeviceOp(tensorflow::OpKernelConstruction* construction)
      : WaitingKernel(construction) {
    int records;
    OP_REQUIRES_OK(construction, construction->GetAttr("memories", &memories_));
    OP_REQUIRES_OK(construction, construction->GetAttr("records", &records));
    OP_REQUIRES_OK(construction, construction->GetAttr("notices", &notices_));
    OP_REQUIRES_OK(construction, Slot::check(memories_, records));
    OP_REQUIRES(construction, records == 0,
                absl::InvalidArgumentError(absl::StrCat(
                    "DeepreduceEncode on a GPU: expected no records (host only), got ", records)));
  }

  void Compute(OpKernelContext* kernel) override {
    Slot slot;
    OP_REQUIRES_OK(
        kernel, slot.open(kernel, 1, memories_, 0, kernel->input(0).NumElements(), copy_on_device));
    Call call;
    DeviceCall device(kernel);
    const absl::Status done = dr_cuda_supports(&slot.codec) != 0
                                  ? encode(kernel, slot, call, device)
                                  : encode_on_host(kernel, slot, call, device);
    if (done.ok() || !notices_) return kernel->SetStatus(done);
    OP_REQUIRES_OK(kernel, write_notice(call, std::string(done.message())));
    OP_REQUIRES_OK(kernel, send_result(kernel, call, device));
  }

 private:
  absl::Status encode(OpKernelContext* kernel, const Slot& slot, Call& call,
                      DeviceCall& device) const {
    const Tensor& gradient = kernel->input(0);
    dr_cuda_encoding encoding{};
    encoding.gradient = gradient.data();
    encoding.dtype = dtype_code(gradient.dtype());
    encoding.d = static_cast<uint64_t>(gradient.NumElements());
    encoding.residual = slot.memory[0];
    encoding.velocity = slot.memory[1];
    encoding.position = slot.position;
    size_t workspace_bytes = 0;
    int status = dr_cuda_encode(&call.context, &slot.codec, &encoding, 1, nullptr, &workspace_bytes,
                                device.stream());
    if (status != DR_OK) return status_of(status, call.context.message);

    Tensor room;
    TF_RETURN_IF_ERROR(kernel->allocate_temp(
        tensorflow::DT_UINT8,
        tensorflow::TensorShape({static_cast<int64_t>(encoding.payload_capacity)}), &room));
    encoding.payload = room.flat<uint8_t>().data();
    void *result, *workspace;
    TF_RETURN_IF_ERROR(device.on_device(sizeof(dr_cuda_result), &result));
    TF_RETURN_IF_ERROR(device.on_device(workspace_bytes, &workspace));
    encoding.result = static_cast<dr_cuda_result*>(result);
    status = dr_cuda_encode(&call.context, &slot.codec, &encoding, 1, workspace, &workspace_bytes,
                            device.stream());
    if (status != DR_OK) return status_of(status, call.context.message);

    dr_cuda_result done;
    TF_RETURN_IF_ERROR(device.fetch(result, &done));
    status = dr_cuda_message(&call.context, &done);
    if (status != DR_OK) return status_of(status, call.context.message);
    const int64_t bytes = static_cast<int64_t>(done.payload_bytes);
    if (done.payload_bytes >= encoding.payload_capacity / 2) {  // has room for all elements
      kernel->set_output(0, room.Slice(0, bytes));
      return absl::OkStatus();
    }
    Tensor* payload;
    TF_RETURN_IF_ERROR(kernel->allocate_output(0, tensorflow::TensorShape({bytes}), &payload));
    return device.copy(payload->data(), encoding.payload, done.payload_bytes);
  }

  absl::Status encode_on_host(OpKernelContext* kernel, const Slot& slot, Call& call,
                              DeviceCall& device) const {
    const Tensor& gradient = kernel->input(0);
    const uint64_t memory_bytes = static_cast<uint64_t>(gradient.NumElements()) * sizeof(float);
    Tensor gradient_here;
    float* memory_here[2] = {nullptr, nullptr};
    TF_RETURN_IF_ERROR(device.fetch(gradient.data(), gradient.TotalBytes(), &gradient_here));
    for (int i = 0; i < memories_; ++i) {
      Tensor fetched;
      TF_RETURN_IF_ERROR(device.fetch(slot.memory[i], memory_bytes, &fetched));
      memory_here[i] = memory_bytes == 0 ? slot.memory[i] : static_cast<float*>(fetched.data());
    }
    dr_encoding encoding{};
    encoding.gradient = gradient_here.data();
    encoding.dtype = dtype_code(gradient.dtype());
    encoding.d = static_cast<uint64_t>(gradient.NumElements());
    encoding.residual = memory_here[0];
    encoding.velocity = memory_here[1];
    encoding.position = slot.position;
    const int status = dr_encode(&call.context, &slot.codec, &encoding);
    if (status != DR_OK) return status_of(status, call.context.message);
    for (int i = 0; i < memories_; ++i)
      TF_RETURN_IF_ERROR(device.copy_pinned(slot.memory[i], memory_here[i], memory_bytes));
    return send_result(kernel, call, device);
  }

  // Copies the result of the call, in host memory, to the output.
  static absl::Status send_result(OpKernelContext* kernel, const Call& call, DeviceCall& device) {
    Tensor* output;
    TF_RETURN_IF_ERROR(kernel->allocate_output(
        0, tensorflow::TensorShape({static_cast<int64_t>(call.own_result.size())}), &output));
    return device.send(output->data(), call.own_result.data(), call.own_result.size());
  }

  int memories_;
  bool notices_;
};

REGISTER_KERNEL_BUILDER(Name("DeepreduceEncode")
                            .DR_PLACED.HostMemory("codec")
                            .HostMemory("position")
                            .HostMemory("memory")
                            .HostMemory("record"),
                        EncodeOnDeviceOp);

}  // namespace
}  // namespace deepreduce_tf

// Returns whether devices support a codec of 20 numbers. Python needs this to place gradients
// before there is a graph. Only builds with CUDA have it.
extern "C" __attribute__((visibility("default"))) int deepreduce_tf_cuda_supports(
    const double* fields) {
  dr_context context{};
  dr_codec codec;
  return dr_read_codec(&context, fields, DR_CODEC_FIELDS, &codec) == DR_OK &&
         dr_cuda_supports(&codec) != 0;
}
