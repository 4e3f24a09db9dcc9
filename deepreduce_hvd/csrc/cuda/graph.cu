#include "cuda/graph.cuh"

#include <vector>

namespace deepreduce {
namespace cuda {
namespace {

void expect(cudaError_t error, const char* what) { throw_if_failed(error, what); }

// The streams and events of one recording.
class Recording {
 public:
  explicit Recording(uint32_t branches) : streams_(branches), events_(branches) {}

  void begin() {
    for (cudaStream_t& stream : streams_)
      expect(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "creating a stream");
    for (cudaEvent_t& event : events_)
      expect(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "creating an event");
    // other threads may allocate memory meanwhile
    expect(cudaStreamBeginCapture(streams_[0], cudaStreamCaptureModeRelaxed), "recording");
    active_ = true;
    expect(cudaEventRecord(events_[0], streams_[0]), "recording");
    for (size_t branch = 1; branch < streams_.size(); ++branch)
      expect(cudaStreamWaitEvent(streams_[branch], events_[0], 0), "recording");
  }

  cudaStream_t stream(uint32_t branch) const { return streams_[branch]; }

  cudaGraph_t end() {
    for (size_t branch = 1; branch < streams_.size(); ++branch) {
      expect(cudaEventRecord(events_[branch], streams_[branch]), "recording");
      expect(cudaStreamWaitEvent(streams_[0], events_[branch], 0), "recording");
    }
    cudaGraph_t graph = nullptr;
    active_ = false;
    expect(cudaStreamEndCapture(streams_[0], &graph), "recording");
    return graph;
  }

  ~Recording() {
    cudaGraph_t graph = nullptr;
    if (active_ && cudaStreamEndCapture(streams_[0], &graph) == cudaSuccess && graph != nullptr)
      cudaGraphDestroy(graph);
    for (const cudaEvent_t event : events_)
      if (event != nullptr) cudaEventDestroy(event);
    for (const cudaStream_t stream : streams_)
      if (stream != nullptr) cudaStreamDestroy(stream);
    static_cast<void>(cudaGetLastError());  // what failed has been thrown
  }

 private:
  std::vector<cudaStream_t> streams_;
  std::vector<cudaEvent_t> events_;
  bool active_ = false;
};

}  // namespace

Graph::Graph(uint32_t branches, const std::function<void(uint32_t, cudaStream_t)>& work) {
  Recording recording(branches);
  recording.begin();
  for (uint32_t branch = 0; branch < branches; ++branch) work(branch, recording.stream(branch));
  const cudaGraph_t graph = recording.end();
  const cudaError_t error = cudaGraphInstantiate(&instance_, graph, 0);
  cudaGraphDestroy(graph);
  expect(error, "instantiating a graph");
}

Graph::~Graph() { cudaGraphExecDestroy(instance_); }

void Graph::launch(cudaStream_t stream) const {
  expect(cudaGraphLaunch(instance_, stream), "launching a graph");
}

}  // namespace cuda
}  // namespace deepreduce
