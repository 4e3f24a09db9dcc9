// The search for FitPoly's cuts. The host repeatedly splits the segment with the point farthest
// from its chord. Here rounds look ahead: each round finds the farthest points of many segments at
// once, namely of those that are among the best so far. At the end, the choices of the host are
// made from these results. The block computes points that the rounds did not foresee. So the cuts
// do not depend on the look-ahead.
#include "cuda/value/fit_tree.cuh"

namespace deepreduce {
namespace cuda {
namespace {

constexpr uint32_t kMostRounds = 24;       // a typical tree of 1024 segments has fewer levels
constexpr unsigned kBottleneckShift = 20;  // bins of an eighth of an octave

// One block per side: takes the results of the last round, and plans the next one.
__device__ void plan_round(const PolyHead* head, Tree tree, int first_round) {
  __shared__ RankBins ranks;
  uint32_t* const shared = ranks.sums;
  const PolySide& side = head->side[blockIdx.x];
  Node* nodes = tree.nodes + uint64_t{blockIdx.x} * tree.most_nodes;
  Search* search = tree.searches + blockIdx.x;
  const uint32_t tid = threadIdx.x;
  uint32_t first_new = 0, end = 0;
  if (first_round) {
    const bool idle = side.wanted < 2;
    if (tid == 0) nodes[0] = {0, 0, side.count, kNone, 0, bits_float(0x7F800000u), 0};
    end = idle ? 0 : 1;
    __syncthreads();
  } else {
    const Search before = *search;
    if (__syncthreads_or(before.finished)) return;
    combine(nodes, tree.tiles + uint64_t{blockIdx.x} * tree.most_tiles, before);
    uint32_t wanted = side.wanted - 1;
    const uint32_t least = bin_of_rank(nodes, before.nodes, 0, kBottleneckShift, wanted, ranks);
    first_new = end = before.nodes;
    for (uint32_t base = 0; base < before.nodes; base += kTreeThreads) {
      const uint32_t v = base + tid;
      const bool split = v < before.nodes && can_be_split(nodes[v]) &&
                         float_bits(nodes[v].bottleneck) >> kBottleneckShift >= least;
      uint32_t splits;
      const uint32_t rank = block_exclusive_sum(split ? 1u : 0u, shared, &splits);
      if (split && end + 2 * rank + 2 <= tree.most_ahead) make_children(nodes, v, end + 2 * rank);
      end += 2 * smaller(splits, (tree.most_ahead - end) / 2);
      __syncthreads();
    }
  }
  uint32_t tiles = 0;
  for (uint32_t base = first_new; base < end; base += kTreeThreads) {
    const uint32_t v = base + tid;
    uint32_t total;
    const uint32_t tile =
        block_exclusive_sum(v < end ? tiles_of(tree, nodes[v].length) : 0, shared, &total);
    if (v < end) nodes[v].first_tile = tiles + tile;
    tiles += total;
    __syncthreads();
  }
  if (tid == 0) *search = {larger(end, 1u), first_new, tiles, first_new == end};
}

// One warp per tile, for both sides.
__device__ void look_ahead(const PolyHead* head, const float* magnitudes, Tree tree) {
  const uint32_t tiles_before = tree.searches[0].tiles, all = tiles_before + tree.searches[1].tiles;
  for (uint32_t t = grid_index() / 32; t < all; t += grid_stride() / 32) {
    const uint32_t side = t < tiles_before ? 0 : 1, mine = side == 0 ? t : t - tiles_before;
    const Search& search = tree.searches[side];
    Node* nodes = tree.nodes + uint64_t{side} * tree.most_nodes;
    // the last node whose first tile is at most this one
    uint32_t low = search.first_new, high = search.nodes;
    while (high - low > 1) {
      const uint32_t middle = low + (high - low) / 2;
      (nodes[middle].first_tile <= mine ? low : high) = middle;
    }
    const Node node = nodes[low];
    const uint64_t first = tree.fewest + uint64_t{mine - node.first_tile} * tree.tile;
    const uint64_t end = smaller<uint64_t>(
        first + tree.tile, tree.fewest + uint64_t{candidates(node.length, tree.fewest)});
    const Best best = warp_best(farthest(magnitudes + head->side[side].start + node.start,
                                         node.length, first + threadIdx.x % 32, 32, end));
    if (threadIdx.x % 32 != 0) continue;
    tree.tiles[uint64_t{side} * tree.most_tiles + mine] = {as_bits(best.distance), best.position,
                                                           low};
    atomic_max(&nodes[low].distance_bits, as_bits(best.distance));
  }
}

}  // namespace

void find_segments(Device& device, const float* magnitudes, const PolyArrays& arrays,
                   uint32_t capacity, int degree) {
  const uint64_t mark = device.mark();
  Tree tree{};
  tree.fewest = static_cast<uint32_t>(degree) + 1;
  tree.tile =
      static_cast<uint32_t>(std::max<uint64_t>(1024, (uint64_t{capacity} / 8192 + 31) / 32 * 32));
  tree.most_ahead = 8 * arrays.most;
  tree.most_nodes = tree.most_ahead + 2 * arrays.most;
  tree.most_tiles = capacity / tree.tile + tree.most_ahead + 1;
  tree.nodes = device.array<Node>(uint64_t{2} * tree.most_nodes);
  tree.tiles = device.array<Tile>(uint64_t{2} * tree.most_tiles);
  tree.searches = device.array<Search>(2);
  const uint32_t rounds = std::min(kMostRounds, arrays.most);
  launch<plan_round, kTreeThreads>(device, 2, kTreeThreads, 0, arrays.head, tree, 1);
  for (uint32_t round = 1; round < rounds; ++round) {
    launch<look_ahead>(device, blocks_for(uint64_t{32} * tree.most_tiles), kThreads, 0, arrays.head,
                       magnitudes, tree);
    launch<plan_round, kTreeThreads>(device, 2, kTreeThreads, 0, arrays.head, tree, 0);
  }
  launch<look_ahead>(device, blocks_for(uint64_t{32} * tree.most_tiles), kThreads, 0, arrays.head,
                     magnitudes, tree);
  choose_cuts(device, magnitudes, arrays, tree);
  device.release(mark);
}

}  // namespace cuda
}  // namespace deepreduce
