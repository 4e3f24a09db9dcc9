// The NumPy binding: functions for the entries of the C ABI, on arrays.
#include <algorithm>
#include <optional>

#include "api/python_call.h"

namespace deepreduce {
namespace python {
namespace {

// Converts the arguments that encode and select share.
dr_encoding encoding_of(const py::array& gradient, int dtype, const py::object& residual,
                        const py::object& velocity, float threshold, const dr_position& position) {
  if (!(gradient.flags() & py::array::c_style))
    throw py::value_error("gradient: expected a contiguous array, got " + describe(gradient));
  // the core refuses other codes
  if (dtype >= DR_FLOAT32 && dtype <= DR_FLOAT64) {
    const py::ssize_t expected = dtype == DR_FLOAT64 ? 8 : dtype == DR_FLOAT32 ? 4 : 2;
    if (gradient.itemsize() != expected)
      throw py::value_error("gradient: expected elements of " + std::to_string(expected) +
                            " bytes for dtype " + std::to_string(dtype) + ", got " +
                            describe(gradient));
  }
  dr_encoding encoding{};
  encoding.gradient = gradient.data();
  encoding.dtype = dtype;
  encoding.d = static_cast<uint64_t>(gradient.size());
  encoding.residual = state_data(residual, encoding.d, "residual");
  encoding.velocity = state_data(velocity, encoding.d, "velocity");
  encoding.threshold = threshold;
  encoding.position = position;
  return encoding;
}

py::tuple encode(const std::vector<double>& codec_fields, py::array gradient, int dtype,
                 py::object residual, py::object velocity, float threshold, uint64_t seed,
                 uint64_t step, uint64_t tensor, uint64_t rank, int simd) {
  const dr_codec codec = codec_from(codec_fields);
  dr_encoding encoding =
      encoding_of(gradient, dtype, residual, velocity, threshold, {seed, step, tensor, rank});
  Call call(simd);
  int status;
  {
    py::gil_scoped_release release;
    status = dr_encode(&call.context, &codec, &encoding);
  }
  call.check(status);
  return py::make_tuple(call.result(), encoding.threshold, encoding.count);
}

// Returns the (count,) indices and (count,) values that are concatenated in `both`.
py::tuple indices_and_values(Bytes both) {
  const py::ssize_t count = both.size() / 8;
  return py::make_tuple(
      py::array_t<uint32_t>(count, reinterpret_cast<const uint32_t*>(both.data()), both),
      py::array_t<float>(count, reinterpret_cast<const float*>(both.data() + 4 * count), both));
}

py::tuple select_elements(const std::vector<double>& codec_fields, py::array gradient, int dtype,
                          py::object residual, py::object velocity, float threshold, uint64_t seed,
                          uint64_t step, uint64_t tensor, uint64_t rank,
                          std::optional<Indices> given, bool finite, int simd) {
  const dr_codec codec = codec_from(codec_fields);
  dr_encoding encoding =
      encoding_of(gradient, dtype, residual, velocity, threshold, {seed, step, tensor, rank});
  encoding.finite = finite;
  static const uint32_t none = 0;
  const uint32_t* taken = !given ? nullptr : given->size() == 0 ? &none : given->data();
  Call call(simd);
  int32_t non_finite = 0;
  int status;
  {
    py::gil_scoped_release release;
    status = dr_select(&call.context, &codec, &encoding, taken,
                       given ? static_cast<uint64_t>(given->size()) : 0, &non_finite);
  }
  call.check(status);
  if (non_finite != 0) return py::make_tuple(py::none(), py::none(), threshold);
  const py::tuple both = indices_and_values(call.result());
  return py::make_tuple(both[0], both[1], encoding.threshold);
}

py::tuple encode_sparse(const std::vector<double>& codec_fields, const Indices& indices,
                        py::object values, uint64_t d, int dtype, bool write_back, uint64_t seed,
                        uint64_t step, uint64_t tensor, uint64_t rank, int simd) {
  const dr_codec codec = codec_from(codec_fields);
  dr_sparse_encoding encoding{};
  encoding.indices = indices.data();
  encoding.count = static_cast<uint64_t>(indices.size());
  Floats sums = floats_of(values, "values");
  expect_count("values", sums, encoding.count);
  encoding.values = sums.mutable_data();
  encoding.d = d;
  encoding.dtype = dtype;
  encoding.write_back = write_back;
  encoding.position = {seed, step, tensor, rank};
  Call call(simd);
  int status;
  {
    py::gil_scoped_release release;
    status = dr_encode_sparse(&call.context, &codec, &encoding);
  }
  call.check(status);
  const py::ssize_t added = static_cast<py::ssize_t>(encoding.added_count);
  return py::make_tuple(call.result(), py::array_t<uint32_t>(added, encoding.added_indices),
                        py::array_t<float>(added, encoding.added_values));
}

float add_decoded(const PayloadList& list, py::object out, float scale, int simd) {
  Floats floats = floats_of(out, "out");
  float* sum = floats.mutable_data();
  const uint64_t d = static_cast<uint64_t>(floats.size());
  Call call(simd);
  int status;
  float largest = 0;
  {
    py::gil_scoped_release release;
    status = dr_decode_sum(&call.context, list.data.data(), list.sizes.data(), list.data.size(),
                           sum, d, scale, &largest);
  }
  call.check(status);
  return largest;
}

float decode_sum(const std::vector<Bytes>& payloads, py::object out, float scale, int simd) {
  return add_decoded(PayloadList(payloads), out, scale, simd);
}

// Does the same with payloads that are parts of one array: with many ranks, an array for each would
// take longer than the sum.
float decode_sum_of(const Bytes& gathered, const Positions& starts, const Positions& ends,
                    py::object out, float scale) {
  return add_decoded(PayloadList(gathered, starts, ends), out, scale, -1);
}

py::tuple decode_sparse(const std::vector<Bytes>& payloads, uint64_t d, float scale, int simd) {
  const PayloadList list(payloads);
  Call call(simd);
  int status;
  {
    py::gil_scoped_release release;
    status = dr_decode_sparse(&call.context, list.data.data(), list.sizes.data(), list.data.size(),
                              d, scale);
  }
  call.check(status);
  return indices_and_values(call.result());
}

// Returns (indices, values) of the k largest, and (indices, values) of the rest.
py::tuple keep_largest(const Indices& indices, const Floats& values, uint64_t k, int simd) {
  const uint64_t count = static_cast<uint64_t>(indices.size());
  expect_count("values", values, count);
  Call call(simd);
  int status;
  {
    py::gil_scoped_release release;
    status = dr_keep_largest(&call.context, indices.data(), values.data(), count, k);
  }
  call.check(status);
  const py::tuple both = indices_and_values(call.result());
  const py::slice kept(0, static_cast<py::ssize_t>(std::min(k, count)), 1);
  const py::slice rest(static_cast<py::ssize_t>(std::min(k, count)),
                       static_cast<py::ssize_t>(count), 1);
  return py::make_tuple(both[0][kept], both[1][kept], both[0][rest], both[1][rest]);
}

void put_back(const std::vector<double>& memory_fields, const Indices& indices,
              const Floats& values, py::object residual, uint64_t start) {
  if (memory_fields.size() != 1 + DR_STAGE_PARAMETERS)
    throw py::value_error("memory: expected 5 numbers, got " +
                          std::to_string(memory_fields.size()));
  dr_stage memory{static_cast<int32_t>(memory_fields[0]), {}};
  std::copy(memory_fields.begin() + 1, memory_fields.end(), memory.parameters);
  const uint64_t count = static_cast<uint64_t>(indices.size());
  expect_count("values", values, count);
  Floats floats = floats_of(residual, "residual");
  float* rest = floats.mutable_data();
  const uint64_t d = static_cast<uint64_t>(floats.size());
  Call call(-1);
  int status;
  {
    py::gil_scoped_release release;
    status =
        dr_put_back(&call.context, &memory, indices.data(), values.data(), count, start, rest, d);
  }
  call.check(status);
}

float add_sparse(const Indices& indices, const Floats& values, py::object out, float scale,
                 uint64_t start) {
  const uint64_t count = static_cast<uint64_t>(indices.size());
  expect_count("values", values, count);
  Floats floats = floats_of(out, "out");
  float* sum = floats.mutable_data();
  const uint64_t d = static_cast<uint64_t>(floats.size());
  Call call(-1);
  int status;
  float largest = 0;
  {
    py::gil_scoped_release release;
    status = dr_add_sparse(&call.context, indices.data(), values.data(), count, start, scale, sum,
                           d, &largest);
  }
  call.check(status);
  return largest;
}

py::dict inspect(const Bytes& payload) {
  Call call(-1);
  dr_header header;
  call.check(
      dr_inspect(&call.context, payload.data(), static_cast<uint64_t>(payload.size()), &header));
  py::dict result;
  result["version"] = header.version;
  result["flags"] = header.flags;
  result["index_id"] = header.index_id;
  result["value_id"] = header.value_id;
  result["dtype"] = header.dtype;
  result["order"] = header.order;
  result["d"] = header.d;
  result["count"] = header.count;
  result["index_bytes"] = header.index_bytes;
  result["value_bytes"] = header.value_bytes;
  result["order_bytes"] = header.order_bytes;
  result["total_bytes"] = header.total_bytes;
  return result;
}

// Splits concatenated messages, `of_each` of each rank (0: not in the order of ranks). Returns
// (n + 1,) int64: message i has the bytes from number i to number i + 1; (n,) bool: whether each is
// a non-finite payload; and [(i, text)] of the notices. With `of_each`, an error names the rank.
py::tuple read_messages(const Bytes& messages, size_t of_each) {
  const uint64_t size = static_cast<uint64_t>(messages.size());
  Call call(-1);
  std::vector<int64_t> bounds(1, 0);
  std::vector<bool> non_finite;
  py::list notices;
  for (uint64_t at = 0; at < size; bounds.push_back(static_cast<int64_t>(at))) {
    dr_message message;
    const int status = dr_read_message(&call.context, messages.data() + at, size - at, &message);
    if (status != DR_OK && of_each != 0) {
      const std::string reason = call.context.message;
      std::snprintf(call.context.message, sizeof(call.context.message), "rank %zu: %s",
                    non_finite.size() / of_each, reason.c_str());
    }
    call.check(status);
    if (message.text != nullptr)
      notices.append(py::make_tuple(
          non_finite.size(),
          py::bytes(reinterpret_cast<const char*>(message.text), message.text_bytes)));
    non_finite.push_back(message.non_finite != 0);
    at += message.bytes;
  }
  py::array_t<bool> flags(static_cast<py::ssize_t>(non_finite.size()));
  std::copy(non_finite.begin(), non_finite.end(), flags.mutable_data());
  return py::make_tuple(Positions(static_cast<py::ssize_t>(bounds.size()), bounds.data()), flags,
                        notices);
}

Bytes write_notice(const std::string& text) {
  Call call(-1);
  call.check(dr_write_notice(&call.context, text.data(), text.size()));
  return call.result();
}

Bytes size_notice(uint64_t size, uint64_t senders, uint64_t most, uint64_t rank) {
  Call call(-1);
  call.check(dr_write_size_notice(&call.context, size, senders, most, rank));
  return call.result();
}

std::vector<double> make_probe(uint64_t rank, uint32_t fingerprint, uint64_t step,
                               double loss_scale) {
  std::vector<double> probe(DR_PROBE_LENGTH);
  dr_make_probe(rank, fingerprint, step, loss_scale, probe.data());
  return probe;
}

double scale(const std::vector<double>& reduced_probe, const std::vector<uint64_t>& ranks,
             uint32_t fingerprint, uint64_t step, double loss_scale) {
  if (reduced_probe.size() != DR_PROBE_LENGTH)
    throw py::value_error("probe: expected 4 numbers, got " + std::to_string(reduced_probe.size()));
  Call call(-1);
  double result;
  call.check(dr_scale(&call.context, reduced_probe.data(), ranks.data(), ranks.size(), fingerprint,
                      step, loss_scale, &result));
  return result;
}

// Returns [{kind, name, file, on_device, id, parameters}] of the built-in stages.
py::list stages() {
  py::list result;
  for (uint32_t number = 0; const dr_stage_row* row = dr_stage_table(number); ++number) {
    py::dict entry;
    entry["kind"] = row->kind;
    entry["name"] = row->name;
    entry["file"] = row->file;
    entry["on_device"] = row->on_device != 0;
    entry["id"] = row->stage.id;
    entry["parameters"] =
        std::vector<double>(row->stage.parameters, row->stage.parameters + DR_STAGE_PARAMETERS);
    result.append(entry);
  }
  return result;
}

}  // namespace
}  // namespace python
}  // namespace deepreduce

