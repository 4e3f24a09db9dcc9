// For tests: runs a single stage of a device codec in the emulator. The caller provides all memory.
// All functions return a status, and `message` has the error. Arrays passed to a codec are copied
// into memory of exactly their size, so that AddressSanitizer finds accesses outside of them.
#include <cstdio>
#include <stdexcept>
#include <vector>

#include "cuda/algorithms.cuh"
#include "cuda/codecs.cuh"

using namespace deepreduce;
using namespace deepreduce::cuda;

namespace {

constexpr int kEmulatorError = 100;

template <class Work>
int guarded(char* message, Work work) {
  message[0] = '\0';
  try {
    work();
    return DR_OK;
  } catch (const Failure& failure) {
    std::snprintf(message, 512, "%s", failure.message);
    return failure.status;
  } catch (const std::exception& error) {
    std::snprintf(message, 512, "%s", error.what());
    return kEmulatorError;
  }
}

// Runs work(device) twice: to get the size, and with a workspace of that size.
template <class Work>
int32_t with_device(dr_cuda_result* result, Work work) {
  *result = dr_cuda_result{};
  Device measure;
  work(measure, true);
  std::vector<uint8_t> memory(measure.most_used() + kAlignment);
  uint8_t* aligned = reinterpret_cast<uint8_t*>(
      (reinterpret_cast<uintptr_t>(memory.data()) + kAlignment - 1) / kAlignment * kAlignment);
  Device device(aligned, measure.most_used(), nullptr, result);
  work(device, false);
  if (device.most_used() != measure.most_used())
    throw std::runtime_error("the size query and the call take different amounts of workspace");
  return result->status;
}

template <class Codec>
const Codec& expect(const Codec* codec, int id) {
  if (codec == nullptr) unknown_codec("device codec: got the unknown id %d", id);
  return *codec;
}

SectionOut section_out(Device& device, uint64_t capacity) {
  uint8_t* data = device.array<uint8_t>(capacity + kSectionSlack);
  return {data, capacity, device.array<uint64_t>(1)};
}

void take_section(bool measuring, const SectionOut& out, uint8_t* section,
                  uint64_t* section_bytes) {
  if (measuring) return;
  *section_bytes = *out.bytes;
  if (*out.bytes > out.capacity)
    throw std::runtime_error("the section is longer than its capacity");
  std::memcpy(section, out.data, *out.bytes);
}

// Decodes a section that starts `misalignment` bytes after a multiple of 16. Calls decode(device,
// the section, room for `capacity` of T), capacity >= count. Like the callers of decoders, refuses
// a count above `most` first.
template <class T, class Decode>
void decode_section(const uint8_t* section, uint64_t bytes, int misalignment, uint32_t d,
                    uint32_t count, uint64_t most, uint32_t capacity, int active, T* out,
                    dr_cuda_result* result, Decode decode) {
  if (count > most) {
    *result = dr_cuda_result{};
    result->status = DR_CORRUPT_PAYLOAD;
    return;
  }
  std::vector<uint8_t> padded(misalignment, 0xEE);
  padded.insert(padded.end(), section, section + bytes);
  padded.shrink_to_fit();
  with_device(result, [&](Device& device, bool measuring) {
    DeviceSection* on_device = device.array<DeviceSection>(1);
    const DeviceSection contents{padded.data() + misalignment, bytes, d, count, active != 0};
    device.copy(on_device, &contents, sizeof(contents));
    T* decoded = device.array<T>(capacity);
    decode(device, on_device, decoded);
    if (!measuring && result->status == DR_OK && active && count != 0)
      std::memcpy(out, decoded, sizeof(T) * count);
  });
}

// `count` numbers and their count in device memory.
template <class T>
struct Given {
  const T* values;
  const uint32_t* count;
  Given(Device& device, const T* from, uint32_t number, uint32_t capacity) {
    T* copied = device.array<T>(capacity);
    device.copy(copied, from, sizeof(T) * number);
    uint32_t* copied_count = device.array<uint32_t>(1);
    device.copy(copied_count, &number, 4);
    values = copied;
    count = copied_count;
  }
};

}  // namespace

