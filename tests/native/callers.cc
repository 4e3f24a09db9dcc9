// Tests what the core does for callers that change memory during a call, or that have none left.
// Takes the name of a case, and exits 0 when all is well.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <new>
#include <string>

#include "codecs.h"
#include "harness.h"
#include "select/largest.h"
#include "support/host_scratch.h"

namespace {

bool no_memory = false;  // operator new throws

using namespace harness;

[[noreturn]] void fail(const char* what, long long got) {
  std::fprintf(stderr, "callers: expected %s, got %lld\n", what, got);
  std::exit(1);
}

dr_codec codec_with(int sparsifier, double parameter) {
  dr_codec codec{};
  codec.sparsifier = {sparsifier, {parameter}};
  codec.index.id = deepreduce::kRawIndex;
  codec.value.id = deepreduce::kRawValue;
  return codec;
}

// A caller whose gradient changes whenever the core allocates memory after the first `before`
// times. Its blocks have exact sizes, so that AddressSanitizer sees what is outside of them.
class ChangingCaller {
 public:
  using Change = std::function<void(std::vector<float>&)>;
  ChangingCaller(std::vector<float>& gradient, Change change, size_t before = 0)
      : gradient_(gradient), change_(std::move(change)), before_(before) {
    context.allocate = [](void* user, size_t bytes) noexcept {
      return static_cast<ChangingCaller*>(user)->allocate(bytes);
    };
    context.output = context.allocate;
    context.user = this;
    context.simd = -1;
  }
  ~ChangingCaller() {
    for (void* memory : blocks_) std::free(memory);
  }
  dr_context context{};

 private:
  void* allocate(size_t bytes) {
    if (blocks_.size() >= before_) change_(gradient_);
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, bytes) != 0) return nullptr;
    blocks_.push_back(memory);
    return memory;
  }
  std::vector<float>& gradient_;
  const Change change_;
  const size_t before_;
  std::vector<void*> blocks_;
};

ChangingCaller::Change becomes(float later) {
  return [=](std::vector<float>& values) { std::fill(values.begin(), values.end(), later); };
}

ChangingCaller::Change multiplied_by(float factor) {
  return [=](std::vector<float>& values) {
    for (float& value : values) value *= factor;
  };
}

// Threshold counts the elements before it allocates memory for them.
void changing_gradient() {
  constexpr size_t kElements = 100000;
  for (const int simd : {0, 1, 2})
    for (const float later : {1.0f, 0.0f}) {
      std::vector<float> gradient(kElements, 0.0f);
      for (size_t i = 0; i < 10; ++i) gradient[i] = 1.0f;
      ChangingCaller caller(gradient, becomes(later));
      caller.context.simd = simd;
      dr_encoding encoding{};
      encoding.gradient = gradient.data();
      encoding.d = kElements;
      const dr_codec codec = codec_with(deepreduce::kThreshold, 0.5);
      const int status = dr_encode(&caller.context, &codec, &encoding);
      if (status != DR_INVALID_ARGUMENT) fail("a refusal of a gradient that changes", status);
    }
}

// Without a sparsifier and a memory, value codecs read the gradient itself.
void changing_values() {
  constexpr size_t kElements = 3000;
  const deepreduce::SparsifierId all = deepreduce::kNoneSparsifier;
  for (const dr_stage& value :
       {dr_stage{deepreduce::kFitPoly, {5}}, dr_stage{deepreduce::kFitDExp, {}},
        dr_stage{deepreduce::kLloydMax, {4}}, dr_stage{deepreduce::kQuantile, {256}},
        dr_stage{deepreduce::kQSGD, {4, 512}}, dr_stage{deepreduce::kDeflate, {6}}})
    for (size_t before = 0; before < 12; ++before)
      for (const int simd : {0, 1, 2})
        for (const auto& change :
             {becomes(0.0f), becomes(-1.0f), becomes(3e38f), multiplied_by(1e-12f),
              multiplied_by(1e12f), multiplied_by(-2.0f)}) {
          std::vector<float> gradient(kElements);
          for (size_t i = 0; i < kElements; ++i)
            gradient[i] = static_cast<float>(i + 1) * static_cast<float>(1 << i % 20);
          ChangingCaller caller(gradient, change, before);
          caller.context.simd = simd;
          dr_encoding encoding{};
          encoding.gradient = gradient.data();
          encoding.d = kElements;
          dr_codec codec = codec_with(all, 0);
          codec.value = value;
          const int status = dr_encode(&caller.context, &codec, &encoding);
          if (status != DR_OK && status != DR_INVALID_ARGUMENT) fail("a payload", status);
        }
}

