// libFuzzer's entry point (make fuzz): passes any bytes, with a valid checksum, to every decoding
// entry point.
#include <cstdio>

#include "harness.h"

namespace {

using namespace harness;

// two blocks of every codec; larger tensors are only slower
constexpr uint32_t kLargestD = 1u << 17;
constexpr size_t kMemory = size_t{64} << 20;

void expect(bool holds, const char* what, const dr_context& context) {
  if (holds) return;
  std::fprintf(stderr, "fuzz_decode: expected %s, got: %s\n", what, context.message);
  std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* input, size_t input_bytes) {
  std::vector<uint8_t> bytes(input, input + input_bytes);
  uint32_t d = 0;
  if (bytes.size() >= kHeaderBytes) {
    std::memcpy(bytes.data(), "DRHV\1", 5);
    d = get32(bytes, 12) % (kLargestD + 1);
    put32(bytes, 12, d);
    // the input gives the lengths of the index and order sections; the value section is the rest
    const uint64_t rest = bytes.size() - kHeaderBytes, index = get32(bytes, 20),
                   order = get32(bytes, 28);
    if (index + order <= rest) put32(bytes, 24, static_cast<uint32_t>(rest - index - order));
    seal(bytes);
  }
  const Block<uint8_t> copy = exact_copy(bytes);
  const uint8_t* const payloads[2] = {copy.get(), copy.get()};
  const uint64_t sizes[2] = {bytes.size(), bytes.size()};

  Call inspecting(kMemory), sparse(kMemory), twice(kMemory), dense(kMemory);
  dr_header header;
  const int inspected = dr_inspect(&inspecting.context, payloads[0], sizes[0], &header);
  const int status = dr_decode_sparse(&sparse.context, payloads, sizes, 1, d, 1.0f);
  const Block<float> out(static_cast<float*>(std::calloc(size_t{d} + 1, sizeof(float))));
  const int dense_status =
      dr_decode_sum(&dense.context, payloads, sizes, 1, out.get(), d, 1.0f, nullptr);
  if (inspected != DR_OK) {
    expect(status == inspected && dense_status == inspected,
           "what cannot be inspected not to be decoded", sparse.context);
    return 0;
  }
  if ((header.flags & 1) != 0) {
    expect(status == DR_INVALID_ARGUMENT && dense_status == DR_OK,
           "a non-finite payload to be dense only", dense.context);
    return 0;
  }
  expect(status == dense_status || sparse.refused() || dense.refused(),
         "the dense and the sparse decoder to agree", sparse.context);
  if (status != DR_OK) return 0;

  const std::vector<uint8_t> once = sparse.result();
  expect(once.size() == 8 * header.count, "count indices and values", sparse.context);
  for (uint32_t i = 0; i < header.count; ++i)
    expect(get32(once, size_t{4} * i) < d &&
               (i == 0 || get32(once, size_t{4} * i - 4) < get32(once, size_t{4} * i)),
           "ascending indices below d", sparse.context);
  // the sum of a payload with itself has the same indices
  if (dr_decode_sparse(&twice.context, payloads, sizes, 2, d, 1.0f) == DR_OK)
    expect(once.empty() || std::memcmp(twice.result().data(), once.data(), once.size() / 2) == 0,
           "a sum with the same indices", twice.context);
  return 0;
}
