// DeepreduceEncodeSlices and DeepreduceDecodeSlices: gradients of embeddings (tf.IndexedSlices),
// without dense tensors.
#include <algorithm>
#include <cmath>
#include <limits>
#include <new>
#include <numeric>

#include "messages.h"
#include "slot.h"
#include "support/floating_point.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace deepreduce_tf {
namespace {

using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("DeepreduceEncodeSlices")
    .Input("values: T")
    .Input("indices: int64")
    .Input("codec: double")
    .Input("position: int64")
    .Input("memory: memories * resource")
    .Input("record: records * resource")
    .Output("payload: uint8")
    .Attr("T: {float, half, bfloat16, double}")
    .Attr("memories: int >= 0")
    .Attr("records: int >= 0")
    .Attr("rows: int >= 0")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* context) {
      tensorflow::shape_inference::ShapeHandle values, indices;
      TF_RETURN_IF_ERROR(context->WithRankAtLeast(context->input(0), 1, &values));
      TF_RETURN_IF_ERROR(context->WithRank(context->input(1), 1, &indices));
      context->set_output(0, context->Vector(InferenceContext::kUnknownDim));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Encodes slices (n, ...) of a variable of `rows` rows, numbered by `indices` (n,), as one payload of all their elements but zeros.

Slices of the same row are added up in their order. The residual, when there is one, joins those rows, and keeps what the payload lacks of
them; work is in proportion to the slices. codec, position and record as for DeepreduceEncode; the sparsifier plays no part.
)doc");

class EncodeSlicesOp : public tensorflow::OpKernel {
 public:
  explicit EncodeSlicesOp(tensorflow::OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("memories", &memories_));
    OP_REQUIRES_OK(construction, construction->GetAttr("records", &records_));
    OP_REQUIRES_OK(construction, construction->GetAttr("rows", &rows_));
    OP_REQUIRES_OK(construction, construction->GetAttr("T", &type_));
    OP_REQUIRES_OK(construction, Slot::check(memories_, records_));
    OP_REQUIRES(
        construction, memories_ <= 1,
        absl::InvalidArgumentError(absl::StrCat(
            "DeepreduceEncodeSlices: expected at most 1 memory, a residual, got ", memories_)));
  }

  void Compute(OpKernelContext* kernel) override {
    const Stopwatch watch;
    const deepreduce::DefaultFloatingPoint guard;  // for the sums of slices, as in the core
    const Tensor& values = kernel->input(0);
    const Tensor& indices = kernel->input(1);
    OP_REQUIRES(
        kernel,
        values.dims() >= 1 && indices.dims() == 1 && values.dim_size(0) == indices.dim_size(0),
        absl::InvalidArgumentError(
            absl::StrCat("slices: expected values of shape [n, ...] and indices of shape [n], got ",
                         values.shape().DebugString(), " and ", indices.shape().DebugString())));
    int64_t slice_size = 1;
    for (int i = 1; i < values.dims(); ++i) slice_size *= values.dim_size(i);
    Slot slot;
    OP_REQUIRES_OK(kernel, slot.open(kernel, 2, memories_, records_, rows_ * slice_size));
    float* residual = slot.memory[0];
    Call call(kernel);
    int status = DR_OK;
    const int64_t* row = indices.flat<int64_t>().data();
    for (int64_t i = 0; i < indices.NumElements() && status == DR_OK; ++i)
      if (row[i] < 0 || row[i] >= rows_)
        status =
            failed(call, DR_INVALID_ARGUMENT,
                   absl::StrCat("slices: expected indices of 0 to ", rows_ - 1, ", got ", row[i]));

    std::vector<uint32_t> elements, settled;
    std::vector<float> sums;
    if (status == DR_OK) {
      try {
        merge_values(values, row, slice_size, residual, &elements, &sums, &settled);
      } catch (const std::bad_alloc&) {  // an exception would end the process
        status = failed(call, DR_OUT_OF_MEMORY, "no memory for the slices");
      }
    }
    if (status == DR_OK) {
      dr_sparse_encoding encoding{};
      encoding.indices = elements.data();
      encoding.values = sums.data();
      encoding.count = elements.size();
      encoding.d = static_cast<uint64_t>(rows_ * slice_size);
      encoding.dtype = dtype_code(type_);
      encoding.write_back = residual != nullptr;
      encoding.position = slot.position;
      status = dr_encode_sparse(&call.context, &slot.codec, &encoding);
      dr_message sent{};
      if (status == DR_OK)
        status = dr_read_message(&call.context, call.result->flat<uint8_t>().data(),
                                 call.result->NumElements(), &sent);
      if (status == DR_OK && residual != nullptr && !sent.non_finite) {
        for (const uint32_t element : settled) residual[element] = 0.0f;
        for (size_t i = 0; i < elements.size(); ++i) residual[elements[i]] = sums[i];
        for (uint64_t i = 0; i < encoding.added_count; ++i)
          residual[encoding.added_indices[i]] += encoding.added_values[i];
      }
    }
    OP_REQUIRES_OK(kernel, slot.close(call, status, slot.threshold(), watch));
  }

 private:
  static int failed(Call& call, int status, const std::string& message) {
    std::snprintf(call.context.message, sizeof(call.context.message), "%s", message.c_str());
    return status;
  }

  void merge_values(const Tensor& values, const int64_t* row, int64_t slice_size,
                    const float* residual, std::vector<uint32_t>* elements,
                    std::vector<float>* sums, std::vector<uint32_t>* settled) const {
    switch (type_) {
      case tensorflow::DT_HALF:
        return merge<Eigen::half>(values, row, slice_size, residual, elements, sums, settled);
      case tensorflow::DT_BFLOAT16:
        return merge<tensorflow::bfloat16>(values, row, slice_size, residual, elements, sums,
                                           settled);
      case tensorflow::DT_DOUBLE:
        return merge<double>(values, row, slice_size, residual, elements, sums, settled);
      default:
        return merge<float>(values, row, slice_size, residual, elements, sums, settled);
    }
  }

  // Finds the nonzero elements of the rows' sums, in ascending order. `settled`: elements where the
  // slices and the residual cancel, so nothing is sent or kept.
  template <class T>
  static void merge(const Tensor& values, const int64_t* row, int64_t slice_size,
                    const float* residual, std::vector<uint32_t>* elements,
                    std::vector<float>* sums, std::vector<uint32_t>* settled) {
    const T* data = values.flat<T>().data();
    const int64_t n = values.dim_size(0);
    std::vector<int64_t> order(static_cast<size_t>(n));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [row](int64_t a, int64_t b) { return row[a] < row[b]; });
    std::vector<float> sum(static_cast<size_t>(slice_size));
    elements->reserve(static_cast<size_t>(n * slice_size));
    sums->reserve(static_cast<size_t>(n * slice_size));
    for (int64_t first = 0, last; first < n; first = last) {
      const int64_t start = row[order[first]] * slice_size;
      for (int64_t j = 0; j < slice_size; ++j)
        sum[j] = residual == nullptr ? 0.0f : residual[start + j];
      for (last = first; last < n && row[order[last]] == row[order[first]]; ++last)
        for (int64_t j = 0; j < slice_size; ++j)
          sum[j] += static_cast<float>(data[order[last] * slice_size + j]);
      for (int64_t j = 0; j < slice_size; ++j) {
        if (sum[j] == 0.0f) {
          if (residual != nullptr && residual[start + j] != 0.0f)
            settled->push_back(static_cast<uint32_t>(start + j));
          continue;
        }
        elements->push_back(static_cast<uint32_t>(start + j));
        sums->push_back(sum[j]);
      }
    }
  }

  int memories_, records_;
  int64_t rows_;
  DataType type_;
};