// TopK collects values above a limit, which may be below it when they are read again.
void values_below_the_limit() {
  std::vector<float> values(10000), nothing;
  for (size_t i = 0; i < values.size(); ++i) values[i] = i % 3 == 0 ? 1e-30f : 1.0f + i % 7;
  ChangingCaller caller(nothing, becomes(0));
  deepreduce::Arena arena(&caller.context);
  const auto& kernels = deepreduce::select_kernels(deepreduce::Simd::scalar);
  const deepreduce::KthScratch scratch(arena, values.size());
  for (const float low : {1.0f, 100.0f}) {
    uint32_t bits;
    std::memcpy(&bits, &low, sizeof(bits));
    for (const uint32_t k : {1u, 5000u, 9000u})
      find_kth(kernels, values.data(), static_cast<uint32_t>(values.size()), k, bits, scratch);
  }
}

// A sparse encoding of nothing leaves no address in the caller's struct that is invalid later.
void nothing_to_encode() {
  std::vector<float> values;
  dr_sparse_encoding encoding{};
  const uint32_t none = 0;
  encoding.indices = &none;
  encoding.d = 10;
  encoding.write_back = 1;
  Call call(size_t{1} << 20);
  const dr_codec codec = codec_with(deepreduce::kNoneSparsifier, 0);
  const int status = dr_encode_sparse(&call.context, &codec, &encoding);
  if (status != DR_OK) fail("an empty payload", status);
  char here;
  const auto distance =
      reinterpret_cast<intptr_t>(encoding.indices) - reinterpret_cast<intptr_t>(&here);
  if (encoding.indices != &none && distance > -(1 << 20) && distance < 1 << 20)
    fail("no address on the stack", distance);
}

// The core reports that there is no memory, also if a callback throws that.
void no_memory_left() {
  std::vector<float> gradient(1000, 1.0f);
  dr_context context{};
  context.allocate = [](void*, size_t bytes) -> void* { return ::operator new(bytes); };
  context.output = context.allocate;
  dr_encoding encoding{};
  encoding.gradient = gradient.data();
  encoding.d = gradient.size();
  const dr_codec codec = codec_with(deepreduce::kTopK, 0.5);
  no_memory = true;
  const int status = dr_encode(&context, &codec, &encoding);
  no_memory = false;
  if (status != DR_OUT_OF_MEMORY) fail("no memory", status);
  if (context.message[0] == '\0') fail("a message, of length", 0);
}

// The scratch memory of the bindings neither throws nor loses blocks.
void scratch_without_memory() {
  for (int used = 0; used < 5; ++used) {
    deepreduce::HostScratch scratch;
    bool refused = false;
    for (int i = 0; i < 9; ++i) {
      no_memory = i >= used;
      refused = refused || scratch.allocate(1 << 12) == nullptr;
    }
    if (!refused) fail("a refused block, of blocks", used);
    // the destructor keeps the blocks, for which there is no memory either
  }
  no_memory = false;
}

}  // namespace

void* operator new(size_t bytes) {
  void* memory = no_memory ? nullptr : std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

int main(int, char** arguments) {
  const struct {
    const char* name;
    void (*run)();
  } cases[] = {
      {"changing_gradient", changing_gradient},
      {"changing_values", changing_values},
      {"values_below_the_limit", values_below_the_limit},
      {"nothing_to_encode", nothing_to_encode},
      {"no_memory_left", no_memory_left},
      {"scratch_without_memory", scratch_without_memory},
  };
  for (const auto& each : cases)
    if (std::string(arguments[1]) == each.name) {
      each.run();
      return 0;
    }
  std::fprintf(stderr, "callers: expected the name of a case, got %s\n", arguments[1]);
  return 2;
}
