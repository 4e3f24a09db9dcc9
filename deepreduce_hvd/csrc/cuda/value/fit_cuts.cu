// The host's greedy choice of the cuts of FitPoly: it repeatedly splits the segment with the point
// farthest from its chord, until there are as many segments as wanted. Here, nodes are split in the
// order of their bottlenecks. All nodes above a limit, which at most the wanted number of nodes
// exceed, are split at once. The rest follow one after another. They are few if the tree contains
// what is needed. The block computes what the tree does not contain.
#include "cuda/value/fit_tree.cuh"

namespace deepreduce {
namespace cuda {
namespace {

constexpr unsigned kFirstShift = 20, kLimitShift = kFirstShift - kBinBits;  // of the limit

// The current segments, one per thread.
struct Leaves {
  double distances[kMaxSegments];
  uint32_t starts[kMaxSegments];
  uint32_t nodes[kMaxSegments];

  __device__ void set(uint32_t at, const Node* of, uint32_t node) {
    distances[at] = as_double(of[node].distance_bits);
    starts[at] = of[node].start;
    nodes[at] = node;
  }
};
static_assert(kMaxSegments <= kTreeThreads, "a thread a segment");

struct Warps {
  double distances[kTreeThreads / 32];
  uint32_t positions[kTreeThreads / 32];
};

// Returns the best of all threads. All threads must call it. It can be called again at once.
__device__ Best block_best(Best mine, Warps& warps) {
  const Best of_warp = warp_best(mine);
  if (threadIdx.x % 32 == 0) {
    warps.distances[threadIdx.x / 32] = of_warp.distance;
    warps.positions[threadIdx.x / 32] = of_warp.position;
  }
  __syncthreads();
  const Best best =
      warp_best({warps.distances[threadIdx.x % 32], warps.positions[threadIdx.x % 32]});
  __syncthreads();
  return best;
}
static_assert(kTreeThreads == 32 * 32, "a lane a warp");

// Returns a limit for the upper bits of a bottleneck. A node above it is among the first `splits`
// nodes to be split, and all nodes before it have known children.
__device__ uint32_t limit_of(const Node* nodes, uint32_t count, uint32_t splits, RankBins& ranks,
                             uint32_t* unknown) {
  uint32_t rank = splits + 1;
  const uint32_t upper = bin_of_rank(nodes, count, 0, kFirstShift, rank, ranks);
  const uint32_t lower = bin_of_rank(nodes, count, upper << kFirstShift, kLimitShift, rank, ranks);
  if (threadIdx.x == 0) *unknown = upper << kBinBits | lower;
  __syncthreads();
  for (uint32_t v = threadIdx.x; v < count; v += kTreeThreads)
    if (can_be_split(nodes[v])) atomicMax(unknown, float_bits(nodes[v].bottleneck) >> kLimitShift);
  __syncthreads();
  return *unknown;
}

// Finds the farthest point of a node for which no round has found it.
__device__ void look_up(Node& node, const float* y, uint32_t fewest, Warps& warps) {
  const uint32_t points = candidates(node.length, fewest);
  if (points == 0) return;
  const Best best = block_best(farthest(y + node.start, node.length, uint64_t{fewest} + threadIdx.x,
                                        kTreeThreads, uint64_t{fewest} + points),
                               warps);
  if (threadIdx.x != 0) return;
  node.distance_bits = as_bits(best.distance);
  node.position = best.position;
}

// One block per side.
__device__ void choose(PolyHead* head, const float* magnitudes, Tree tree, uint32_t* starts,
                       uint32_t most) {
  __shared__ Leaves leaves;
  __shared__ Warps warps;
  __shared__ RankBins ranks;
  __shared__ uint32_t word, split, children;
  PolySide& side = head->side[blockIdx.x];
  const uint32_t tid = threadIdx.x, wanted = side.wanted;
  if (side.count == 0) {
    if (tid == 0) side.segments = 0;
    return;
  }
  const float* y = magnitudes + side.start;
  Node* nodes = tree.nodes + uint64_t{blockIdx.x} * tree.most_nodes;
  const Search search = tree.searches[blockIdx.x];
  combine(nodes, tree.tiles + uint64_t{blockIdx.x} * tree.most_tiles, search);

  const uint32_t limit = limit_of(nodes, search.nodes, wanted - 1, ranks, &word);
  const auto is_split = [&](uint32_t v) {
    return float_bits(nodes[v].bottleneck) >> kLimitShift > limit;
  };
  __syncthreads();
  if (tid == 0) word = 0;
  __syncthreads();
  if (tid == 0 && !is_split(0)) leaves.set(atomicAdd(&word, 1u), nodes, 0);
  for (uint32_t v = tid; v < search.nodes; v += kTreeThreads) {
    if (!is_split(v)) continue;
    for (uint32_t child = nodes[v].children; child < nodes[v].children + 2; ++child)
      if (!is_split(child)) leaves.set(atomicAdd(&word, 1u), nodes, child);
  }
  __syncthreads();

  uint32_t used = search.nodes, size = word;
  for (; size < wanted; ++size) {
    const Best widest = block_best(
        tid < size ? Best{leaves.distances[tid], leaves.starts[tid]} : Best{-1.0, kNone}, warps);
    if (!(widest.distance > 0.0)) break;
    if (tid < size && leaves.starts[tid] == widest.position) {
      const uint32_t node = leaves.nodes[tid];
      if (nodes[node].children == 0) make_children(nodes, node, used);
      split = tid;
      children = nodes[node].children;
    }
    __syncthreads();
    if (children == used) {
      for (uint32_t v = used; v < used + 2; ++v) look_up(nodes[v], y, tree.fewest, warps);
      used += 2;
    }
    if (tid == 0) {
      leaves.set(split, nodes, children);
      leaves.set(size, nodes, children + 1);
    }
    __syncthreads();
  }
  if (tid < size) {
    uint32_t before = 0;
    for (uint32_t b = 0; b < size; ++b) before += leaves.starts[b] < leaves.starts[tid];
    starts[blockIdx.x * most + before] = leaves.starts[tid];
  }
  if (tid == 0) side.segments = size;
}

}  // namespace

void choose_cuts(Device& device, const float* magnitudes, const PolyArrays& arrays,
                 const Tree& tree) {
  launch<choose, kTreeThreads>(device, 2, kTreeThreads, 0, arrays.head, magnitudes, tree,
                               arrays.starts, arrays.most);
}

}  // namespace cuda
}  // namespace deepreduce
