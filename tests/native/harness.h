// Shared by the native harnesses: a caller of the core with buffers of exact sizes, and the
// checksum of a payload.
#ifndef DEEPREDUCE_TESTS_HARNESS_H
#define DEEPREDUCE_TESTS_HARNESS_H

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "api/deepreduce.h"

namespace harness {

constexpr size_t kHeaderBytes = 40, kChecksumAt = 32;

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};
template <class T>
using Block = std::unique_ptr<T, Free>;

// Returns a copy in memory of exactly this size, so that a read past the end is detected.
inline Block<uint8_t> exact_copy(const std::vector<uint8_t>& bytes) {
  Block<uint8_t> copy(static_cast<uint8_t*>(std::malloc(bytes.empty() ? 1 : bytes.size())));
  if (!bytes.empty()) std::memcpy(copy.get(), bytes.data(), bytes.size());
  return copy;
}

// The memory of one call, with a limit on the total size and on the number of allocations.
class Call {
 public:
  explicit Call(size_t limit_bytes, uint64_t allowed_requests = UINT64_MAX)
      : left_bytes_(limit_bytes), left_requests_(allowed_requests) {
    context.allocate = [](void* user, size_t bytes) -> void* {
      return static_cast<Call*>(user)->scratch(bytes);
    };
    context.output = [](void* user, size_t bytes) -> void* {
      return static_cast<Call*>(user)->output(bytes);
    };
    context.user = this;
    context.simd = -1;
  }
  ~Call() {
    for (void* memory : scratch_) std::free(memory);
  }
  Call(const Call&) = delete;

  bool refused() const { return refused_; }
  std::vector<uint8_t> result() const {
    const uint8_t* data = output_.get();
    return data == nullptr ? std::vector<uint8_t>()
                           : std::vector<uint8_t>(data, data + output_bytes_);
  }
  dr_context context{};

 private:
  bool grant(size_t bytes) {
    if (bytes > left_bytes_ || left_requests_ == 0) {
      refused_ = true;
      return false;
    }
    left_bytes_ -= bytes;
    --left_requests_;
    return true;
  }
  void* scratch(size_t bytes) {
    void* memory = nullptr;
    if (!grant(bytes) || posix_memalign(&memory, 64, bytes) != 0) return nullptr;
    scratch_.push_back(memory);
    return memory;
  }
  void* output(size_t bytes) {
    if (output_ != nullptr) std::abort();  // must be requested at most once
    if (!grant(bytes)) return nullptr;
    output_.reset(static_cast<uint8_t*>(std::malloc(bytes == 0 ? 1 : bytes)));
    output_bytes_ = bytes;
    return output_.get();
  }

  std::vector<void*> scratch_;
  Block<uint8_t> output_;
  size_t output_bytes_ = 0, left_bytes_;
  uint64_t left_requests_;
  bool refused_ = false;
};

// The checksum of docs/format.md, implemented a second time, so that an error in the core's is
// found.
inline uint64_t checksum(const std::vector<uint8_t>& bytes) {
  uint64_t sum = 0;
  for (uint64_t i = 0; i < (bytes.size() + 7) / 8; ++i) {
    uint64_t word = 0;
    for (uint64_t b = 0; b < 8; ++b) {
      const uint64_t at = 8 * i + b;
      if (at < bytes.size() && i != kChecksumAt / 8) word |= uint64_t{bytes[at]} << (8 * b);
    }
    uint64_t mixed = i + 0x9E3779B97F4A7C15u;
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9u;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBu;
    mixed ^= mixed >> 31;
    sum += (word + 1) * (mixed | 1);
  }
  return sum;
}

inline void put32(std::vector<uint8_t>& bytes, size_t at, uint32_t value) {
  std::memcpy(bytes.data() + at, &value, 4);
}
inline uint32_t get32(const std::vector<uint8_t>& bytes, size_t at) {
  uint32_t value;
  std::memcpy(&value, bytes.data() + at, 4);
  return value;
}

// Sets the matching checksum: like the payload of an attacker, not of a broken connection.
inline void seal(std::vector<uint8_t>& bytes) {
  if (bytes.size() < kHeaderBytes) return;
  const uint64_t sum = checksum(bytes);
  std::memcpy(bytes.data() + kChecksumAt, &sum, 8);
}

}  // namespace harness
#endif
