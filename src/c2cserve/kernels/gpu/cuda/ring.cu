// ring: W in panels of rows through a small ring in local memory, small enough to stay in L2. The
// panels are brought once, by CTAs of this launch (`copiers` clusters of it) or by the copy engines
// on another stream; all other CTAs multiply, panel by panel, as soon as a panel is there.
//
// filled[p]   how much of panel p is in the ring: chunks (copy CTAs) or all of them at once (engines)
// drained[p]  tiles of panel p that need it no more; the panel's place is free when all have said so
//
// Built with -D: TYPE, BX, CLUSTER, STAGES, SHARED_BYTES.
#include "pipeline.cuh"

struct RingParams {
  CUtensorMap x, w;  // w: the ring, [slots, panel_rows, k]
  Output out;
  const uint8_t* home;  // W, contiguous
  uint8_t* ring;
  uint32_t *filled, *drained;  // [panels], zero
  int m, n, k;
  int panel_rows, slots, copiers;
};

using Type = wgmma::TYPE;
using Stream = Pipeline<Type, BX, CLUSTER, STAGES>;
static_assert(Stream::kShared <= SHARED_BYTES);

constexpr int kCopyBytes = 16384;
constexpr int kCopySlots = 12;
static_assert(kCopySlots * (kCopyBytes + 16) <= SHARED_BYTES);

// How W is cut: all panels have `rows` rows but the last.
struct Panels {
  long long bytes, total;
  int count, tiles_down, tiles_across, columns;

  __device__ explicit Panels(const RingParams& p)
      : bytes(2LL * p.panel_rows * p.k), total(2LL * p.n * p.k),
        count(tiles_of(p.n, p.panel_rows)), tiles_down(tiles_of(p.m, CLUSTER * BX)),
        tiles_across(p.panel_rows / kBlockW), columns(p.n) {}

  __device__ long long size(int panel) const {
    const long long left = total - panel * bytes;
    return left < bytes ? left : bytes;
  }
  __device__ uint32_t chunks(int panel) const {
    return static_cast<uint32_t>((size(panel) + kCopyBytes - 1) / kCopyBytes);
  }
  // Tiles of O that use the panel, by warpgroup.
  __device__ uint32_t uses(int panel, int panel_rows) const {
    const int left = columns - panel * panel_rows;
    const int rows = left < panel_rows ? left : panel_rows;
    return static_cast<uint32_t>(tiles_of(rows, kBlockW) * tiles_down * CLUSTER * 2);
  }
};

__device__ __forceinline__ void wait_until(const uint32_t* flag, uint32_t value) {
  while (ptx::load_acquire(flag) < value) __nanosleep(64);
}

// This copier's chunks of W, in order: every `copiers`-th of each panel.
struct Chunk {
  int panel = 0;
  uint32_t index;
  long long number = 0;  // of this copier

  __device__ explicit Chunk(int copier) : index(copier) {}

  // Moves on to a panel that has such a chunk; false after the last.
  __device__ __forceinline__ bool settle(const Panels& panels, int copier) {
    while (panel < panels.count && index >= panels.chunks(panel)) {
      ++panel;
      index = copier;
    }
    return panel < panels.count;
  }
  __device__ __forceinline__ uint32_t bytes(const Panels& panels) const {
    const long long left = panels.size(panel) - 1LL * index * kCopyBytes;
    return static_cast<uint32_t>(left < kCopyBytes ? left : kCopyBytes);
  }
  __device__ __forceinline__ int slot() const { return static_cast<int>(number % kCopySlots); }
  __device__ __forceinline__ uint32_t parity() const { return (number / kCopySlots) & 1; }
  __device__ __forceinline__ void advance(int copiers) {
    index += copiers;
    ++number;
  }
};

// A copying CTA's barriers lie behind its slots: arrived[kCopySlots], left[kCopySlots].
__device__ __forceinline__ uint64_t* arrived(uint8_t* shared, int slot) {
  return reinterpret_cast<uint64_t*>(shared + kCopySlots * kCopyBytes) + slot;
}
__device__ __forceinline__ uint64_t* left(uint8_t* shared, int slot) {
  return arrived(shared, kCopySlots + slot);
}

// One thread: home -> shared memory, as far ahead as the slots and the ring allow.
__device__ void fetch_chunks(const RingParams& p, uint8_t* shared, int copier, int copiers) {
  const Panels panels(p);
  int free = p.slots - 1;  // the last panel whose place is known to be free
  for (Chunk chunk(copier); chunk.settle(panels, copier); chunk.advance(copiers)) {
    if (chunk.panel > free) {
      free = chunk.panel;
      wait_until(&p.drained[free - p.slots], panels.uses(free - p.slots, p.panel_rows));
    }
    ptx::wait(left(shared, chunk.slot()), chunk.parity() ^ 1);
    const uint32_t bytes = chunk.bytes(panels);
    ptx::arrive_expect(arrived(shared, chunk.slot()), bytes);
    ptx::load_bytes(shared + chunk.slot() * kCopyBytes,
                    p.home + chunk.panel * panels.bytes + 1LL * chunk.index * kCopyBytes, bytes,
                    arrived(shared, chunk.slot()));
  }
}

