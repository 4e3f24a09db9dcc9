// The C ABI: converts failures to a status and a message.
#include <cstdio>

#include "container/payload.h"
#include "cuda/encode.cuh"
#include "cuda/graph.cuh"

struct dr_cuda_graph : deepreduce::cuda::Graph {
  template <class Work>
  dr_cuda_graph(uint64_t count, void* workspace, uint32_t branches, Work work)
      : Graph(branches, work), count(count), workspace(workspace) {}

  const uint64_t count;
  void* const workspace;
};

namespace deepreduce {
namespace cuda {
namespace {

constexpr uint32_t kBranches = 8;  // of a graph; a device runs more kernels at a time

template <class Work>
int guarded(dr_context* context, Work work) {
  context->message[0] = '\0';
  try {
    work();
    return DR_OK;
  } catch (const Failure& failure) {
    std::snprintf(context->message, sizeof(context->message), "%s", failure.message);
    return failure.status;
  }
}

// An earlier error of other code in this thread is not a failure of this call.
void forget_earlier_error() { static_cast<void>(cudaGetLastError()); }

void return_sizes(const Encodings& work, dr_cuda_encoding* encodings, uint64_t count,
                  size_t* workspace_bytes) {
  for (uint64_t i = 0; i < count; ++i) encodings[i].payload_capacity = work.payload_capacity(i);
  *workspace_bytes = static_cast<size_t>(work.workspace_bytes());
}

void expect_workspace(const Encodings& work, size_t bytes) {
  if (bytes < work.workspace_bytes())
    invalid_argument("workspace: expected at least %llu bytes, got %llu",
                     static_cast<unsigned long long>(work.workspace_bytes()),
                     static_cast<unsigned long long>(bytes));
}

// Runs work(device). Without a workspace, returns the required size instead. The size is never 0,
// so that the caller's workspace is not null.
template <class Work>
void with_device(void* workspace, size_t* workspace_bytes, void* stream, dr_cuda_result* result,
                 Work work) {
  forget_earlier_error();
  if (workspace == nullptr) {
    Device device;
    work(device);
    *workspace_bytes = static_cast<size_t>(std::max(device.most_used(), kAlignment));
    return;
  }
  Device device(workspace, *workspace_bytes, static_cast<cudaStream_t>(stream), result);
  work(device);
}

const char* text_of(int32_t code) {
  switch (static_cast<Refused>(code)) {
#define DR_CASE(name, status, text) \
  case Refused::name:               \
    return text;
    DR_CUDA_FAILURES(DR_CASE)
#undef DR_CASE
    default:
      return "unknown failure: expected %llu, got %llu";
  }
}

}  // namespace
}  // namespace cuda
}  // namespace deepreduce

using namespace deepreduce;
using namespace deepreduce::cuda;

extern "C" {

int dr_cuda_encode(dr_context* context, const dr_codec* codecs, dr_cuda_encoding* encodings,
                   uint64_t count, void* workspace, size_t* workspace_bytes, void* cuda_stream) {
  return guarded(context, [&] {
    forget_earlier_error();
    const Encodings work(codecs, encodings, count, 1);
    if (workspace == nullptr) {
      return_sizes(work, encodings, count, workspace_bytes);
    } else {
      expect_workspace(work, *workspace_bytes);
      const auto stream = static_cast<cudaStream_t>(cuda_stream);
      Encodings::set_inputs(encodings, count, workspace, stream);
      work.encode(0, workspace, stream);
    }
  });
}

int dr_cuda_record(dr_context* context, const dr_codec* codecs, dr_cuda_encoding* encodings,
                   uint64_t count, void* workspace, size_t* workspace_bytes,
                   dr_cuda_graph** graph) {
  return guarded(context, [&] {
    forget_earlier_error();
    const Encodings work(codecs, encodings, count, kBranches);
    if (workspace == nullptr) {
      return_sizes(work, encodings, count, workspace_bytes);
    } else {
      expect_workspace(work, *workspace_bytes);
      *graph = new dr_cuda_graph(
          count, workspace, work.branches(),
          [&](uint32_t branch, cudaStream_t stream) { work.encode(branch, workspace, stream); });
    }
  });
}

int dr_cuda_launch(dr_context* context, const dr_cuda_graph* graph,
                   const dr_cuda_encoding* encodings, void* cuda_stream) {
  return guarded(context, [&] {
    const auto stream = static_cast<cudaStream_t>(cuda_stream);
    Encodings::set_inputs(encodings, graph->count, graph->workspace, stream);
    graph->launch(stream);
  });
}

void dr_cuda_free(dr_cuda_graph* graph) { delete graph; }

int dr_cuda_repeats(const dr_codec* codec) { return codec->sparsifier.id != kRandomK; }

int dr_cuda_decode_sum(dr_context* context, const dr_codec* codec, const uint8_t* const* payloads,
                       const uint64_t* sizes, uint64_t payload_count, float* out, uint64_t d,
                       float scale, dr_cuda_result* result, void* workspace,
                       size_t* workspace_bytes, void* cuda_stream) {
  return guarded(context, [&] {
    if (d > kMaxElements)
      invalid_argument("out: expected at most %llu elements, got %llu",
                       static_cast<unsigned long long>(kMaxElements),
                       static_cast<unsigned long long>(d));
    with_device(workspace, workspace_bytes, cuda_stream, result, [&](Device& device) {
      device.zero(result, sizeof(dr_cuda_result));
      for (uint64_t p = 0; p < payload_count; ++p) {
        const uint64_t mark = device.mark();
        decode_sum(device, *codec, p, payloads == nullptr ? nullptr : payloads[p], sizes[p], out, d,
                   scale);
        device.release(mark);
      }
    });
  });
}

int dr_cuda_supports(const dr_codec* codec) {
  return find_device_index_codec(codec->index.id) != nullptr &&
         find_device_value_codec(codec->value.id) != nullptr;
}

int dr_cuda_message(dr_context* context, const dr_cuda_result* result) {
  context->message[0] = '\0';
  if (result->status == DR_OK) return DR_OK;
  char text[256];
  std::snprintf(text, sizeof(text), text_of(result->code),
                static_cast<unsigned long long>(result->expected),
                static_cast<unsigned long long>(result->got));
  std::snprintf(context->message, sizeof(context->message), "%s", text);
  return result->status;
}

}  // extern "C"