REGISTER_KERNEL_BUILDER(Name("DeepreduceEncodeSlices").Device(tensorflow::DEVICE_CPU),
                        EncodeSlicesOp);

REGISTER_OP("DeepreduceDecodeSlices")
    .Input("messages: uint8")
    .Input("scale: double")
    .Input("ranks: int32")
    .Input("seconds: resource")
    .Output("values: T")
    .Output("indices: int64")
    .Attr("T: {float, half, bfloat16, double}")
    .Attr("shape: shape")
    .Attr("variable: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* context) {
      tensorflow::PartialTensorShape partial;
      TF_RETURN_IF_ERROR(context->GetAttr("shape", &partial));
      tensorflow::shape_inference::ShapeHandle shape;
      TF_RETURN_IF_ERROR(context->MakeShapeFromPartialTensorShape(partial, &shape));
      TF_RETURN_IF_ERROR(context->ReplaceDim(shape, 0, context->UnknownDim(), &shape));
      context->set_output(0, shape);
      context->set_output(1, context->Vector(InferenceContext::kUnknownDim));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Adds up the payloads, one of each of `ranks` ranks, of one variable of `shape` as slices: distinct rows in ascending order. A payload of NaN or Inf
makes one slice, all NaN.
)doc");

class DecodeSlicesOp : public tensorflow::OpKernel {
 public:
  explicit DecodeSlicesOp(tensorflow::OpKernelConstruction* construction) : OpKernel(construction) {
    tensorflow::PartialTensorShape shape;
    OP_REQUIRES_OK(construction, construction->GetAttr("shape", &shape));
    OP_REQUIRES(construction,
                shape.AsTensorShape(&shape_) && shape_.dims() >= 1 && shape_.num_elements() > 0,
                absl::InvalidArgumentError(absl::StrCat(
                    "shape: expected a variable of at least one element and one dimension, got ",
                    shape.DebugString())));
    OP_REQUIRES_OK(construction, construction->GetAttr("variable", &variable_));
    OP_REQUIRES_OK(construction, construction->GetAttr("T", &type_));
  }

