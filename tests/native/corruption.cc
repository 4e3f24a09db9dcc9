// Tests every codec with damaged and hostile payloads. Run with AddressSanitizer and
// UndefinedBehaviorSanitizer (make asan).
//
// Hostile bytes may give any status, but no invalid memory access, undefined behavior or hang. A
// wrong checksum must be reported as a corrupt payload, the dense and the sparse decoder must
// agree, and failed allocations must be reported as such.
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <string>

#include "codecs.h"
#include "harness.h"

namespace {

using namespace harness;
using Bytes = std::vector<uint8_t>;

constexpr size_t kMemory = size_t{256} << 20;
constexpr uint32_t kSecondsACase = 120;

struct Setting {
  const char* name;
  dr_stage stage;
};

// Every built-in codec with its default parameters, and more settings of those that have them.
#define DR_INDEX_CODEC(id, Name, file, where, ...) {#Name, {id, {__VA_ARGS__}}},
const Setting kIndexSettings[] = {
#include "stages.def"
    {"Huffman of gaps", {deepreduce::kHuffman, {1}}},
    {"Bloom naive", {deepreduce::kBloom, {0.02, 0}}},
    {"Bloom P0", {deepreduce::kBloom, {-1, 1}}},
    {"Bloom P1", {deepreduce::kBloom, {0.02, 2}}},
};
#define DR_VALUE_CODEC(id, Name, file, where, ...) {#Name, {id, {__VA_ARGS__}}},
const Setting kValueSettings[] = {
#include "stages.def"
    {"Deflate of whole values", {deepreduce::kDeflate, {1, 1}}},
    {"Deflate unshuffled", {deepreduce::kDeflate, {6, 0}}},
    {"QSGD 1 bit", {deepreduce::kQSGD, {1, 8, 1}}},
    {"Quantile of 4", {deepreduce::kQuantile, {4}}},
};
const Setting kRice = {"Rice", {deepreduce::kRice, {}}};

struct Counts {
  uint64_t cases = 0, payloads = 0, accepted = 0, refused = 0, out_of_memory = 0;
} counts;

std::string current;

[[noreturn]] void fail(const char* what, int got) {
  std::fprintf(stderr, "corruption: %s: %s, got status %d\n", current.c_str(), what, got);
  std::exit(1);
}

void too_slow(int) {
  const char text[] = "corruption: a case takes longer than it may: ";
  if (write(2, text, sizeof(text) - 1) < 0 || write(2, current.data(), current.size()) < 0)
    _exit(3);
  _exit(2);
}

// A heavy-tailed gradient with clusters, the same on every machine.
std::vector<float> gradient(uint32_t d) {
  std::vector<float> values(d);
  uint32_t state = 12345;
  for (uint32_t i = 0; i < d; ++i) {
    state = state * 1664525u + 1013904223u;
    const float uniform = static_cast<float>(state >> 8) / 16777216.0f - 0.5f;
    values[i] = uniform * uniform * uniform * (i / 64 % 3 == 0 ? 4.0f : 1.0f);
  }
  return values;
}

int encode(Call& call, const dr_codec& codec, const std::vector<float>& values,
           std::vector<float>* residual) {
  dr_encoding encoding{};
  encoding.gradient = values.data();
  encoding.dtype = DR_FLOAT32;
  encoding.d = values.size();
  encoding.residual = residual == nullptr ? nullptr : residual->data();
  encoding.position = {1, 2, 3, 4};
  return dr_encode(&call.context, &codec, &encoding);
}

// Decodes through every entry point. Returns the status of the sparse one.
int decode(const Bytes& payload, uint64_t d) {
  const Block<uint8_t> copy = exact_copy(payload);
  const uint8_t* data = copy.get();
  const uint64_t size = payload.size();
  ++counts.payloads;

  Call inspecting(kMemory);
  dr_header header;
  const int inspected = dr_inspect(&inspecting.context, data, size, &header);
  Call sparse(kMemory);
  const int status = dr_decode_sparse(&sparse.context, &data, &size, 1, d, 0.5f);
  if (inspected != DR_OK && status != inspected)
    fail("inspection and sparse decoding disagree", status);
  if (status == DR_OUT_OF_MEMORY && !sparse.refused()) fail("expected memory to be there", status);
  if (status == DR_OK) {
    const Bytes result = sparse.result();
    const size_t n = result.size() / 8;
    for (size_t i = 0; i < n; ++i) {
      const uint32_t index = get32(result, 4 * i);
      if (index >= d || (i > 0 && index <= get32(result, 4 * i - 4)))
        fail("expected ascending indices below d", status);
    }
  }
  (status == DR_OK ? counts.accepted : counts.refused) += 1;

  if (d > 1u << 16) return status;  // the caller provides the memory of a dense result
  Call dense(kMemory);
  Block<float> out(static_cast<float*>(std::calloc(d == 0 ? 1 : d, sizeof(float))));
  const int dense_status =
      dr_decode_sum(&dense.context, &data, &size, 1, out.get(), d, 0.5f, nullptr);
  const bool non_finite = inspected == DR_OK && (header.flags & 1) != 0;
  if (dense_status != status && !(non_finite && dense_status == DR_OK))
    fail("dense and sparse decoding disagree", dense_status);
  return status;
}

void hostile(Bytes payload, uint64_t d) {
  seal(payload);
  decode(payload, d);
}

void broken(const Bytes& payload, uint64_t d) {
  const int status = decode(payload, d);
  if (status != DR_CORRUPT_PAYLOAD) fail("expected a corrupt payload", status);
}

// Tries every `stride`-th bit and length, and all of them in the first `dense_bytes`.
void bits_and_lengths(const Bytes& payload, uint64_t d, size_t stride, size_t dense_bytes) {
  for (size_t bit = 0; bit < payload.size() * 8; bit += bit < dense_bytes * 8 ? 1 : stride) {
    Bytes flipped = payload;
    flipped[bit / 8] = static_cast<uint8_t>(flipped[bit / 8] ^ 1u << bit % 8);
    broken(flipped, d);
    hostile(flipped, d);
  }
  for (size_t length = 0; length < payload.size(); length += length < dense_bytes ? 1 : stride) {
    Bytes shorter(payload.begin(), payload.begin() + static_cast<ptrdiff_t>(length));
    broken(shorter, d);
    hostile(shorter, d);
  }
}

// Cuts, extends, empties, doubles and overwrites each section, with a matching header.
void sections(const Bytes& payload, uint64_t d, size_t stride) {
  size_t start = kHeaderBytes;
  for (size_t field = 20; field <= 28; field += 4) {
    const size_t bytes = get32(payload, field);
    const auto replaced = [&](const Bytes& section) {
      Bytes changed(payload.begin(), payload.begin() + static_cast<ptrdiff_t>(start));
      changed.insert(changed.end(), section.begin(), section.end());
      changed.insert(changed.end(), payload.begin() + static_cast<ptrdiff_t>(start + bytes),
                     payload.end());
      put32(changed, field, static_cast<uint32_t>(section.size()));
      hostile(changed, d);
    };
    const Bytes section(payload.begin() + static_cast<ptrdiff_t>(start),
                        payload.begin() + static_cast<ptrdiff_t>(start + bytes));
    for (size_t length = 0; length < bytes; length += stride)
      replaced(Bytes(section.begin(), section.begin() + static_cast<ptrdiff_t>(length)));
    for (const size_t more : {1, 2, 4, 8, 1000}) {
      Bytes longer = section;
      longer.resize(bytes + more);
      replaced(longer);
    }
    Bytes twice = section;
    twice.insert(twice.end(), section.begin(), section.end());
    replaced(twice);
    for (const uint8_t fill : {0x00, 0x01, 0x55, 0x80, 0xFF}) replaced(Bytes(bytes, fill));
    for (const uint32_t number : {0u, 1u, 0x7FFFFFFFu, 0x80000000u, 0xFFFFFFFFu}) {
      for (size_t at = 0; at + 4 <= bytes; at += stride) {
        Bytes changed = section;
        put32(changed, at, number);
        replaced(changed);
      }
    }
    start += bytes;
  }
}

// Tries numbers in the header that do not match the sections.
void header_numbers(const Bytes& payload, uint32_t d, uint32_t largest_d) {
  const uint32_t count = get32(payload, 16);
  const uint32_t extremes[] = {0,     1,        2,           count - 1,   count + 1,
                               d - 1, d,        d + 1,       4096,        4097,
                               65537, 1u << 24, 0x7FFFFFFFu, 0x80000000u, 0xFFFFFFFFu};
  for (const uint32_t other_d : extremes) {
    for (const uint32_t other_count : extremes) {
      Bytes changed = payload;
      put32(changed, 12, other_d);
      put32(changed, 16, other_count);
      hostile(changed, d);
      if (other_d <= largest_d) hostile(changed, other_d);
    }
  }
  for (size_t field = 20; field <= 28; field += 4) {
    for (const uint32_t length : extremes) {
      Bytes changed = payload;
      put32(changed, field, length);
      hostile(changed, d);
    }
  }
  for (size_t at = 4; at < 12; ++at) {
    for (unsigned value = 0; value < 256; ++value) {
      Bytes changed = payload;
      changed[at] = static_cast<uint8_t>(value);
      hostile(changed, d);
    }
  }
}

// Lets each allocation fail in turn. Each failure must be reported as such.
void no_memory(const dr_codec& codec, const std::vector<float>& values, const Bytes& payload) {
  const uint64_t d = values.size(), size = payload.size();
  const uint8_t* data = payload.data();
  for (const bool encoding : {true, false}) {
    for (uint64_t allowed = 0;; ++allowed) {
      Call call(kMemory, allowed);
      const int status = encoding ? encode(call, codec, values, nullptr)
                                  : dr_decode_sparse(&call.context, &data, &size, 1, d, 1.0f);
      if (!call.refused()) {
        if (status != DR_OK) fail("expected success with enough memory", status);
        break;
      }
      if (status != DR_OUT_OF_MEMORY) fail("expected to be told that memory ran out", status);
      ++counts.out_of_memory;
    }
  }
}

// Partial sums: arrays of exact sizes, so that any access outside is detected, and wrong indices.
void partial_sums() {
  current = "partial sums";
  alarm(kSecondsACase);
  const uint32_t d = 50, start = 7;
  const dr_stage memory{deepreduce::kResidual, {}};
  for (uint32_t count = 0; count <= d; ++count) {
    const Block<uint32_t> indices(static_cast<uint32_t*>(std::malloc(4 * (count + !count))));
    const Block<float> values(static_cast<float*>(std::malloc(4 * (count + !count))));
    const Block<float> array(static_cast<float*>(std::calloc(d, sizeof(float))));
    for (uint32_t i = 0; i < count; ++i) {
      indices.get()[i] = start + (d - count) + i;
      values.get()[i] = static_cast<float>(i % 5);
    }
    for (uint64_t k = 0; k <= count + 1; ++k) {
      Call call(kMemory);
      if (const int status = dr_keep_largest(&call.context, indices.get(), values.get(), count, k))
        fail("expected the largest", status);
      if (call.result().size() != size_t{8} * count) fail("expected all elements", 0);
    }
    for (const bool wrong : {false, true}) {
      if (wrong && count == 0) continue;
      if (wrong) indices.get()[count - 1] = start + d;
      Call putting(kMemory), adding(kMemory);
      const int put = dr_put_back(&putting.context, &memory, indices.get(), values.get(), count,
                                  start, array.get(), d);
      const int added = dr_add_sparse(&adding.context, indices.get(), values.get(), count, start,
                                      0.5f, array.get(), d, nullptr);
      const int expected = wrong ? DR_INVALID_ARGUMENT : DR_OK;
      if (put != expected || added != expected) fail("expected an index outside to be found", put);
    }
  }
  ++counts.cases;
}

bool run_case(const Setting& index, const Setting& value, uint32_t d, uint32_t k, size_t stride,
              size_t dense_bytes) {
  current = std::string(index.name) + " x " + value.name + ", d = " + std::to_string(d);
  alarm(kSecondsACase);
  dr_codec codec{};
  codec.sparsifier = {deepreduce::kTopK, {0, static_cast<double>(k)}};
  codec.index = index.stage;
  codec.value = value.stage;
  const std::vector<float> values = gradient(d);

  Call call(kMemory);
  const int status = encode(call, codec, values, nullptr);
  if (status == DR_UNKNOWN_CODEC) return false;
  if (status != DR_OK) fail(call.context.message, status);
  const Bytes payload = call.result();

  // what is sent plus what is kept must equal the input
  codec.memory.id = deepreduce::kResidual;
  std::vector<float> residual(d), sum(d);
  Call with_memory(kMemory);
  if (const int kept = encode(with_memory, codec, values, &residual))
    fail("expected to encode with a residual", kept);
  codec.memory.id = deepreduce::kNoMemory;
  if (with_memory.result() != payload)
    fail("expected the same payload with a residual of zeros", status);
  const Block<uint8_t> copy = exact_copy(payload);
  const uint8_t* data = copy.get();
  const uint64_t size = payload.size();
  Call decoding(kMemory);
  if (const int decoded =
          dr_decode_sum(&decoding.context, &data, &size, 1, sum.data(), d, 1.0f, nullptr))
    fail("expected to decode", decoded);
  for (uint32_t i = 0; i < d; ++i)
    if (!(std::fabs(sum[i] + residual[i] - values[i]) <= 1e-6f))
      fail("expected the sum of what is sent and kept to be the gradient", static_cast<int>(i));

  no_memory(codec, values, payload);
  bits_and_lengths(payload, d, stride, dense_bytes);
  sections(payload, d, stride);
  // a valid Bloom filter is tested for every index, which takes time
  header_numbers(payload, d, index.stage.id == deepreduce::kBloom ? 1u << 17 : UINT32_MAX);
  ++counts.cases;
  return true;
}

}  // namespace

int main() {
  std::signal(SIGALRM, too_slow);
  const auto began = std::chrono::steady_clock::now();
  partial_sums();
  for (const Setting& index : kIndexSettings) {
    unsigned absent = 0;
    for (const Setting& value : kValueSettings)
      absent += !run_case(index, value, 300, 40, 1, SIZE_MAX);
    if (absent > 0)
      std::printf("%s: %u value codecs, or the codec itself, are not in this build\n", index.name,
                  absent);
  }
  // more than one block of indices; the rest after the directories is similar, so a part is enough
  for (const Setting& index : kIndexSettings)
    run_case(index, kValueSettings[0], 20000, 9000, 1999, 200);
  for (const Setting& value : kValueSettings) run_case(kRice, value, 20000, 9000, 1999, 200);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  std::printf(
      "corruption: %llu cases, %llu payloads (%llu decoded, %llu refused), %llu times without memory: all is well, %.0f s\n",
      static_cast<unsigned long long>(counts.cases),
      static_cast<unsigned long long>(counts.payloads),
      static_cast<unsigned long long>(counts.accepted),
      static_cast<unsigned long long>(counts.refused),
      static_cast<unsigned long long>(counts.out_of_memory), took.count());
  return 0;
}
