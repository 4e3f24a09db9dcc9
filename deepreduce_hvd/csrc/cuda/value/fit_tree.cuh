// The tree of segments in FitPoly's search: fit_search.cu builds it, fit_cuts.cu chooses the cuts
// from it.
#ifndef DEEPREDUCE_CUDA_VALUE_FIT_TREE_CUH
#define DEEPREDUCE_CUDA_VALUE_FIT_TREE_CUH

#include "cuda/algorithms.cuh"
#include "cuda/value/fit_poly.cuh"

namespace deepreduce {
namespace cuda {

constexpr uint32_t kNone = UINT32_MAX;
constexpr uint32_t kTreeThreads = 1024;  // threads of a block; each side has one block

// A segment that the search may produce.
struct Node {
  // bits of the farthest point's distance as a double: non-negative doubles compare like their bits
  uint64_t distance_bits;
  uint32_t start, length;  // start relative to the side's start
  uint32_t position;       // of the first farthest point, relative to the segment's start
  uint32_t children;       // first of the two consecutive nodes that it is split into; 0: none yet
  float bottleneck;        // approximate minimum distance of this node and its ancestors
  uint32_t first_tile;
};

// The work of one warp: `Tree::tile` points.
struct Tile {
  uint64_t distance_bits;
  uint32_t position, node;
};

struct Search {
  uint32_t nodes, first_new, tiles, finished;
};

struct Tree {
  Node* nodes;
  Tile* tiles;
  Search* searches;
  uint32_t most_nodes, most_ahead, most_tiles;  // per side; most_ahead: nodes that rounds may make
  // tile: points of a tile; fewest: points that a segment needs for all its terms
  uint32_t tile, fewest;
};

__device__ inline double as_double(uint64_t bits) {
  double value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}
__device__ inline uint64_t as_bits(double value) {
  uint64_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// Returns the number of points where a segment can be split. The first one is at `fewest`.
__device__ inline uint32_t candidates(uint32_t length, uint32_t fewest) {
  return length < 2 * fewest ? 0 : length - 2 * fewest + 1;
}
__device__ inline uint32_t tiles_of(const Tree& tree, uint32_t length) {
  const uint32_t points = candidates(length, tree.fewest);
  return points / tree.tile + (points % tree.tile != 0);
}

// Returns whether the node may have children that are not in the tree yet.
__device__ inline bool can_be_split(const Node& node) {
  return node.children == 0 && node.distance_bits != 0;
}

struct Best {
  double distance;
  uint32_t position;
};
__device__ inline Best better(Best a, Best b) {
  return b.distance > a.distance || (b.distance == a.distance && b.position < a.position) ? b : a;
}

// Returns the first of the farthest points among first, first + step ... before end.
__device__ inline Best farthest(const float* y, uint32_t length, uint64_t first, uint32_t step,
                                uint64_t end) {
  const Chord chord = chord_of(y, length);
  Best best{-1.0, kNone};
  for (uint64_t i = first; i < end; i += step) {
    const double distance =
        chord_distance<double>(y[i], chord.first, chord.gradient, static_cast<double>(i));
    if (distance > best.distance) best = {distance, static_cast<uint32_t>(i)};
  }
  return best;
}
__device__ inline Best warp_best(Best best) {
  for (int lanes = 16; lanes > 0; lanes /= 2)
    best = better(best, {__shfl_xor_sync(0xFFFFFFFFu, best.distance, lanes),
                         __shfl_xor_sync(0xFFFFFFFFu, best.position, lanes)});
  return best;
}

__device__ inline void make_children(Node* nodes, uint32_t at, uint32_t children) {
  Node& node = nodes[at];
  node.children = children;
  nodes[children] = {0, node.start, node.position, kNone, 0, node.bottleneck, 0};
  nodes[children + 1] = {
      0, node.start + node.position, node.length - node.position, kNone, 0, node.bottleneck, 0};
}

// Writes the results of the tiles to the nodes. All threads of the block must call it.
__device__ inline void combine(Node* nodes, const Tile* tiles, const Search& search) {
  for (uint32_t t = threadIdx.x; t < search.tiles; t += blockDim.x)
    if (tiles[t].distance_bits == nodes[tiles[t].node].distance_bits)
      atomicMin(&nodes[tiles[t].node].position, tiles[t].position);
  for (uint32_t v = search.first_new + threadIdx.x; v < search.nodes; v += blockDim.x)
    nodes[v].bottleneck =
        smaller(nodes[v].bottleneck, static_cast<float>(as_double(nodes[v].distance_bits)));
  __syncthreads();
}

constexpr unsigned kBinBits = 11;
constexpr uint32_t kBins = 1u << kBinBits;

struct RankBins {
  uint32_t bins[kBins];
  uint32_t sums[33];
  uint32_t found, rank;
};

// Considers the nodes that can be split and whose bottlenecks have the bits `prefix` above shift +
// kBinBits. Returns the bin, of the bits from `shift` on, of the rank-th largest bottleneck, and
// its rank within the bin; 0 if there are fewer. kTreeThreads threads must call it; `shared`
// belongs to the block.
__device__ inline uint32_t bin_of_rank(const Node* nodes, uint32_t count, uint32_t prefix,
                                       unsigned shift, uint32_t& rank, RankBins& shared) {
  constexpr uint32_t each = kBins / kTreeThreads;
  uint32_t* const bins = shared.bins;
  for (uint32_t b = threadIdx.x; b < kBins; b += kTreeThreads) bins[b] = 0;
  if (threadIdx.x == 0) {
    shared.found = 0;
    shared.rank = rank;
  }
  __syncthreads();
  for (uint32_t v = threadIdx.x; v < count; v += kTreeThreads) {
    const uint32_t bits = float_bits(nodes[v].bottleneck);
    if (nodes[v].distance_bits != 0 && (bits ^ prefix) >> (shift + kBinBits) == 0)
      atomicAdd(bins + (bits >> shift & (kBins - 1)), 1u);
  }
  __syncthreads();
  const uint32_t highest = kBins - 1 - each * threadIdx.x;
  uint32_t mine = 0, total;
  for (uint32_t b = 0; b < each; ++b) mine += bins[highest - b];
  uint32_t above = block_exclusive_sum(mine, shared.sums, &total);
  if (above < rank && above + mine >= rank) {
    uint32_t bin = highest;
    for (; above + bins[bin] < rank; --bin) above += bins[bin];
    shared.found = bin;
    shared.rank = rank - above;
  }
  __syncthreads();
  const uint32_t bin = shared.found;
  rank = shared.rank;
  __syncthreads();
  return bin;
}

// Fills starts and `segments` from the tree, and computes what the tree does not contain.
void choose_cuts(Device&, const float* magnitudes, const PolyArrays&, const Tree&);

}  // namespace cuda
}  // namespace deepreduce
#endif
