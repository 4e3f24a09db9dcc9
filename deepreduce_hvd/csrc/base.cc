#include "base.h"

#include <cstdarg>
#include <cstdio>

namespace deepreduce {
namespace {
[[noreturn]] void raise(int status, const char* format, va_list arguments) {
  Failure failure;
  failure.status = status;
  std::vsnprintf(failure.message, sizeof(failure.message), format, arguments);
  throw failure;
}
}  // namespace

void corrupt_payload(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  raise(DR_CORRUPT_PAYLOAD, format, arguments);
}

void invalid_argument(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  raise(DR_INVALID_ARGUMENT, format, arguments);
}

void unknown_codec(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  raise(DR_UNKNOWN_CODEC, format, arguments);
}

void block_outside(const char* section, uint32_t block, uint64_t data_bytes, uint64_t start,
                   uint64_t end) {
  corrupt_payload("%s: expected block %u within %llu bytes, got %llu to %llu", section, block,
                  static_cast<unsigned long long>(data_bytes),
                  static_cast<unsigned long long>(start), static_cast<unsigned long long>(end));
}

void Arena::out_of_memory(uint64_t count, size_t size) {
  Failure failure;
  failure.status = DR_OUT_OF_MEMORY;
  std::snprintf(failure.message, sizeof(failure.message),
                "no memory for %llu elements of %llu bytes", static_cast<unsigned long long>(count),
                static_cast<unsigned long long>(size));
  throw failure;
}

void ByteWriter::grow(uint64_t bytes) {
  uint64_t capacity = capacity_ * 2;
  if (capacity < size_ + bytes) capacity = size_ + bytes;
  if (capacity < 64) capacity = 64;
  uint8_t* data = arena_.array<uint8_t>(capacity);
  if (size_ != 0) std::memcpy(data, data_, size_);
  data_ = data;
  capacity_ = capacity;
}

void ByteReader::truncated(uint64_t bytes) const {
  corrupt_payload("%s: expected %llu more bytes, got %llu", section_,
                  static_cast<unsigned long long>(bytes),
                  static_cast<unsigned long long>(remaining()));
}

}  // namespace deepreduce
