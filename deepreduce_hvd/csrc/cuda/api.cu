// The C ABI: converts failures to a status and a message.
#include <cstdio>
#include <new>
#include <vector>

#include "container/payload.h"
#include "cuda/graph.cuh"
#include "cuda/several.cuh"

// A graph, and what its launches need in the workspace.
struct dr_cuda_graph {
  dr_cuda_graph(deepreduce::cuda::Several& work, uint64_t count, void* workspace)
      : count(count),
        workspace(workspace),
        arguments_(work.merge(workspace)),
        arguments_at_(static_cast<uint8_t*>(workspace) + work.arguments_start()),
        graph_(work.branches(), [&](uint32_t branch, cudaStream_t stream) {
          work.start(branch, workspace, stream);
        }) {}

  void launch(cudaStream_t stream) const {
    // in the order of the stream: earlier work may still use this memory
    deepreduce::cuda::copy_from_host(arguments_at_, arguments_, stream);
    arguments_.clear();
    graph_.launch(stream);
  }

  const uint64_t count;
  void* const workspace;

 private:
  mutable std::vector<uint8_t> arguments_;  // empty after the first launch
  uint8_t* const arguments_at_;
  const deepreduce::cuda::Graph graph_;
};

namespace deepreduce {
namespace cuda {
namespace {

constexpr uint32_t kBranches = 8;  // of a graph; a device runs more kernels at a time

template <class Work>
int guarded(dr_context* context, Work work) {
  context->message[0] = '\0';
  // an earlier error of other code in this thread is not a failure of this call
  static_cast<void>(cudaGetLastError());
  try {
    work();
    return DR_OK;
  } catch (const Failure& failure) {
    std::snprintf(context->message, sizeof(context->message), "%s", failure.message);
    return failure.status;
  } catch (const std::bad_alloc&) {  // the lists of launches are in the host's memory
    std::snprintf(context->message, sizeof(context->message), "no memory");
    return DR_OUT_OF_MEMORY;
  }
}

void expect_workspace(const Several& work, size_t bytes) {
  if (bytes < work.workspace_bytes())
    invalid_argument("workspace: expected at least %llu bytes, got %llu",
                     static_cast<unsigned long long>(work.workspace_bytes()),
                     static_cast<unsigned long long>(bytes));
}

// Starts the work on one stream.
void start(Several& work, void* workspace, cudaStream_t stream) {
  copy_from_host(static_cast<uint8_t*>(workspace) + work.arguments_start(), work.merge(workspace),
                 stream);
  for (uint32_t branch = 0; branch < work.branches(); ++branch)
    work.start(branch, workspace, stream);
}

void return_sizes(const Encodings& work, dr_cuda_encoding* encodings, uint64_t count,
                  size_t* workspace_bytes) {
  for (uint64_t i = 0; i < count; ++i) encodings[i].payload_capacity = work.payload_capacity(i);
  *workspace_bytes = static_cast<size_t>(work.workspace_bytes());
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
    Encodings work(codecs, encodings, count, 1);
    if (workspace == nullptr) return return_sizes(work, encodings, count, workspace_bytes);
    expect_workspace(work, *workspace_bytes);
    work.check_rooms();
    const auto stream = static_cast<cudaStream_t>(cuda_stream);
    Encodings::set_table(encodings, count, workspace, stream);
    start(work, workspace, stream);
  });
}

int dr_cuda_record_encodings(dr_context* context, const dr_codec* codecs,
                             dr_cuda_encoding* encodings, uint64_t count, void* workspace,
                             size_t* workspace_bytes, dr_cuda_graph** graph) {
  return guarded(context, [&] {
    Encodings work(codecs, encodings, count, kBranches);
    if (workspace == nullptr) return return_sizes(work, encodings, count, workspace_bytes);
    expect_workspace(work, *workspace_bytes);
    work.check_rooms();
    *graph = new dr_cuda_graph(work, count, workspace);
  });
}

int dr_cuda_launch_encodings(dr_context* context, const dr_cuda_graph* graph,
                             const dr_cuda_encoding* encodings, void* cuda_stream) {
  return guarded(context, [&] {
    const auto stream = static_cast<cudaStream_t>(cuda_stream);
    Encodings::set_table(encodings, graph->count, graph->workspace, stream);
    graph->launch(stream);
  });
}

int dr_cuda_repeats(const dr_codec* codec) { return codec->sparsifier.id != kRandomK; }

int dr_cuda_decode_sum(dr_context* context, const dr_codec* codec, const dr_cuda_sum* sums,
                       uint64_t count, void* workspace, size_t* workspace_bytes,
                       void* cuda_stream) {
  return guarded(context, [&] {
    Sums work(*codec, sums, count, 1);
    if (workspace == nullptr) {
      *workspace_bytes = static_cast<size_t>(work.workspace_bytes());
      return;
    }
    expect_workspace(work, *workspace_bytes);
    const auto stream = static_cast<cudaStream_t>(cuda_stream);
    Sums::set_table(*codec, sums, count, workspace, stream);
    start(work, workspace, stream);
  });
}

int dr_cuda_record_sums(dr_context* context, const dr_codec* codec, const dr_cuda_sum* sums,
                        uint64_t count, void* workspace, size_t* workspace_bytes,
                        dr_cuda_graph** graph) {
  return guarded(context, [&] {
    Sums work(*codec, sums, count, kBranches);
    if (workspace == nullptr) {
      *workspace_bytes = static_cast<size_t>(work.workspace_bytes());
      return;
    }
    expect_workspace(work, *workspace_bytes);
    *graph = new dr_cuda_graph(work, count, workspace);
  });
}

int dr_cuda_launch_sums(dr_context* context, const dr_cuda_graph* graph, const dr_codec* codec,
                        const dr_cuda_sum* sums, void* cuda_stream) {
  return guarded(context, [&] {
    const auto stream = static_cast<cudaStream_t>(cuda_stream);
    Sums::set_table(*codec, sums, graph->count, graph->workspace, stream);
    graph->launch(stream);
  });
}

void dr_cuda_free(dr_cuda_graph* graph) { delete graph; }

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
