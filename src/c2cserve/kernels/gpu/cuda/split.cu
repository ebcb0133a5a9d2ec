// split: few rows of X and few tiles of O. The cluster lies along K: each CTA sums its part of K
// for the same tile. Then the CTAs add the sums in rank order, from each other's shared memory. So
// more CTAs read W at once, and results are the same from run to run. With GATED, W and its tiles
// hold gate and up (gated.cuh).
//
// Built with -D: TYPE, BX (at most 64), CLUSTER (shares of K), STAGES, GATED, SHARED_BYTES.
#include "gated.cuh"

struct SplitParams {
  CUtensorMap x, w;  // boxes of BX and 128 rows of 64 elements
  Output out;
  Feed feed;
  int m, n, k;  // n: columns of O
};

using Type = wgmma::TYPE;
// Each CTA streams for itself: the pipeline knows of no cluster.
using Stream = Pipeline<Type, BX, 1, STAGES>;

constexpr int kColumns = GATED ? gated::kColumns : kBlockW;  // of O in a tile
constexpr int kShare = ceil_div(kColumns, CLUSTER);          // of those, a CTA finishes
constexpr int kRow = kBlockW + 4;  // floats; the padding spreads a warp's writes over all banks
constexpr int kPartialAt = ceil_div(Stream::kShared, 16) * 16;
constexpr int kDoneAt = kPartialAt + BX * kRow * 4;
static_assert(kDoneAt + 16 <= SHARED_BYTES);
static_assert(BX <= 64 && CLUSTER > 1);

__device__ __forceinline__ bool find_work(const SplitParams& p, int tile, Work& work) {
  const int across = tiles_of(p.n, kColumns);
  if (tile >= across * tiles_of(p.m, BX)) return false;
  work.matrix = 0;
  work.column = work.w_row = tile % across * kColumns;
  work.x_row = tile / across * BX;
  work.rows = p.m - work.x_row;
  return true;
}

// This CTA's sums, [row of X][row of W], for the others to read.
__device__ __forceinline__ void publish(const float (&d)[BX / 2], float* partial, int group) {
  const int thread = threadIdx.x % kWarpgroup, lane = thread % 32;
  const int n = group * 64 + thread / 32 * 16 + lane / 4, m = lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < BX; j += 8) {
#pragma unroll
    for (int i = 0; i < 4; ++i) partial[(j + m + i % 2) * kRow + n + i / 2 * 8] = d[j / 2 + i];
  }
}

// All CTAs' sums of one row of W for one of X, added in rank order to 16 bits. `at`: in a tile.
struct Shares {
  uint32_t sources[CLUSTER];

  __device__ explicit Shares(const float* partial) {
#pragma unroll
    for (int i = 0; i < CLUSTER; ++i) sources[i] = ptx::mapa(ptx::smem(partial), i);
  }

  __device__ __forceinline__ uint16_t add(int at, const uint16_t* bias, int column) const {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < CLUSTER; ++j) sum += ptx::load_float(sources[j] + at * 4);
    if (bias != nullptr) sum += widen(Type{}, bias[column]);
    return static_cast<uint16_t>(pack(Type{}, sum, 0.0f));
  }
};

// Finishes this CTA's share of the tile's columns.
__device__ __forceinline__ void reduce(const float* partial, uint32_t rank, const Work& work,
                                       const Output& out) {
  const Shares shares(partial);
  for (int i = threadIdx.x - kWarpgroup; i < BX * kShare; i += kConsumers) {
    const int m = i / kShare, n = rank * kShare + i % kShare, column = work.column + n;
    if (m >= work.rows || n >= kColumns || column >= out.columns) continue;
    uint16_t bits = shares.add(m * kRow + n, out.bias, column);
    if constexpr (GATED) {
      const uint16_t up = shares.add(m * kRow + kColumns + n, out.bias, out.columns + column);
      bits = static_cast<uint16_t>(pack(Type{}, gated::silu_mul(Type{}, bits, up), 0.0f));
    }
    out.data[(work.x_row + m) * out.stride + column] = bits;
  }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(kThreads, 1)
    split(const __grid_constant__ SplitParams p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  Stream stream(shared);
  float* partial = reinterpret_cast<float*>(shared + kPartialAt);
  uint64_t* published = reinterpret_cast<uint64_t*>(shared + kDoneAt);
  uint64_t* reduced = published + 1;
  const uint32_t rank = ptx::cluster_rank();
  const int first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
  const int steps = tiles_of(p.k, kBlockK);
  const int from = steps * rank / CLUSTER, to = steps * (rank + 1) / CLUSTER;
  if (threadIdx.x == 0) {
    ptx::barrier_init(published, CLUSTER);
    ptx::barrier_init(reduced, CLUSTER);
    stream.init();
  }
  start_together<CLUSTER>();
  ptx::let_next_kernel_start();
  Work work;

  if (threadIdx.x < kWarpgroup) {
    ptx::give_registers<40>();
    if (threadIdx.x == 0) {
      const CUtensorMap* map_w = stream.begin(p.feed, &p.w);
      stream.produce(map_w, &p.x, from, to, first, step,
                     [&](int tile, Work& found) { return find_work(p, tile, found); });
    }
  } else {
    ptx::take_registers<232>();
    ptx::wait_for_earlier_kernels();
    const int group = threadIdx.x / kWarpgroup - 1, thread = threadIdx.x - kWarpgroup;
    float d[BX / 2];
    uint32_t round = 0;
    for (int tile = first; find_work(p, tile, work); tile += step, ++round) {
#pragma unroll
      for (int i = 0; i < BX / 2; ++i) d[i] = 0.0f;
      if (from < to) stream.multiply(d, group, to - from);
      ptx::wait_acquire(reduced, (round & 1) ^ 1);  // all have read the sums of the tile before
      publish(d, partial, group);
      ptx::named_barrier(1, kConsumers);
      if (thread < CLUSTER) ptx::arrive_release_at(published, thread);
      ptx::wait_acquire(published, round & 1);
      reduce(partial, rank, work, p.out);
      ptx::named_barrier(1, kConsumers);
      if (thread < CLUSTER) ptx::arrive_release_at(reduced, thread);
    }
    // Others read this CTA's sums, and arrive here when they have: it stays until all did.
    ptx::wait_acquire(reduced, (round & 1) ^ 1);
  }
}