// Another: shared memory -> ring. A panel is published once all this copier's chunks of it are
// written. That is checked while later chunks are under way, so that stores never pause. (A panel
// is fetched when the panel `slots` before it is drained. With two slots or more this cannot
// deadlock.)
__device__ void keep_chunks(const RingParams& p, uint8_t* shared, int copier, int copiers) {
  constexpr int kLater = 2;  // stores under way when the ones before are looked at
  const Panels panels(p);
  int panel = 0, later = 0;  // the panel to publish, and chunks stored since its last
  uint32_t unpublished = 0, current = 0;
  const auto publish = [&] {
    ptx::fence_global_to_engine();
    ptx::add_release(&p.filled[panel], unpublished);
    unpublished = 0;
  };
  for (Chunk chunk(copier); chunk.settle(panels, copier); chunk.advance(copiers)) {
    ptx::wait(arrived(shared, chunk.slot()), chunk.parity());
    ptx::store_bytes(p.ring + chunk.panel % p.slots * panels.bytes + 1LL * chunk.index * kCopyBytes,
                     shared + chunk.slot() * kCopyBytes, chunk.bytes(panels));
    ptx::commit_stores();
    ++current;
    ptx::wait_stores_read<1>();
    if (chunk.number > 0) {
      ptx::arrive(left(shared, static_cast<int>((chunk.number - 1) % kCopySlots)));
    }
    if (unpublished > 0 && ++later == kLater) {
      ptx::wait_stores_done<kLater>();
      publish();
    }
    if (chunk.index + copiers >= panels.chunks(chunk.panel)) {  // this copier's last of the panel
      if (unpublished > 0) {
        ptx::wait_stores_done<1>();
        publish();
      }
      panel = chunk.panel;
      unpublished = current;
      current = 0;
      later = 0;
    }
  }
  ptx::wait_stores_done<0>();
  if (unpublished > 0) publish();
}

__device__ __forceinline__ bool find_work(const RingParams& p, const Panels& panels, int tile,
                                          uint32_t rank, Work& work, int& panel) {
  const int each = panels.tiles_across * panels.tiles_down;
  panel = tile / each;
  if (panel >= panels.count) return false;
  const int local = tile % each, first = local % panels.tiles_across * kBlockW;
  work.column = panel * p.panel_rows + first;
  work.matrix = panel % p.slots;
  work.w_row = first;
  work.x_row = (local / panels.tiles_across * CLUSTER + static_cast<int>(rank)) * BX;
  work.rows = p.m - work.x_row;
  return true;
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(kThreads, 1)
    ring(const __grid_constant__ RingParams p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  Stream stream(shared);
  const int cluster = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER - p.copiers;
  const bool copies = cluster < p.copiers;
  if (threadIdx.x == 0) {
    if (copies) {
      for (int i = 0; i < 2 * kCopySlots; ++i) ptx::barrier_init(arrived(shared, i), 1);
      ptx::barrier_init_fence();
    } else {
      stream.init();
    }
  }
  start_together<CLUSTER>();
  ptx::wait_for_earlier_kernels();
  const Panels panels(p);
  Work work;
  int panel;

  if (copies) {
    if (threadIdx.x == 0) fetch_chunks(p, shared, blockIdx.x, p.copiers * CLUSTER);
    if (threadIdx.x == 32) keep_chunks(p, shared, blockIdx.x, p.copiers * CLUSTER);
  } else if (threadIdx.x < kWarpgroup) {
    ptx::give_registers<40>();
    if (threadIdx.x == 0) {
      int ready = -1;
      for (int tile = cluster - p.copiers; find_work(p, panels, tile, stream.rank, work, panel);
           tile += step) {
        if (work.column >= p.n) continue;
        if (panel != ready) {
          wait_until(&p.filled[panel], panels.chunks(panel));
          ptx::fence_global_to_engine();
          ready = panel;
        }
        stream.load_tile(&p.w, &p.x, work, 0, p.k);
      }
      stream.drain();
    }
  } else {
    ptx::take_registers<232>();
    const int group = threadIdx.x / kWarpgroup - 1;
    float d[BX / 2];
    for (int tile = cluster - p.copiers; find_work(p, panels, tile, stream.rank, work, panel);
         tile += step) {
      if (work.column >= p.n) continue;
      stream.multiply(d, group, tiles_of(p.k, kBlockK));
      if (threadIdx.x % kWarpgroup == 0) ptx::add_relaxed(&p.drained[panel], 1);
      stream.store(d, group, work, p.out);
    }
  }
}
