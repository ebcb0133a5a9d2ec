// The tile every streaming dataflow computes, and the pipeline that feeds it.
//
//   O[m, n] = sum over k of X[m, k] W[n, k]      X [M, K], W [N, K], O [M, N], 16-bit, float32 sums
//
// A CTA owns 128 rows of W (columns of O) and kBX rows of X. Operands are swapped: W is the
// instruction's 64-row side, so a few rows of X waste nothing. Two consumer warpgroups have 64 rows
// of W each. One producer thread fills kStages stages, each of [128 x 64] of W and [kBX x 64] of X.
// The kCluster CTAs of a cluster lie along M and need the same W. Each fetches 128 / kCluster of
// its rows and multicasts them, so W crosses the link once for a cluster.
#pragma once

#include "wgmma.cuh"

constexpr int kBlockW = 128;
constexpr int kBlockK = 64;
constexpr int kWarpgroup = 128;
constexpr int kConsumers = 2 * kWarpgroup;
constexpr int kThreads = kWarpgroup + kConsumers;

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

__device__ __forceinline__ int tiles_of(int size, int tile) { return (size + tile - 1) / tile; }

// A place in the ring of stages, and how often the ring went round.
template <int kStages>
struct Cursor {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// One tile of O. `w_row`, `x_row`: where its operands start in their maps; `rows` may be <= 0.
struct Work {
  int matrix, w_row;  // which W of a stack, and the tile's first row in it
  int x_row;         // first row of X
  int column;        // first column of O
  int rows;          // rows of X that count
};

// Two 16-bit values of a row's neighbouring columns, as one register.
__device__ __forceinline__ uint32_t pack(wgmma::Bf16, float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ uint32_t pack(wgmma::Fp16, float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ float widen(wgmma::Bf16, uint16_t bits) {
  return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}

__device__ __forceinline__ float widen(wgmma::Fp16, uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

// Where a tile goes: O with rows of `stride` elements, its full width `columns`, and a bias or null.
struct Output {
  uint16_t* data;
  const uint16_t* bias;
  long long stride;
  int columns;

  // Eight neighbouring values of a row, as far as they are columns; at once where that is aligned.
  __device__ __forceinline__ void put(const uint4& values, long long row, int column) const {
    uint16_t* target = data + row * stride + column;
    const bool whole = stride % 8 == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0;
    if (whole && column + 8 <= columns) {
      *reinterpret_cast<uint4*>(target) = values;
      return;
    }
    const uint16_t* bits = reinterpret_cast<const uint16_t*>(&values);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (column + j < columns) target[j] = bits[j];
    }
  }
};

// Where a launch reads W, and at what rate. Both pointers may be null. Their targets are written
// before the launch, so a replay can have another weight and another share of the link.
struct Feed {
  const CUtensorMap* map;    // W's; null: it is among the parameters
  const float* ns_per_byte;  // of this slice's share of the link; null or 0: no limit
};

// Limits a producer's rate, so that slices that share a link get equal shares. (The chip's arbiters
// do not divide it equally.) A producer that was delayed may catch up by a few stages.
struct Pace {
  static constexpr int kCatchUp = 4;
  uint32_t stage_ns = 0;
  uint64_t due = 0;

  __device__ __forceinline__ void wait() {
    if (stage_ns == 0) return;
    uint64_t now = ptx::global_ns();
    for (; now < due; now = ptx::global_ns()) __nanosleep(static_cast<uint32_t>(due - now));
    const uint64_t earliest = now - kCatchUp * stage_ns;
    due = (due > earliest ? due : earliest) + stage_ns;
  }
};

// Shared memory: [stages of W | stages of X | staging of O | barriers].
template <class T, int kBX, int kCluster, int kStages, int kReleases = 0>
struct Pipeline {
  static constexpr int kBytesW = kBlockW * kBlockK * 2;
  static constexpr int kBytesX = kBX * kBlockK * 2;
  static constexpr int kSliceW = kBlockW / kCluster;  // rows of W this CTA fetches
  static constexpr int kChunk = kBX < 64 ? kBX : 64;  // rows of O staged at a time
  static constexpr int kStaging = kChunk * 64 * 2;    // of one warpgroup
  static constexpr int kBarriersAt = kStages * (kBytesW + kBytesX) + 2 * kStaging;
  static constexpr int kShared = kBarriersAt + 2 * 8 * kStages;
  static constexpr uint16_t kAll = (1u << kCluster) - 1;

  uint8_t* base;
  uint32_t rank;
  Cursor<kStages> cursor;
  Pace pace;

  __device__ explicit Pipeline(uint8_t* shared)
      : base(shared), rank(kCluster > 1 ? ptx::cluster_rank() : 0) {}

  __device__ uint8_t* w(int stage) const { return base + stage * kBytesW; }
  __device__ uint8_t* x(int stage) const { return base + kStages * kBytesW + stage * kBytesX; }
  __device__ uint8_t* staging(int group) const {
    return base + kStages * (kBytesW + kBytesX) + group * kStaging;
  }
  __device__ uint64_t* full(int stage) const {
    return reinterpret_cast<uint64_t*>(base + kBarriersAt) + stage;
  }
  __device__ uint64_t* empty(int stage) const { return full(kStages) + stage; }

  // By one thread, before the cluster is synchronised. A stage is empty when both warpgroups (and
  // `kReleases` other readers) of every CTA of the cluster have said so.
  __device__ void init() const {
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::barrier_init(full(stage), 1);
      ptx::barrier_init(empty(stage), kCluster * (2 + kReleases));
    }
    ptx::barrier_init_fence();
  }

  // ---- producer: one thread ----------------------------------------------------------------------

  // The map to load W by, and the pace to load it at, from here on. All CTAs stream alike.
  __device__ __forceinline__ const CUtensorMap* begin(const Feed& feed, const CUtensorMap* own) {
    if (feed.ns_per_byte != nullptr) {
      const uint32_t bytes = kBytesW / kCluster * gridDim.x;
      pace = {static_cast<uint32_t>(*feed.ns_per_byte * bytes), ptx::global_ns()};
    }
    if (feed.map == nullptr) return own;
    ptx::acquire_map(feed.map);
    return feed.map;
  }

  // Opens the next stage and asks for W; X of the stage must follow.
  __device__ __forceinline__ void load_w(const CUtensorMap* map, const Work& work, int column) {
    pace.wait();
    ptx::wait(empty(cursor.stage), cursor.parity ^ 1);
    uint8_t* slice = w(cursor.stage) + rank * kSliceW * kBlockK * 2;
    ptx::arrive_expect(full(cursor.stage), kBytesW + kBytesX);
    if constexpr (kCluster == 1) {
      ptx::load_box(map, full(cursor.stage), slice, column, work.w_row, work.matrix);
    } else {
      const int first = work.w_row + static_cast<int>(rank) * kSliceW;
      ptx::load_box_multicast(map, full(cursor.stage), slice, column, first, work.matrix, kAll);
    }
  }

  __device__ __forceinline__ void load_x(const CUtensorMap* map, const Work& work, int column) {
    ptx::load_box(map, full(cursor.stage), x(cursor.stage), column, work.x_row);
    cursor.advance();
  }

  __device__ __forceinline__ void load_tile(const CUtensorMap* map_w, const CUtensorMap* map_x,
                                            const Work& work, int k_from, int k_to) {
    for (int column = k_from; column < k_to; column += kBlockK) {
      load_w(map_w, work, column);
      load_x(map_x, work, column);
    }
  }

  // k steps [from, to) of every tile that `find(tile, work)` finds. Weights don't depend on earlier
  // kernels: the first stages of W are on their way before those have ended, X only after.
  template <class Find>
  __device__ __forceinline__ void produce(const CUtensorMap* map_w, const CUtensorMap* map_x,
                                          int from, int to, int first, int step, Find find) {
    Work work;
    int ahead = 0;
    if (find(first, work)) {
      const Cursor<kStages> start = cursor;
      for (; ahead < kStages && from + ahead < to; ++ahead) {
        load_w(map_w, work, (from + ahead) * kBlockK);
        cursor.advance();
      }
      cursor = start;
    }
    ptx::wait_for_earlier_kernels();
    for (int tile = first; find(tile, work); tile += step) {
      for (int k = from; k < to; ++k) {
        if (ahead == 0) {
          load_w(map_w, work, k * kBlockK);
        } else {
          --ahead;
        }
        load_x(map_x, work, k * kBlockK);
      }
    }
  }

  // Called by the producer at the end. Waits, at its own barriers, until every stage it filled is
  // empty. So all arrivals from other CTAs of the cluster have landed before this CTA leaves. An
  // arrival at a CTA that has left is a launch failure, or lands in the barriers of the next CTA in
  // its place. (A cluster's barrier is not enough, as it orders threads only. An arrival at another
  // CTA may still be on its way when the thread that sent it has passed the barrier.)
  __device__ __forceinline__ void drain() {
    if constexpr (kCluster > 1) {
      for (int i = 0; i < kStages; ++i) {
        ptx::wait(empty(cursor.stage), cursor.parity ^ 1);
        cursor.advance();
      }
    }
  }

  // ---- consumers: two warpgroups -----------------------------------------------------------------

  // One thread of a warpgroup tells each CTA of the cluster: these threads, spread over the warps.
  __device__ __forceinline__ void release(int stage) const {
    const int thread = threadIdx.x % kWarpgroup;
    const int target = (thread / 32) + 4 * (thread % 32);
    if constexpr (kCluster == 1) {
      if (thread == 0) ptx::arrive(empty(stage));
    } else if (target < kCluster) {
      ptx::arrive_at(empty(stage), target);
    }
  }

  // Sums the tile over `steps` stages into `d`, which it clears first.
  __device__ __forceinline__ void multiply(float (&d)[kBX / 2], int group, int steps) {
    int before = 0;
    for (int step = 0; step < steps; ++step) {
      ptx::wait(full(cursor.stage), cursor.parity);
      const uint64_t a = wgmma::descriptor(w(cursor.stage) + group * 64 * kBlockK * 2);
      const uint64_t b = wgmma::descriptor(x(cursor.stage));
      wgmma::pin(d);
      wgmma::fence();
#pragma unroll
      for (int i = 0; i < kBlockK / 16; ++i) {
        wgmma::Mma<T, kBX>::run(d, a + i * wgmma::kNextK, b + i * wgmma::kNextK, step + i > 0);
      }
      wgmma::commit();
      wgmma::pin(d);
      wgmma::wait<1>();
      if (step > 0) release(before);
      before = cursor.stage;
      cursor.advance();
    }
    wgmma::wait<0>();
    wgmma::pin(d);
    release(before);
  }

  // Writes a tile through shared memory, so that rows of O leave in whole 128-byte lines.
  __device__ __forceinline__ void store(float (&d)[kBX / 2], int group, const Work& work,
                                        const Output& out) const {
    const int thread = threadIdx.x % kWarpgroup;
    const int column = work.column + group * 64;
    float bias[2];
    load_bias(bias, out.bias, column, out.columns);
#pragma unroll
    for (int chunk = 0; chunk < kBX; chunk += kChunk) {
      if (chunk < work.rows) {  // the same for all threads of the warpgroup
        stage_chunk(d, chunk, group, bias);
        ptx::named_barrier(1 + group, kWarpgroup);
        for (int i = thread; i < kChunk * 8; i += kWarpgroup) {
          const int row = i / 8, piece = i % 8;
          if (chunk + row >= work.rows) break;
          const uint4 values = *reinterpret_cast<const uint4*>(
              staging(group) + row * 128 + ((piece ^ (row % 8)) * 16));
          out.put(values, work.x_row + chunk + row, column + piece * 8);
        }
        ptx::named_barrier(1 + group, kWarpgroup);
      }
    }
  }

  // Of this thread's two rows of W, the first of which in its warpgroup is `first`; 0 without a bias.
  __device__ __forceinline__ void load_bias(float (&bias)[2], const uint16_t* values, int first,
                                            int end) const {
    const int thread = threadIdx.x % kWarpgroup, lane = thread % 32, warp = thread / 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int n = first + warp * 16 + half * 8 + lane / 4;
      bias[half] = values != nullptr && n < end ? widen(T{}, values[n]) : 0.0f;
    }
  }

  // Writes 16-bit values of `kChunk` rows, transposed to [row of X][64 rows of W]. Pieces of 16
  // bytes are swizzled by the row, so that neither writing nor reading has bank conflicts.
  __device__ __forceinline__ void stage_chunk(const float (&d)[kBX / 2], int chunk, int group,
                                              const float (&bias)[2]) const {
    const int thread = threadIdx.x % kWarpgroup, lane = thread % 32, warp = thread / 32;
    const int piece = 2 * warp + (lane / 8) % 2;
#pragma unroll
    for (int j = 0; j < kChunk; j += 16) {
      const float* v = &d[(chunk + j) / 2];
      const int row = j + lane / 16 * 8 + lane % 8;
      ptx::store_transposed(
          ptx::smem(staging(group)) + row * 128 + ((piece ^ (row % 8)) * 16),
          pack(T{}, v[0] + bias[0], v[1] + bias[0]), pack(T{}, v[2] + bias[1], v[3] + bias[1]),
          pack(T{}, v[4] + bias[0], v[5] + bias[0]), pack(T{}, v[6] + bias[1], v[7] + bias[1]));
    }
  }
};

// What every kernel starts with: barriers ready in the whole cluster before anyone uses them.
template <int kCluster>
__device__ __forceinline__ void start_together() {
  if constexpr (kCluster > 1) {
    ptx::cluster_arrive();
    ptx::cluster_wait();
  } else {
    __syncthreads();
  }
}
