// The host's greedy choice of FitPoly's cuts: one thread a side keeps the heap, its block looks up what the tree does not know.
#include "fit_tree.cuh"

namespace deepreduce {
namespace cuda {
namespace {

// The segments at hand, the next one to be split on top.
struct Heap {
  double* distances;
  uint32_t* starts;
  uint32_t* nodes;
  uint32_t size;

  __device__ bool later(uint32_t i, double distance, uint32_t start) const {
    return distances[i] != distance ? distances[i] < distance : starts[i] > start;
  }
  __device__ void set(uint32_t i, double distance, uint32_t start, uint32_t node) {
    distances[i] = distance;
    starts[i] = start;
    nodes[i] = node;
  }
  __device__ void push(double distance, uint32_t start, uint32_t node) {
    uint32_t i = size++;
    for (; i > 0 && later((i - 1) / 2, distance, start); i = (i - 1) / 2) set(i, distances[(i - 1) / 2], starts[(i - 1) / 2], nodes[(i - 1) / 2]);
    set(i, distance, start, node);
  }
  // In the place of the one on top.
  __device__ void replace(double distance, uint32_t start, uint32_t node) {
    uint32_t i = 0;
    for (uint32_t child = 1; child < size; child = 2 * i + 1) {
      if (child + 1 < size && later(child, distances[child + 1], starts[child + 1])) ++child;
      if (later(child, distance, start)) break;
      set(i, distances[child], starts[child], nodes[child]);
      i = child;
    }
    set(i, distance, start, node);
  }
};

// The host's choices, as far as the nodes are known; kNone at the end, or the first of two nodes to look up.
__device__ uint32_t split_on(Heap& heap, Node* nodes, uint32_t& used, uint32_t wanted) {
  while (heap.size < wanted && heap.distances[0] > 0.0) {
    const uint32_t top = heap.nodes[0];
    if (nodes[top].children == 0) {
      make_children(nodes, top, used);
      used += 2;
      return nodes[top].children;
    }
    const uint32_t left = nodes[top].children, right = left + 1;
    heap.replace(as_double(nodes[left].distance_bits), nodes[left].start, left);
    heap.push(as_double(nodes[right].distance_bits), nodes[right].start, right);
  }
  return kNone;
}

// A block a side.
__global__ void choose(PolyHead* head, const float* magnitudes, Tree tree, uint32_t* starts, uint32_t most) {
  __shared__ double distances[kMaxSegments];
  __shared__ uint32_t heap_starts[kMaxSegments];
  __shared__ uint32_t heap_nodes[kMaxSegments];
  __shared__ double best_distances[kThreads / 32];
  __shared__ uint32_t best_positions[kThreads / 32];
  __shared__ uint32_t asked, segments;
  PolySide& side = head->side[blockIdx.x];
  const float* y = magnitudes + side.start;
  Node* nodes = tree.nodes + uint64_t{blockIdx.x} * tree.most_nodes;
  starts += blockIdx.x * most;
  const uint32_t tid = threadIdx.x, wanted = side.wanted;
  if (side.count == 0) {
    if (tid == 0) side.segments = 0;
    return;
  }
  const Search search = tree.searches[blockIdx.x];
  combine(nodes, tree.tiles + uint64_t{blockIdx.x} * tree.most_tiles, search);
  Heap heap{distances, heap_starts, heap_nodes, 0};
  uint32_t used = search.nodes;
  if (tid == 0) heap.push(as_double(nodes[0].distance_bits), 0, 0);
  for (;;) {
    if (tid == 0) {
      asked = split_on(heap, nodes, used, wanted);
      segments = heap.size;
    }
    __syncthreads();
    const uint32_t first = asked;
    if (first == kNone) break;
    for (uint32_t v = first; v < first + 2; ++v) {
      const Node node = nodes[v];
      const uint32_t points = candidates(node.length, tree.fewest);
      const Best best = warp_best(farthest(y + node.start, node.length, uint64_t{tree.fewest} + tid, kThreads, uint64_t{tree.fewest} + points));
      if (tid % 32 == 0) {
        best_distances[tid / 32] = best.distance;
        best_positions[tid / 32] = best.position;
      }
      __syncthreads();
      if (tid == 0 && points != 0) {
        Best all = best;
        for (uint32_t warp = 1; warp < kThreads / 32; ++warp) all = better(all, {best_distances[warp], best_positions[warp]});
        nodes[v].distance_bits = as_bits(all.distance);
        nodes[v].position = all.position;
      }
      __syncthreads();
    }
  }
  for (uint32_t a = tid; a < segments; a += kThreads) {
    uint32_t before = 0;
    for (uint32_t b = 0; b < segments; ++b) before += heap_starts[b] < heap_starts[a];
    starts[before] = heap_starts[a];
  }
  if (tid == 0) side.segments = segments;
}

}  // namespace

void choose_cuts(Device& device, const float* magnitudes, const PolyArrays& arrays, const Tree& tree) {
  launch(device, choose, 2, kThreads, 0, arrays.head, magnitudes, tree, arrays.starts, arrays.most);
}

}  // namespace cuda
}  // namespace deepreduce
