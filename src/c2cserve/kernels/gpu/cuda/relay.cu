// relay: a neighbour's SMs copy between host memory and another GPU's memory, in one hop.
//
//   host memory  --PCIe of this GPU-->  shared memory  --NVLink-->  the other GPU, or the reverse
//
//   ring of a CTA:   | store is read | store is read | loads on their way ................. |
//                      kReading stages                 all other stages
//
// One thread of a CTA moves tiles through a ring of stages with the bulk copy engine. What is in
// flight is then what the ring holds, and no warp waits for bytes. CTAs take tiles in turn, over
// all pieces. Other warps copy what the engine cannot: bytes before and after multiples of 16, and
// pieces whose two addresses differ modulo 16.
//
// The host can recall a launch. It then knows that no byte is written any more as soon as the launch
// is over, or was not marked as started: each CTA marks the start before it looks for a recall. A
// launch is over when its bulk stores have been written, not only read out of shared memory.
//
// The same kernel carries small segments between host memory and the memory of its own GPU. Such a
// launch has no flags, and is not recalled.
//
// Built with -D: PIECES, THREADS.
#include <stdint.h>

#include "ptx.cuh"

constexpr int kWarp = 32;
constexpr uint32_t kTileBytes = 4096;  // of a warp; one of the ring is a stage
constexpr int kWarps = THREADS / kWarp;
constexpr int kStagesMost = 16;
constexpr int kReading = 2;  // stores that may still read their stage when it is loaded next

struct Piece {
  uint64_t target, source, size;
};

struct RelayParams {
  const uint32_t* recalled;  // host memory: the launch of this number writes nothing more
  uint32_t* started;         // host memory: the last launch of which a CTA has begun; or null
  uint32_t number, pieces;
  uint32_t stages, stage_bytes;  // stages are kReading + 1 to kStagesMost
  uint32_t recall_poll_bytes;    // of a CTA, between two looks for a recall
  Piece piece[PIECES];
};

namespace {

// Returns the number of the launch that was recalled last.
__device__ __forceinline__ uint32_t last_recalled(const RelayParams& p) {
  uint32_t number;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(number) : "l"(p.recalled) : "memory");
  return number;
}

// Looks for a recall now and then. A look takes a round trip over PCIe, so that nothing waits for
// it: its answer is used at the next one. One thread of a CTA looks for all warps, since many reads
// of one line of host memory may be answered one after the other.
class Looks {
 public:
  __device__ explicit Looks(const RelayParams& p) : p_(p) {}

  // `bytes` are what the CTA has copied since the last call.
  __device__ bool recalled(uint32_t bytes) {
    since_ += bytes;
    if (since_ < p_.recall_poll_bytes || p_.started == nullptr) return false;
    since_ = 0;
    const uint32_t seen = seen_;
    seen_ = last_recalled(p_);
    return seen == p_.number;
  }

 private:
  const RelayParams& p_;
  uint32_t since_ = 0;
  uint32_t seen_ = 0;  // no launch has this number
};

// The part of a piece that bulk copies can carry. Before it and after it are up to 15 bytes.
struct Body {
  uint64_t begin, size;

  __device__ explicit Body(const Piece& piece) : begin(0), size(0) {
    if ((piece.target ^ piece.source) % 16 != 0) return;
    begin = min((16 - piece.target % 16) % 16, piece.size);
    size = (piece.size - begin) / 16 * 16;
  }
};

template <typename T>
__device__ __forceinline__ void copy_elements(uint64_t target, uint64_t source, uint64_t bytes,
                                              uint32_t lane) {
  for (uint64_t at = lane * sizeof(T); at < bytes; at += kWarp * sizeof(T)) {
    *reinterpret_cast<T*>(target + at) = *reinterpret_cast<const T*>(source + at);
  }
}

// Copies with elements of T, and single bytes before and after them. Both addresses are the same
// modulo sizeof(T).
template <typename T>
__device__ __noinline__ void copy_any(uint64_t target, uint64_t source, uint64_t bytes,
                                      uint32_t lane) {
  const uint64_t misaligned = target % sizeof(T);
  uint64_t head = misaligned ? sizeof(T) - misaligned : 0;
  if (head > bytes) head = bytes;
  const uint64_t body = (bytes - head) / sizeof(T) * sizeof(T);
  copy_elements<uint8_t>(target, source, head, lane);
  copy_elements<T>(target + head, source + head, body, lane);
  copy_elements<uint8_t>(target + head + body, source + head + body, bytes - head - body, lane);
}

__device__ __forceinline__ void copy_tile(uint64_t target, uint64_t source, uint64_t bytes,
                                          uint32_t lane) {
  const uint64_t apart = target ^ source;
  if (apart % 8 == 0) {
    copy_any<uint2>(target, source, bytes, lane);
  } else if (apart % 4 == 0) {
    copy_any<uint32_t>(target, source, bytes, lane);
  } else {
    copy_any<uint8_t>(target, source, bytes, lane);
  }
}

struct RingShared {
  uint64_t full[kStagesMost];  // mbarriers
  uint64_t target[kStagesMost];
  uint32_t bytes[kStagesMost];
};

struct Shared {
  RingShared ring;
  volatile uint32_t recalled;  // for the warps without the ring, by the first of them
};

// Of one thread. The engine loads a tile into each stage in turn, and stores it from there.
class Ring {
 public:
  __device__ Ring(RingShared& shared, uint8_t* memory, uint32_t stages, uint32_t stage_bytes)
      : shared_(shared), memory_(memory), stages_(stages), stage_bytes_(stage_bytes) {
    for (uint32_t i = 0; i < stages; ++i) ptx::barrier_init(&shared.full[i], 1);
    ptx::barrier_init_fence();
  }

