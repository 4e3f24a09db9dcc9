// A simulated CUDA device for tests: tensors of device "cuda" in host memory, in a PyTorch without
// CUDA. Allocated memory is filled with 0xA5. PyTorch's own operators run on the host, on copies.
// The CUDA operators of this package run in the emulator. Everything executes at once, except
// non-blocking copies to the host, and those to the device outside of the default stream: they
// arrive when the program, or a stream, waits for an event that their stream has recorded after
// them. Kernels, and copies within the device, get the copies to the device that their own stream
// has started.
#include <ATen/ATen.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <utility>

namespace {

const c10::Device kDevice(c10::kCUDA, 0);

c10::DataPtr poisoned(size_t bytes, c10::Device device, c10::DeleterFnPtr free = &std::free) {
  void* memory = std::aligned_alloc(512, (bytes + 511) / 512 * 512 + 512);
  std::memset(memory, 0xA5, bytes);
  return {memory, memory, free, device};
}

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override { return poisoned(bytes, kDevice); }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
} device_memory;

struct Pinned {
  std::mutex lock;
  std::set<const void*> addresses;
} pinned;

void free_pinned(void* memory) {
  {
    const std::lock_guard lock(pinned.lock);
    pinned.addresses.erase(memory);
  }
  std::free(memory);
}

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::DataPtr memory = poisoned(bytes, c10::Device(c10::kCPU), &free_pinned);
    const std::lock_guard lock(pinned.lock);
    pinned.addresses.insert(memory.get());
    return memory;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
} pinned_memory;

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool isPinnedPtr(const void* address) const override {
    const std::lock_guard lock(pinned.lock);
    return pinned.addresses.contains(address);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::Device getDeviceFromPtr(void*) const override { return kDevice; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};

at::Tensor on_host(const at::Tensor& tensor) {
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                       tensor.options().device(at::kCPU));
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_memory,
                                   c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   at::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_memory,
      c10::DispatchKeySet(c10::DispatchKey::CUDA), at::dtype_or_default(dtype));
}

// The copies of one stream that have started.
struct Copies {
  std::deque<std::pair<at::Tensor, at::Tensor>> on_their_way;  // (destination, future contents)
  int64_t arrived = 0;

  int64_t now() const { return arrived + static_cast<int64_t>(on_their_way.size()); }
  void wait(int64_t moment) {
    for (; arrived < moment; ++arrived) {
      arrive(on_their_way.front());
      on_their_way.pop_front();
    }
  }
  void wait_on_device() {
    for (auto& one : on_their_way)
      if (one.first.defined() && one.first.is_cuda()) arrive(one);
  }

 private:
  static void arrive(std::pair<at::Tensor, at::Tensor>& one) {
    if (one.first.defined()) on_host(one.first).copy_(one.second);
    one = {};
  }
};
std::map<c10::StreamId, Copies> copies_of;
std::recursive_mutex copying;
std::atomic<c10::StreamId> streams = 0;
thread_local c10::StreamId current_stream = 0;

// Called before each kernel of the current stream.
void before_kernel() {
  const std::lock_guard lock(copying);
  copies_of[current_stream].wait_on_device();
}

at::Tensor& copy(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  const std::lock_guard lock(copying);
  before_kernel();
  if (non_blocking && to.is_cpu() != from.is_cpu() && (to.is_cpu() || current_stream != 0)) {
    copies_of[current_stream].on_their_way.emplace_back(to, on_host(from).clone());
  } else {
    on_host(to).copy_(on_host(from));
  }
  return to;
}

// A point in the work of a stream.
struct Moment {
  c10::StreamId stream;
  int64_t copies;
};

// Streams in which only copies take time. A stream that waits for an event gets the copies at once.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::kCUDA;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  static c10::Stream stream(c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, kDevice, id);
  }
  c10::Stream getStream(c10::Device) const override { return stream(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return stream(++streams);
  }
  c10::Stream exchangeStream(c10::Stream other) const override {
    return stream(std::exchange(current_stream, other.id()));
  }
  void record(void** event, const c10::Stream& on, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    const std::lock_guard lock(copying);
    delete static_cast<Moment*>(*event);
    *event = new Moment{on.id(), copies_of[on.id()].now()};
  }
  void block(void* event, const c10::Stream&) const override { synchronizeEvent(event); }
  void synchronizeEvent(void* event) const override {
    const std::lock_guard lock(copying);
    if (const auto* moment = static_cast<Moment*>(event)) {
      copies_of[moment->stream].wait(moment->copies);
    }
  }
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Moment*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
at::Tensor copy_and_resize(const at::Tensor& from, const at::Tensor& to) {
  before_kernel();
  if (to.numel() == 0) {
    const at::Tensor memory = at::empty(from.sizes(), to.options());
    to.unsafeGetTensorImpl()->set_storage_keep_dtype(memory.storage());
    to.unsafeGetTensorImpl()->set_sizes_and_strides(memory.sizes(), memory.strides());
  }
  TORCH_CHECK(to.sizes() == from.sizes(), "the pretended device: expected the size of ", to.sizes(),
              ", got ", from.sizes());
  on_host(to).copy_(on_host(from));
  return to;
}
at::Tensor& set_zero(at::Tensor& tensor) {
  before_kernel();
  on_host(tensor).zero_();
  return tensor;
}
at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) {
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(source.storage());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(source.sizes(), source.strides(),
                                                      source.storage_offset());
  return tensor;
}
at::Tensor as_strided(const at::Tensor& tensor, c10::SymIntArrayRef size,
                      c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset.has_value() ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}
at::Tensor view(const at::Tensor& tensor, c10::SymIntArrayRef size) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size));
}
at::Tensor reshape_alias(const at::Tensor& tensor, c10::SymIntArrayRef size,
                         c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(size),
                                    C10_AS_INTARRAYREF_SLOW(stride));
}
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  before_kernel();
  at::native::cpu_fallback(op, stack);
}

}  // namespace

extern "C" {
int64_t pretended_new_stream() { return ++streams; }
int64_t pretended_stream() { return current_stream; }
void pretended_before_kernel() { before_kernel(); }
void pretended_use(int64_t stream) { current_stream = stream; }
// A point in the work of a stream: the number of its copies before it.
int64_t pretended_now(int64_t stream) {
  const std::lock_guard lock(copying);
  return copies_of[stream].now();
}
int pretended_reached(int64_t stream, int64_t moment) {
  const std::lock_guard lock(copying);
  return copies_of[stream].arrived >= moment;
}
void pretended_wait(int64_t stream, int64_t moment) {
  const std::lock_guard lock(copying);
  copies_of[stream].wait(moment);
}
}

namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks);
REGISTER_HOST_ALLOCATOR(at::kCUDA, &pinned_memory)
}  // namespace at
namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, Guard);
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("copy_", &copy);
  library.impl("_copy_from_and_resize", &copy_and_resize);
  library.impl("zero_", &set_zero);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
  library.impl("_reshape_alias", &reshape_alias);
}
