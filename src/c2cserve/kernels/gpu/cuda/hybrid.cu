// hybrid: Algorithm 1 of C2CServe. The first `columns_sym` columns of O are computed
// output-stationary (sym), the others weight-stationary (asym), by different CTAs of one launch that
// write disjoint columns. sym and asym by themselves are its two ends.
//
//   sym    a tile of O stays in registers over all of K; W is read again for every BX rows of X
//   asym   a tile of W [128 x KP] stays in shared memory while all rows of X pass by; each product is
//          added into memory by the copy engine: W is read once, O is read and written K / KP times
//
// Built with -D: TYPE, BX, STAGES (of sym), KP, PARTIAL (float32: 4 bytes into a scratch, or 16-bit: 2
// bytes, into O itself), SHARED_BYTES.
#include "pipeline.cuh"

struct HybridParams {
  CUtensorMap x, w, partial;  // boxes of BX, 128, 64 rows; partial [m, n - columns_sym] or O
  Output out;
  int m, n, k;
  int columns_sym;  // a multiple of 128, or n
  int ctas_sym;
};

using Type = wgmma::TYPE;
using Stream = Pipeline<Type, BX, 1, STAGES>;
static_assert(Stream::kShared <= SHARED_BYTES);

// Shared memory of asym: [W: KP / 64 boxes | stages of X | two staging buffers a warpgroup | barriers].
struct Asym {
  static constexpr int kBoxes = KP / kBlockK;
  static constexpr int kBytesW = kBoxes * kBlockW * kBlockK * 2;
  static constexpr int kBytesX = BX * kBlockK * 2;
  static constexpr int kChunk = BX < 64 ? BX : 64;
  static constexpr int kStaging = kChunk * 64 * PARTIAL;
  static constexpr int kBarrierBytes = 256;
  static constexpr int kRoom = SHARED_BYTES - kBytesW - 4 * kStaging - kBarrierBytes;
  static constexpr int kStages = kRoom / kBytesX < 8 ? kRoom / kBytesX : 8;
  static constexpr int kStagingAt = kBytesW + kStages * kBytesX;
  static constexpr int kBarriersAt = kStagingAt + 4 * kStaging;
  static_assert(kStages >= 2 && kBarriersAt + 8 * (2 * kStages + 2) <= SHARED_BYTES);

  uint8_t* base;
  Cursor<kStages> cursor;

  __device__ uint8_t* w(int box) const { return base + box * kBlockW * kBlockK * 2; }
  __device__ uint8_t* x(int stage) const { return base + kBytesW + stage * kBytesX; }
  __device__ uint8_t* staging(int group, int buffer) const {
    return base + kStagingAt + (2 * group + buffer) * kStaging;
  }
  __device__ uint64_t* full(int stage) const {
    return reinterpret_cast<uint64_t*>(base + kBarriersAt) + stage;
  }
  __device__ uint64_t* empty(int stage) const { return full(kStages + stage); }
  __device__ uint64_t* w_full() const { return full(2 * kStages); }
  __device__ uint64_t* w_empty() const { return w_full() + 1; }

  __device__ void init() const {
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::barrier_init(full(stage), 1);
      ptx::barrier_init(empty(stage), 2);
    }
    ptx::barrier_init(w_full(), 1);
    ptx::barrier_init(w_empty(), 2);
    ptx::barrier_init_fence();
  }
};

// The tiles of W that asym CTAs pin: all of a tile's columns of O, then the next part of K.
struct Pin {
  int row, k, boxes;
};

__device__ __forceinline__ bool find_pin(const HybridParams& p, int number, Pin& pin) {
  const int across = tiles_of(p.n - p.columns_sym, kBlockW);
  if (number >= across * tiles_of(p.k, KP)) return false;
  pin.row = p.columns_sym + number % across * kBlockW;
  pin.k = number / across * KP;
  const int left = tiles_of(p.k - pin.k, kBlockK);
  pin.boxes = left < Asym::kBoxes ? left : Asym::kBoxes;
  return true;
}

__device__ __forceinline__ bool find_work(const HybridParams& p, int tile, Work& work) {
  const int across = tiles_of(p.columns_sym, kBlockW);
  if (tile >= across * tiles_of(p.m, BX)) return false;
  work.matrix = 0;
  work.column = work.w_row = tile % across * kBlockW;
  work.x_row = tile / across * BX;
  work.rows = p.m - work.x_row;
  return true;
}

__device__ void run_sym(const HybridParams& p, uint8_t* shared) {
  Stream stream(shared);
  Work work;
  Output out = p.out;
  out.columns = p.columns_sym;
  if (threadIdx.x < kWarpgroup) {
    ptx::give_registers<40>();
    if (threadIdx.x == 0) {
      for (int tile = blockIdx.x; find_work(p, tile, work); tile += p.ctas_sym) {
        stream.load_tile(&p.w, &p.x, work, 0, p.k);
      }
    }
  } else {
    ptx::take_registers<232>();
    const int group = threadIdx.x / kWarpgroup - 1;
    float d[BX / 2];
    for (int tile = blockIdx.x; find_work(p, tile, work); tile += p.ctas_sym) {
      stream.multiply(d, group, tiles_of(p.k, kBlockK));
      stream.store(d, group, work, out);
    }
  }
}

