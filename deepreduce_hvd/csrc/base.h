// The base of all files of the core: failures, scratch memory, byte readers and writers.
#ifndef DEEPREDUCE_BASE_H
#define DEEPREDUCE_BASE_H

#include <cstdint>
#include <cstring>

#include "api/deepreduce.h"

namespace deepreduce {

// Thrown inside the core only; the C ABI converts it to a status and a message.
struct Failure {
  int status;
  char message[sizeof(dr_context::message)];
};

[[noreturn]] void corrupt_payload(const char* format, ...) __attribute__((format(printf, 1, 2)));
[[noreturn]] void invalid_argument(const char* format, ...) __attribute__((format(printf, 1, 2)));
[[noreturn]] void unknown_codec(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Raises the error for a block of a section that a directory places outside of its bytes.
[[noreturn]] void block_outside(const char* section, uint32_t block, uint64_t data_bytes,
                                uint64_t start, uint64_t end);

// Scratch memory of one call, from the caller's allocator. Nothing is freed before the call
// returns.
class Arena {
 public:
  explicit Arena(dr_context* context) : context_(context) {}
  template <class T>
  T* array(uint64_t count) {
    if (count > (uint64_t{1} << 46) / sizeof(T)) out_of_memory(count, sizeof(T));
    void* memory = context_->allocate(
        context_->user, count == 0 ? sizeof(T) : static_cast<size_t>(count) * sizeof(T));
    if (memory == nullptr) out_of_memory(count, sizeof(T));
    return static_cast<T*>(memory);
  }
  template <class T>
  T* zeros(uint64_t count) {
    T* memory = array<T>(count);
    std::memset(static_cast<void*>(memory), 0, static_cast<size_t>(count) * sizeof(T));
    return memory;
  }
  [[noreturn]] static void out_of_memory(uint64_t count, size_t size);

 private:
  dr_context* context_;
};

enum class Simd : int { scalar = 0, avx2 = 1, avx512 = 2 };

struct Context {
  Arena& arena;
  Simd simd;  // best level that this processor has and the caller allows
};

// Writes a section: little-endian, grows in the arena.
class ByteWriter {
 public:
  explicit ByteWriter(Arena& arena) : arena_(arena) {}
  // Adds `bytes` bytes to the section, which the caller fills.
  uint8_t* extend(uint64_t bytes) {
    if (bytes > capacity_ - size_) grow(bytes);
    uint8_t* place = data_ + size_;
    size_ += bytes;
    return place;
  }
  template <class T>
  void put(T value) {
    std::memcpy(extend(sizeof(T)), &value, sizeof(T));
  }
  void put_bytes(const void* source, uint64_t bytes) {
    if (bytes != 0) std::memcpy(extend(bytes), source, bytes);
  }
  // Drops the end of the last extension.
  void shrink_to(uint64_t size) { size_ = size; }
  uint8_t* data() { return data_; }
  uint64_t size() const { return size_; }

 private:
  void grow(uint64_t bytes);
  Arena& arena_;
  uint8_t* data_ = nullptr;
  uint64_t size_ = 0, capacity_ = 0;
};

// Reads a section. Every read is checked: missing or surplus bytes are a CorruptPayloadError that
// names the section.
class ByteReader {
 public:
  ByteReader(const uint8_t* data, uint64_t size, const char* section)
      : at_(data), end_(data + size), section_(section) {}
  template <class T>
  T get() {
    T value;
    std::memcpy(&value, take(sizeof(T)), sizeof(T));
    return value;
  }
  const uint8_t* take(uint64_t bytes) {
    if (bytes > remaining()) truncated(bytes);
    const uint8_t* place = at_;
    at_ += bytes;
    return place;
  }
  uint64_t remaining() const { return static_cast<uint64_t>(end_ - at_); }
  void expect_end() const {
    if (at_ != end_)
      corrupt_payload("%s: expected the end of the section, got %llu more bytes", section_,
                      static_cast<unsigned long long>(remaining()));
  }
  const char* section() const { return section_; }

 private:
  [[noreturn]] void truncated(uint64_t bytes) const;
  const uint8_t* at_;
  const uint8_t* end_;
  const char* section_;
};

}  // namespace deepreduce
#endif