extern "C" {

void dr_test_schedule(int schedule, uint64_t seed, int poison) {
  emulation::options().schedule = static_cast<emulation::Schedule>(schedule);
  emulation::options().seed = seed;
  emulation::options().poison = static_cast<uint8_t>(poison);
}

// Returns the maximum bytes and decoded indices; `indices` (count,), capacity >= count.
int dr_test_index_capacity(int id, uint32_t d, uint32_t capacity, const double* parameters,
                           uint64_t* bytes, uint32_t* decoded, char* message) {
  return guarded(message, [&] {
    const DeviceIndexCodec& codec = expect(find_device_index_codec(id), id);
    *bytes = codec.section_capacity(d, capacity, parameters);
    *decoded = codec.decoded_capacity == nullptr ? capacity
                                                 : codec.decoded_capacity(d, capacity, parameters);
  });
}

int dr_test_index_encode(int id, uint32_t d, uint32_t count, uint32_t capacity,
                         const uint32_t* indices, const double* parameters, double value_bits,
                         uint64_t key, uint8_t* section, uint64_t* section_bytes, uint32_t* decoded,
                         uint32_t* decoded_count, int* values_stay, dr_cuda_result* result,
                         char* message) {
  return guarded(message, [&] {
    const DeviceIndexCodec& codec = expect(find_device_index_codec(id), id);
    with_device(result, [&](Device& device, bool measuring) {
      const SectionOut out = section_out(device, codec.section_capacity(d, capacity, parameters));
      const Given<uint32_t> given(device, indices, count, capacity);
      const uint32_t most = codec.decoded_capacity == nullptr
                                ? capacity
                                : codec.decoded_capacity(d, capacity, parameters);
      DeviceIndexEncoding encoding{d,          capacity,    given.count,  given.values,
                                   parameters, value_bits,  &key,         out,
                                   most,       given.count, given.values, false};
      codec.encode(device, encoding);
      take_section(measuring, out, section, section_bytes);
      if (measuring) return;
      *decoded_count = *encoding.decoded_count;
      if (*decoded_count > most)
        throw std::runtime_error("more indices are decoded than the capacity");
      if (*decoded_count != 0) std::memcpy(decoded, encoding.decoded, uint64_t{4} * *decoded_count);
      *values_stay = encoding.values_stay;
    });
  });
}

int dr_test_index_decode(int id, const uint8_t* section, uint64_t bytes, int misalignment,
                         uint32_t d, uint32_t count, uint32_t capacity, int active,
                         const double* parameters, uint32_t* indices, dr_cuda_result* result,
                         char* message) {
  return guarded(message, [&] {
    const DeviceIndexCodec& codec = expect(find_device_index_codec(id), id);
    decode_section(section, bytes, misalignment, d, count, codec.most_count(bytes, d), capacity,
                   active, indices, result,
                   [&](Device& device, const DeviceSection* at, uint32_t* out) {
                     codec.decode(device, at, d, capacity, bytes + 100, parameters, out);
                   });
  });
}

int dr_test_value_capacity(int id, uint32_t capacity, const double* parameters, uint64_t* bytes,
                           char* message) {
  return guarded(message, [&] {
    *bytes = expect(find_device_value_codec(id), id).section_capacity(capacity, parameters);
  });
}

int dr_test_value_encode(int id, uint32_t count, uint32_t capacity, const float* values,
                         const double* parameters, uint64_t key, uint8_t* section,
                         uint64_t* section_bytes, float* decoded, uint32_t* order,
                         dr_cuda_result* result, char* message) {
  return guarded(message, [&] {
    const DeviceValueCodec& codec = expect(find_device_value_codec(id), id);
    with_device(result, [&](Device& device, bool measuring) {
      const SectionOut out = section_out(device, codec.section_capacity(capacity, parameters));
      const Given<float> given(device, values, count, capacity);
      float* device_decoded = device.array<float>(capacity);
      uint32_t* device_order = codec.sorts ? device.array<uint32_t>(capacity) : nullptr;
      DeviceValueEncoding encoding{capacity, given.count, given.values,   parameters,
                                   &key,     out,         device_decoded, device_order};
      codec.encode(device, encoding);
      take_section(measuring, out, section, section_bytes);
      if (measuring || count == 0) return;
      std::memcpy(decoded, device_decoded, uint64_t{4} * count);
      if (codec.sorts) std::memcpy(order, device_order, uint64_t{4} * count);
    });
  });
}

int dr_test_value_decode(int id, const uint8_t* section, uint64_t bytes, int misalignment,
                         uint32_t d, uint32_t count, uint32_t capacity, int active, float* values,
                         dr_cuda_result* result, char* message) {
  return guarded(message, [&] {
    const DeviceValueCodec& codec = expect(find_device_value_codec(id), id);
    decode_section(section, bytes, misalignment, d, count, codec.most_count(bytes), capacity,
                   active, values, result,
                   [&](Device& device, const DeviceSection* at, float* out) {
                     codec.decode(device, at, capacity, bytes + 100, out);
                   });
  });
}

// Encodes only the order section.
int dr_test_order_encode(const uint32_t* order, uint32_t count, uint32_t capacity, uint8_t* section,
                         uint64_t* section_bytes, dr_cuda_result* result, char* message) {
  return guarded(message, [&] {
    with_device(result, [&](Device& device, bool measuring) {
      const SectionOut out = section_out(device, order_capacity(capacity));
      const Given<uint32_t> given(device, order, count, capacity);
      write_order(device, given.values, given.count, capacity, out);
      take_section(measuring, out, section, section_bytes);
    });
  });
}

int dr_test_order_decode(const uint8_t* section, uint64_t bytes, uint32_t count, uint32_t capacity,
                         uint32_t* order, dr_cuda_result* result, char* message) {
  return guarded(message, [&] {
    decode_section(section, bytes, 0, count, count, count, capacity, 1, order, result,
                   [&](Device& device, const DeviceSection* at, uint32_t* out) {
                     read_order(device, at, capacity, out);
                   });
  });
}

}  // extern "C"
