// What the NumPy binding's functions share: arrays, and the scratch memory and result of a call.
#ifndef DEEPREDUCE_PYTHON_CALL_H
#define DEEPREDUCE_PYTHON_CALL_H

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "api/deepreduce.h"
#include "support/host_scratch.h"

namespace deepreduce {
namespace python {

namespace py = pybind11;

using Bytes = py::array_t<uint8_t, py::array::c_style>;
using Indices = py::array_t<uint32_t, py::array::c_style>;
using Floats = py::array_t<float, py::array::c_style>;
using Positions = py::array_t<int64_t, py::array::c_style>;

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

// Scratch memory and result of one call, freed with it.
class Call {
 public:
  explicit Call(int simd) {
    context.allocate = [](void* user, size_t bytes) noexcept {
      return static_cast<Call*>(user)->scratch_.allocate(bytes);
    };
    context.output = [](void* user, size_t bytes) noexcept -> void* {
      Call* call = static_cast<Call*>(user);
      call->result_.reset(std::malloc(bytes == 0 ? 1 : bytes));
      call->result_bytes_ = bytes;
      return call->result_.get();
    };
    context.user = this;
    context.simd = simd;
  }

  void check(int status) const {
    if (status == DR_OK) return;
    static const char* const names[] = {"", "CorruptPayloadError", "InvalidArgumentError",
                                        "UnknownCodecError", ""};
    if (status == DR_OUT_OF_MEMORY) throw std::bad_alloc();
    const py::object error = py::module_::import("deepreduce_hvd.errors").attr(names[status]);
    PyErr_SetString(error.ptr(), context.message);
    throw py::error_already_set();
  }

  // Returns the result as an array that owns its memory.
  Bytes result() {
    uint8_t* data = static_cast<uint8_t*>(result_.release());
    return Bytes(static_cast<py::ssize_t>(result_bytes_), data,
                 py::capsule(data, [](void* memory) { std::free(memory); }));
  }

  dr_context context{};

 private:
  HostScratch scratch_;
  std::unique_ptr<void, Free> result_;
  size_t result_bytes_ = 0;
};

inline dr_codec codec_from(const std::vector<double>& fields) {
  Call call(-1);
  dr_codec codec;
  call.check(dr_read_codec(&call.context, fields.data(), fields.size(), &codec));
  return codec;
}

inline std::string describe(const py::handle& object) {
  if (!py::isinstance<py::array>(object))
    return py::str(py::type::handle_of(object).attr("__name__"));
  const py::array array = py::reinterpret_borrow<py::array>(object);
  return std::string(py::str(array.dtype())) + " of shape " +
         std::string(py::str(array.attr("shape"))) +
         ((array.flags() & py::array::c_style) != 0 ? "" : ", not contiguous");
}

// Returns an array that the core updates in place, so without a conversion.
inline Floats floats_of(const py::object& array, const char* name) {
  if (!py::isinstance<Floats>(array))
    throw py::value_error(std::string(name) + ": expected a contiguous float32 array, got " +
                          describe(array));
  return py::reinterpret_borrow<Floats>(array);
}

// Returns the elements of such an array of a memory, null for None.
inline float* state_data(const py::object& array, uint64_t d, const char* name) {
  if (array.is_none()) return nullptr;
  Floats floats = floats_of(array, name);
  if (static_cast<uint64_t>(floats.size()) != d)
    throw py::value_error(std::string(name) + ": expected the gradient's number of elements, " +
                          std::to_string(d) + ", got " + std::to_string(floats.size()));
  return floats.mutable_data();
}

inline void expect_count(const char* name, const Floats& values, uint64_t count) {
  if (static_cast<uint64_t>(values.size()) != count)
    throw py::value_error(std::string(name) + ": expected as many as indices, " +
                          std::to_string(count) + ", got " + std::to_string(values.size()));
}

// The addresses and sizes of payloads.
struct PayloadList {
  std::vector<const uint8_t*> data;
  std::vector<uint64_t> sizes;

  explicit PayloadList(const std::vector<Bytes>& payloads) {
    for (const Bytes& payload : payloads) add(payload.data(), payload.size());
  }
  // Payload i has the bytes of `gathered` from starts[i] to ends[i].
  PayloadList(const Bytes& gathered, const Positions& starts, const Positions& ends) {
    if (starts.size() != ends.size())
      throw py::value_error("ends: expected " + std::to_string(starts.size()) + " numbers, got " +
                            std::to_string(ends.size()));
    for (py::ssize_t i = 0; i < starts.size(); ++i) {
      const int64_t start = starts.data()[i], end = ends.data()[i];
      if (start < 0 || end < start || end > gathered.size())
        throw py::value_error("payload " + std::to_string(i) + ": expected bytes within " +
                              std::to_string(gathered.size()) + ", got " + std::to_string(start) +
                              " to " + std::to_string(end));
      add(gathered.data() + start, end - start);
    }
  }

 private:
  void add(const uint8_t* payload, py::ssize_t size) {
    data.push_back(payload);
    sizes.push_back(static_cast<uint64_t>(size));
  }
};

}  // namespace python
}  // namespace deepreduce
#endif
