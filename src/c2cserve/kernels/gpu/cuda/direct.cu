// direct: W from its home straight into the multiply, once for each kCluster x kBX rows of X.
// With TEE, every tile of W that passes by is also stored into a slot in local memory. With GATED, W
// is a gate and what it gates, and so is a tile of it (gated.cuh).
//
// Built with -D: TYPE (Bf16, Fp16), BX, CLUSTER, STAGES, TEE, GATED, SHARED_BYTES.
#include "gated.cuh"

struct DirectParams {
  CUtensorMap x, w, slot;  // boxes of BX, 128 / CLUSTER and 128 / CLUSTER rows of 64 elements
  Output out;
  Feed feed;
  int m, n, k;  // n: columns of O
};

using Type = wgmma::TYPE;
using Stream = Pipeline<Type, BX, CLUSTER, STAGES, TEE>;
static_assert(Stream::kShared <= SHARED_BYTES);
static_assert(!GATED || (CLUSTER == 1 && !TEE && BX <= 64));

constexpr int kColumns = GATED ? gated::kColumns : kBlockW;  // of O in a tile

// Tiles of this cluster, one after another: columns of O run fastest.
__device__ __forceinline__ bool find_work(const DirectParams& p, int tile, uint32_t rank,
                                          Work& work) {
  const int across = tiles_of(p.n, kColumns);
  if (tile >= across * tiles_of(p.m, CLUSTER * BX)) return false;
  work.matrix = 0;
  work.column = work.w_row = tile % across * kColumns;
  work.x_row = (tile / across * CLUSTER + static_cast<int>(rank)) * BX;
  work.rows = p.m - work.x_row;
  return true;
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(kThreads, 1)
    direct(const __grid_constant__ DirectParams p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  Stream stream(shared);
  const int first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
  if (threadIdx.x == 0) {
    stream.init();
    if (p.feed.map == nullptr) ptx::prefetch_map(&p.w);
    ptx::prefetch_map(&p.x);
  }
  start_together<CLUSTER>();
  ptx::let_next_kernel_start();
  Work work;

  if (threadIdx.x < kWarpgroup) {
    ptx::give_registers<40>();
    if (threadIdx.x == 0) {
      const CUtensorMap* map_w = stream.begin(p.feed, &p.w);
      stream.produce(map_w, &p.x, 0, tiles_of(p.k, kBlockK), first, step,
                     [&](int tile, Work& found) { return find_work(p, tile, stream.rank, found); });
      stream.drain();
    } else if (TEE && threadIdx.x == 32) {
      ptx::wait_for_earlier_kernels();  // they may read the slot
      for (int tile = first; find_work(p, tile, stream.rank, work); tile += step) {
        const int slice = static_cast<int>(stream.rank) * Stream::kSliceW;
        int before = -1;
        for (int column = 0; column < p.k; column += kBlockK) {
          const int stage = stream.cursor.stage;
          ptx::wait(stream.full(stage), stream.cursor.parity);
          if (work.x_row < CLUSTER * BX) {  // the first rows of X: every tile of W just once
            ptx::store_box(&p.slot, stream.w(stage) + slice * kBlockK * 2, column,
                           work.w_row + slice);
          }
          ptx::commit_stores();
          ptx::wait_stores_read<1>();
          for (int other = 0; before >= 0 && other < CLUSTER; ++other) {
            ptx::arrive_at(stream.empty(before), other);
          }
          before = stage;
          stream.cursor.advance();
        }
        ptx::wait_stores_read<0>();
        for (int other = 0; other < CLUSTER; ++other) ptx::arrive_at(stream.empty(before), other);
      }
      ptx::wait_stores_done<0>();
    }
  } else {
    ptx::take_registers<232>();
    ptx::wait_for_earlier_kernels();  // they may read O
    const int group = threadIdx.x / kWarpgroup - 1;
    float d[BX / 2];
    for (int tile = first; find_work(p, tile, stream.rank, work); tile += step) {
      stream.multiply(d, group, tiles_of(p.k, kBlockK));
      if constexpr (GATED) {
        gated::store(stream, d, group, work, p.out);
      } else {
        stream.store(d, group, work, p.out);
      }
    }
  }
}