  void Compute(OpKernelContext* kernel) override {
    try {
      decode(kernel);
    } catch (const std::bad_alloc&) {  // an exception would end the process
      kernel->SetStatus(absl::ResourceExhaustedError(named(variable_, "no memory for the slices")));
    }
  }

 private:
  void decode(OpKernelContext* kernel) const {
    const Stopwatch watch;
    Call call;
    OneVariablesPayloads payloads;
    OP_REQUIRES_OK(kernel, payloads.expect(kernel->input(2)));
    OP_REQUIRES_OK(kernel, payloads.split(call, kernel->input(0), variable_));
    std::vector<uint32_t> elements;
    std::vector<float> sums;
    if (payloads.non_finite) {
      elements.resize(static_cast<size_t>(shape_.num_elements() / shape_.dim_size(0)));
      std::iota(elements.begin(), elements.end(), 0);
      sums.assign(elements.size(), std::numeric_limits<float>::quiet_NaN());
    } else {
      const int status =
          dr_decode_sparse(&call.context, payloads.data.data(), payloads.sizes.data(),
                           payloads.data.size(), static_cast<uint64_t>(shape_.num_elements()),
                           static_cast<float>(kernel->input(1).scalar<double>()()));
      OP_REQUIRES_OK(kernel, status_of(status, named(variable_, call.context.message)));
      const size_t count = call.own_result.size() / 8;
      elements.resize(count);
      sums.resize(count);
      if (count != 0) {
        std::memcpy(elements.data(), call.own_result.data(), 4 * count);
        std::memcpy(sums.data(), call.own_result.data() + 4 * count, 4 * count);
      }
    }
    switch (type_) {
      case tensorflow::DT_HALF:
        write<Eigen::half>(kernel, elements, sums);
        break;
      case tensorflow::DT_BFLOAT16:
        write<tensorflow::bfloat16>(kernel, elements, sums);
        break;
      case tensorflow::DT_DOUBLE:
        write<double>(kernel, elements, sums);
        break;
      default:
        write<float>(kernel, elements, sums);
        break;
    }
    if (!kernel->status().ok()) return;
    LockedVariable record;
    double* seconds = nullptr;
    OP_REQUIRES_OK(kernel, record.lock(kernel, tensorflow::HandleFromInput(kernel, 3)));
    OP_REQUIRES_OK(kernel, record.writable(kernel, "seconds", 2, &seconds));
    seconds[1] += watch.seconds();
  }

  template <class T>
  void write(OpKernelContext* kernel, const std::vector<uint32_t>& elements,
             const std::vector<float>& sums) const {
    const int64_t slice_size = shape_.num_elements() / shape_.dim_size(0);
    std::vector<int64_t> rows;
    for (const uint32_t element : elements)
      if (rows.empty() || rows.back() != element / slice_size) rows.push_back(element / slice_size);
    tensorflow::TensorShape shape = shape_;
    shape.set_dim(0, static_cast<int64_t>(rows.size()));
    Tensor *values = nullptr, *indices = nullptr;
    OP_REQUIRES_OK(kernel, kernel->allocate_output(0, shape, &values));
    OP_REQUIRES_OK(
        kernel, kernel->allocate_output(1, tensorflow::TensorShape({shape.dim_size(0)}), &indices));
    std::copy(rows.begin(), rows.end(), indices->flat<int64_t>().data());
    T* out = values->flat<T>().data();
    std::fill_n(out, values->NumElements(), static_cast<T>(0.0f));
    size_t at = 0;
    for (size_t slice = 0; slice < rows.size(); ++slice)
      for (; at < elements.size() && elements[at] / slice_size == rows[slice]; ++at)
        out[static_cast<int64_t>(slice) * slice_size + elements[at] % slice_size] =
            static_cast<T>(sums[at]);
  }

  tensorflow::TensorShape shape_;
  std::string variable_;
  DataType type_;
};

REGISTER_KERNEL_BUILDER(Name("DeepreduceDecodeSlices").Device(tensorflow::DEVICE_CPU),
                        DecodeSlicesOp);

}  // namespace
}  // namespace deepreduce_tf