  __device__ void push(uint64_t target, uint64_t source, uint32_t bytes) {
    if (loaded_ - stored_ == stages_ - kReading) store();
    // The stage's last store is older than the latest kReading ones.
    if (loaded_ >= stages_) ptx::wait_stores_read<kReading>();
    shared_.target[load_stage_] = target;
    shared_.bytes[load_stage_] = bytes;
    uint64_t* full = &shared_.full[load_stage_];
    ptx::arrive_expect(full, bytes);
    ptx::load_bytes(stage(load_stage_), reinterpret_cast<const void*>(source), bytes, full);
    ++loaded_;
    load_stage_ = load_stage_ + 1 == stages_ ? 0 : load_stage_ + 1;
  }

  // Ends what is under way, with the stores that are left or without them. Loads are waited for in
  // any case: shared memory is another CTA's afterwards.
  __device__ void drain(bool stores) {
    while (stored_ < loaded_) {
      if (stores)
        store();
      else
        await_load();
    }
    ptx::wait_stores_done<0>();
  }

 private:
  __device__ uint8_t* stage(uint32_t number) { return memory_ + number * stage_bytes_; }

  __device__ uint32_t await_load() {
    const uint32_t number = store_stage_;
    ptx::wait(&shared_.full[number], parity_);
    ++stored_;
    store_stage_ = number + 1 == stages_ ? 0 : number + 1;
    parity_ ^= store_stage_ == 0;
    return number;
  }

  __device__ void store() {
    const uint32_t number = await_load();
    void* target = reinterpret_cast<void*>(shared_.target[number]);
    ptx::store_bytes(target, stage(number), shared_.bytes[number]);
    ptx::commit_stores();
  }

  RingShared& shared_;
  uint8_t* memory_;
  uint32_t stages_, stage_bytes_;
  uint32_t loaded_ = 0, stored_ = 0, load_stage_ = 0, store_stage_ = 0, parity_ = 0;
};

// Copies the bodies of all pieces.
__device__ __forceinline__ void copy_bodies(const RelayParams& p, Ring& ring) {
  Looks looks(p);
  uint64_t tile = blockIdx.x;  // of the current piece: the CTA's next one
  for (uint32_t i = 0; i < p.pieces; ++i) {
    const Piece piece = p.piece[i];
    const Body body(piece);
    const uint64_t tiles = (body.size + p.stage_bytes - 1) / p.stage_bytes;
    for (; tile < tiles; tile += gridDim.x) {
      if (looks.recalled(p.stage_bytes)) return ring.drain(false);
      const uint64_t at = tile * p.stage_bytes;
      const uint64_t bytes = min(uint64_t{p.stage_bytes}, body.size - at);
      ring.push(piece.target + body.begin + at, piece.source + body.begin + at, uint32_t(bytes));
    }
    tile -= tiles;
  }
  ring.drain(true);
}

// Copies the rest of all pieces, with `warps` warps of each CTA.
__device__ __forceinline__ void copy_rest(const RelayParams& p, Shared& shared, uint32_t warp,
                                          uint32_t warps, uint32_t lane) {
  const uint32_t worker = blockIdx.x * warps + warp, workers = gridDim.x * warps;
  const bool looker = warp == 0 && lane == 0;
  Looks looks(p);
  uint64_t tile = worker;  // of the current piece: the warp's next one
  for (uint32_t i = 0; i < p.pieces; ++i) {
    const Piece piece = p.piece[i];
    const Body body(piece);
    if (body.size > 0) {
      if (i % workers != worker) continue;
      const uint64_t end = body.begin + body.size;
      copy_any<uint8_t>(piece.target, piece.source, body.begin, lane);
      copy_any<uint8_t>(piece.target + end, piece.source + end, piece.size - end, lane);
      continue;
    }
    // Tiles but the first begin at multiples of 16 in the target.
    const uint64_t skew = piece.target % 16;
    const uint64_t tiles = (skew + piece.size + kTileBytes - 1) / kTileBytes;
    for (; tile < tiles; tile += workers) {
      if (looker && looks.recalled(warps * kTileBytes)) shared.recalled = 1;
      if (__any_sync(0xffffffffu, shared.recalled != 0)) return;
      const uint64_t begin = tile == 0 ? 0 : tile * kTileBytes - skew;
      const uint64_t end = min((tile + 1) * kTileBytes - skew, piece.size);
      copy_tile(piece.target + begin, piece.source + begin, end - begin, lane);
    }
    tile -= tiles;
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    relay(const __grid_constant__ RelayParams p) {
  extern __shared__ __align__(128) uint8_t stages[];
  __shared__ Shared shared;
  // Started is written before recalled is read, by the same thread: the host writes and reads them
  // in the opposite order, so that one of the two sees the other.
  bool stop = false;
  if (threadIdx.x == 0) {
    shared.recalled = 0;
    if (p.started != nullptr) {
      asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p.started), "r"(p.number)
                   : "memory");
      asm volatile("fence.sc.sys;" ::: "memory");
      stop = last_recalled(p) == p.number;
    }
  }
  if (__syncthreads_or(stop)) return;

  const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (warp == 0) {
    if (lane != 0) return;
    Ring ring(shared.ring, stages, p.stages, p.stage_bytes);
    copy_bodies(p, ring);
    return;
  }
  copy_rest(p, shared, warp - 1, kWarps - 1, lane);
}