PYBIND11_MODULE(_native, module) {
  using namespace deepreduce::python;
  module.doc() = "The native core of deepreduce_hvd, for NumPy arrays.";
  module.def("encode", &encode, py::arg("codec"), py::arg("gradient"), py::arg("dtype"),
             py::arg("residual") = py::none(), py::arg("velocity") = py::none(),
             py::arg("threshold") = 0.0f, py::arg("seed") = 0, py::arg("step") = 0,
             py::arg("tensor") = 0, py::arg("rank") = 0, py::arg("simd") = -1);
  module.def("select", &select_elements, py::arg("codec"), py::arg("gradient"), py::arg("dtype"),
             py::arg("residual") = py::none(), py::arg("velocity") = py::none(),
             py::arg("threshold") = 0.0f, py::arg("seed") = 0, py::arg("step") = 0,
             py::arg("tensor") = 0, py::arg("rank") = 0, py::arg("given") = py::none(),
             py::arg("finite") = false, py::arg("simd") = -1);
  module.def("encode_sparse", &encode_sparse, py::arg("codec"), py::arg("indices"),
             py::arg("values"), py::arg("d"), py::arg("dtype") = 0, py::arg("write_back") = true,
             py::arg("seed") = 0, py::arg("step") = 0, py::arg("tensor") = 0, py::arg("rank") = 0,
             py::arg("simd") = -1);
  module.def("decode_sum", &decode_sum, py::arg("payloads"), py::arg("out"),
             py::arg("scale") = 1.0f, py::arg("simd") = -1);
  module.def("decode_sum_of", &decode_sum_of, py::arg("gathered"), py::arg("starts"),
             py::arg("ends"), py::arg("out"), py::arg("scale"));
  module.def("decode_sparse", &decode_sparse, py::arg("payloads"), py::arg("d"),
             py::arg("scale") = 1.0f, py::arg("simd") = -1);
  module.def("keep_largest", &keep_largest, py::arg("indices"), py::arg("values"), py::arg("k"),
             py::arg("simd") = -1);
  module.def("put_back", &put_back, py::arg("memory"), py::arg("indices"), py::arg("values"),
             py::arg("residual"), py::arg("start") = 0);
  module.def("add_sparse", &add_sparse, py::arg("indices"), py::arg("values"), py::arg("out"),
             py::arg("scale") = 1.0f, py::arg("start") = 0);
  module.def("inspect", &inspect, py::arg("payload"));
  module.def("read_messages", &read_messages, py::arg("messages"), py::arg("of_each") = 0);
  module.def("write_notice", &write_notice, py::arg("text"));
  module.def("size_notice", &size_notice, py::arg("size"), py::arg("senders"), py::arg("most"),
             py::arg("rank"));
  module.def("make_probe", &make_probe, py::arg("rank"), py::arg("fingerprint"), py::arg("step"),
             py::arg("loss_scale"));
  module.def("scale", &scale, py::arg("reduced_probe"), py::arg("ranks"), py::arg("fingerprint"),
             py::arg("step"), py::arg("loss_scale"));
  module.def("default_max_elements", &dr_default_max_elements, py::arg("payload_bytes"));
  module.attr("probe_length") = DR_PROBE_LENGTH;
  module.def("stages", &stages);
  module.def("simd_level", &dr_simd_level);
  module.attr("abi_version") = DR_ABI_VERSION;
}