__device__ void produce_asym(const HybridParams& p, Asym asym) {
  Pin pin;
  uint32_t parity = 0;
  for (int number = blockIdx.x - p.ctas_sym; find_pin(p, number, pin);
       number += gridDim.x - p.ctas_sym, parity ^= 1) {
    ptx::wait(asym.w_empty(), parity ^ 1);
    ptx::arrive_expect(asym.w_full(), pin.boxes * kBlockW * kBlockK * 2);
    for (int box = 0; box < pin.boxes; ++box) {
      ptx::load_box(&p.w, asym.w_full(), asym.w(box), pin.k + box * kBlockK, pin.row, 0);
    }
    for (int row = 0; row < p.m; row += BX) {
      for (int box = 0; box < pin.boxes; ++box) {
        const int stage = asym.cursor.stage;
        ptx::wait(asym.empty(stage), asym.cursor.parity ^ 1);
        ptx::arrive_expect(asym.full(stage), Asym::kBytesX);
        ptx::load_box(&p.x, asym.full(stage), asym.x(stage), pin.k + box * kBlockK, row);
        asym.cursor.advance();
      }
    }
  }
}

// Writes partial sums of 64 rows of X by this warpgroup's 64 columns, in the layout of the map's
// boxes. A box's rows have 128 bytes, in the 128-byte swizzle. float32 takes two boxes of 32
// columns, and 16-bit one of 64.
__device__ __forceinline__ void stage_partial(const float (&d)[BX / 2], int chunk, uint8_t* target) {
  const int thread = threadIdx.x % kWarpgroup, lane = thread % 32, warp = thread / 32;
#if PARTIAL == 4
  const int n = warp * 16 + lane / 4;
#pragma unroll
  for (int j = 0; j < Asym::kChunk; j += 8) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = j + lane % 4 * 2 + i % 2, column = n + i / 2 * 8;
      const int place = row * 128 + (((column % 32 / 4) ^ (row % 8)) * 16) + column % 4 * 4;
      *reinterpret_cast<float*>(target + column / 32 * Asym::kChunk * 128 + place) =
          d[(chunk + j) / 2 + i];
    }
  }
#else
  const int piece = 2 * warp + (lane / 8) % 2;
#pragma unroll
  for (int j = 0; j < Asym::kChunk; j += 16) {
    const float* v = &d[(chunk + j) / 2];
    const int row = j + lane / 16 * 8 + lane % 8;
    ptx::store_transposed(ptx::smem(target) + row * 128 + ((piece ^ (row % 8)) * 16),
                          pack(Type{}, v[0], v[1]), pack(Type{}, v[2], v[3]),
                          pack(Type{}, v[4], v[5]), pack(Type{}, v[6], v[7]));
  }
#endif
}

__device__ void consume_asym(const HybridParams& p, Asym asym) {
  const int group = threadIdx.x / kWarpgroup - 1, thread = threadIdx.x % kWarpgroup;
  float d[BX / 2];
  Pin pin;
  uint32_t parity = 0;
  int buffer = 0;
  for (int number = blockIdx.x - p.ctas_sym; find_pin(p, number, pin);
       number += gridDim.x - p.ctas_sym, parity ^= 1) {
    ptx::wait(asym.w_full(), parity);
    const int column = pin.row - (PARTIAL == 4 ? p.columns_sym : 0) + group * 64;
    for (int row = 0; row < p.m; row += BX) {
      int before = 0;
      for (int box = 0; box < pin.boxes; ++box) {
        const int stage = asym.cursor.stage;
        ptx::wait(asym.full(stage), asym.cursor.parity);
        const uint64_t a = wgmma::descriptor(asym.w(box) + group * 64 * kBlockK * 2);
        const uint64_t b = wgmma::descriptor(asym.x(stage));
        wgmma::pin(d);
        wgmma::fence();
#pragma unroll
        for (int i = 0; i < kBlockK / 16; ++i) {
          wgmma::Mma<Type, BX>::run(d, a + i * wgmma::kNextK, b + i * wgmma::kNextK, box + i > 0);
        }
        wgmma::commit();
        wgmma::pin(d);
        wgmma::wait<1>();
        if (box > 0 && thread == 0) ptx::arrive(asym.empty(before));
        before = stage;
        asym.cursor.advance();
      }
      wgmma::wait<0>();
      wgmma::pin(d);
      if (thread == 0) ptx::arrive(asym.empty(before));
#pragma unroll
      for (int chunk = 0; chunk < BX; chunk += Asym::kChunk) {
        if (row + chunk >= p.m) break;
        if (thread == 0) ptx::wait_stores_read<1>();  // the buffer before last is free
        ptx::named_barrier(1 + group, kWarpgroup);
        stage_partial(d, chunk, asym.staging(group, buffer));
        ptx::fence_shared_to_engine();
        ptx::named_barrier(1 + group, kWarpgroup);
        if (thread == 0) {
          for (int part = 0; part < PARTIAL / 2; ++part) {
            ptx::add_box(&p.partial, asym.staging(group, buffer) + part * Asym::kChunk * 128,
                         column + part * 32, row + chunk);
          }
          ptx::commit_stores();
        }
        buffer ^= 1;
      }
    }
    if (thread == 0) ptx::arrive(asym.w_empty());
  }
  if (thread == 0) ptx::wait_stores_done<0>();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    hybrid(const __grid_constant__ HybridParams p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const bool sym = blockIdx.x < p.ctas_sym;
  Asym asym{shared};
  if (threadIdx.x == 0) {
    if (sym) {
      Stream(shared).init();
    } else {
      asym.init();
    }
  }
  start_together<1>();
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  if (sym) {
    run_sym(p, shared);
  } else if (threadIdx.x < kWarpgroup) {
    ptx::give_registers<40>();
    if (threadIdx.x == 0) produce_asym(p, asym);
  } else {
    ptx::take_registers<232>();
    consume_asym(p, asym);
  }
}
