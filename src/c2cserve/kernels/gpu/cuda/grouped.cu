// grouped: a mixture of experts. X's rows are sorted by expert; `offsets` (in GPU memory: the host
// never sees the router's choice) says where each expert's rows begin. Only experts that have rows
// are read, straight from their home as in `direct`, once for each kCluster x kBX of their rows.
//
// Built with -D: TYPE, BX, CLUSTER, STAGES, SHARED_BYTES.
#include "pipeline.cuh"

struct GroupedParams {
  CUtensorMap x, w;  // w: [experts, n, k]
  Output out;
  Feed feed;
  const int* offsets;  // [experts + 1]
  int experts, n, k;
};

using Type = wgmma::TYPE;
using Stream = Pipeline<Type, BX, CLUSTER, STAGES>;

constexpr int kExpertsMax = 512;
constexpr int kTablesAt = ceil_div(Stream::kShared, 16) * 16;
static_assert(kTablesAt + 2 * (kExpertsMax + 1) * 4 <= SHARED_BYTES);

// In shared memory: where each expert's rows and its tiles begin.
struct Tables {
  int* rows;
  int* tiles;
};

// By the first warp: copies the offsets and sums up the tiles, 32 experts at a time.
__device__ void fill_tables(const GroupedParams& p, const Tables& tables) {
  const int lane = threadIdx.x, across = tiles_of(p.n, kBlockW);
  int before = 0;
  for (int first = 0; first < p.experts; first += 32) {
    const int expert = first + lane;
    const int row = expert <= p.experts ? p.offsets[expert] : 0;
    const int rows = expert < p.experts ? p.offsets[expert + 1] - row : 0;
    int sum = across * tiles_of(rows, CLUSTER * BX);
    for (int i = 1; i < 32; i *= 2) {
      const int left = __shfl_up_sync(~0u, sum, i);
      if (lane >= i) sum += left;
    }
    if (expert < p.experts) {
      tables.rows[expert] = row;
      tables.tiles[expert + 1] = before + sum;
    }
    before += __shfl_sync(~0u, sum, 31);
  }
  if (lane == 0) {
    tables.tiles[0] = 0;
    tables.rows[p.experts] = p.offsets[p.experts];
  }
}

// Tile -> expert, block of its rows, columns of O (fastest).
__device__ __forceinline__ bool find_work(const GroupedParams& p, const Tables& tables, int tile,
                                          uint32_t rank, Work& work) {
  if (tile >= tables.tiles[p.experts]) return false;
  int low = 0, high = p.experts;  // tiles[low] <= tile < tiles[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (tables.tiles[middle] <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const int across = tiles_of(p.n, kBlockW), local = tile - tables.tiles[low];
  work.matrix = low;
  work.column = work.w_row = local % across * kBlockW;
  work.x_row = tables.rows[low] + (local / across * CLUSTER + static_cast<int>(rank)) * BX;
  work.rows = tables.rows[low + 1] - work.x_row;
  return true;
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(kThreads, 1)
    grouped(const __grid_constant__ GroupedParams p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  Stream stream(shared);
  Tables tables;
  tables.rows = reinterpret_cast<int*>(shared + kTablesAt);
  tables.tiles = tables.rows + kExpertsMax + 1;
  const int first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
  if (threadIdx.x == 0) {
    stream.init();
    if (p.feed.map == nullptr) ptx::prefetch_map(&p.w);
    ptx::prefetch_map(&p.x);
  }
  ptx::wait_for_earlier_kernels();  // the router is one
  if (threadIdx.x < 32) fill_tables(p, tables);
  __syncthreads();
  start_together<CLUSTER>();
  ptx::let_next_kernel_start();
  Work work;

  if (threadIdx.x < kWarpgroup) {
    ptx::give_registers<40>();
    if (threadIdx.x == 0) {
      const CUtensorMap* map_w = stream.begin(p.feed, &p.w);
      for (int tile = first; find_work(p, tables, tile, stream.rank, work); tile += step) {
        stream.load_tile(map_w, &p.x, work, 0, p.k);
      }
      stream.drain();
    }
  } else {
    ptx::take_registers<232>();
    const int group = threadIdx.x / kWarpgroup - 1;
    float d[BX / 2];
    for (int tile = first; find_work(p, tables, tile, stream.rank, work); tile += step) {
      stream.multiply(d, group, tiles_of(p.k, kBlockK));
      stream.store(d, group, work, p.out);
    }
  }
}
