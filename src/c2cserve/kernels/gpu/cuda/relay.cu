// relay: a neighbour's SMs copy between host memory and another GPU's memory, in one hop.
//
//   host memory  --PCIe of this GPU-->  registers  --NVLink-->  the other GPU, or the reverse
//
// Few CTAs are enough to fill the link. Warps take tiles of kTileBytes in turn, over all pieces.
//
// The host can recall a launch. It then knows that no byte is written any more as soon as the launch
// is over, or was not marked as started: each CTA marks the start before it looks for a recall.
//
// Built with -D: PIECES, THREADS.
#include <stdint.h>

constexpr int kVectors = 8;  // 16-byte loads in flight in each thread
constexpr int kWarp = 32;
constexpr uint32_t kTileBytes = kVectors * kWarp * 16;
constexpr int kTilesPerLook = 8;  // a recall is looked for this often
constexpr int kWarps = THREADS / kWarp;

struct Piece {
  uint64_t target, source, size;
};

struct RelayParams {
  const uint32_t* recalled;  // host memory: the launch of this number writes nothing more
  uint32_t* started;         // host memory: the last launch of which a CTA has begun
  uint32_t number, pieces;
  Piece piece[PIECES];
};

namespace {

// Nothing is read twice, so L1 is left to those who need it.
__device__ __forceinline__ uint4 load(const uint4* source) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(source)
               : "memory");
  return v;
}

__device__ __forceinline__ void store(uint4* target, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ bool is_recalled(const RelayParams& p) {
  uint32_t last;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(last) : "l"(p.recalled) : "memory");
  return last == p.number;
}

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
  if (bytes == kTileBytes && (target | source) % 16 == 0) {
    uint4 v[kVectors];
    const uint4* from = reinterpret_cast<const uint4*>(source) + lane;
    uint4* to = reinterpret_cast<uint4*>(target) + lane;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) v[i] = load(from + i * kWarp);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) store(to + i * kWarp, v[i]);
  } else if (apart % 16 == 0) {
    copy_any<uint4>(target, source, bytes, lane);
  } else if (apart % 8 == 0) {
    copy_any<uint2>(target, source, bytes, lane);
  } else if (apart % 4 == 0) {
    copy_any<uint32_t>(target, source, bytes, lane);
  } else {
    copy_any<uint8_t>(target, source, bytes, lane);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    relay(const __grid_constant__ RelayParams p) {
  // Started is written before recalled is read, by the same thread: the host writes and reads them
  // in the opposite order, so that one of the two sees the other.
  bool stop = false;
  if (threadIdx.x == 0) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p.started), "r"(p.number) : "memory");
    asm volatile("fence.sc.sys;" ::: "memory");
    stop = is_recalled(p);
  }
  if (__syncthreads_or(stop)) return;

  const uint32_t lane = threadIdx.x % kWarp;
  const uint64_t warps = static_cast<uint64_t>(gridDim.x) * kWarps;
  const uint64_t warp = static_cast<uint64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  uint64_t first = 0;  // tile of the piece
  int turn = 0;
  for (uint32_t i = 0; i < p.pieces; ++i) {
    const Piece piece = p.piece[i];
    // Tiles but the first begin at multiples of 16 in the target.
    const uint64_t skew = piece.target % 16;
    const uint64_t tiles = (skew + piece.size + kTileBytes - 1) / kTileBytes;
    // The first tile of the piece that is this warp's, as tiles of all pieces are dealt in turn.
    uint64_t tile = (warp + warps - first % warps) % warps;
    for (; tile < tiles; tile += warps) {
      if (++turn % kTilesPerLook == 0) {
        const bool seen = lane == 0 && is_recalled(p);
        if (__any_sync(0xffffffffu, seen)) return;
      }
      const uint64_t begin = tile == 0 ? 0 : tile * kTileBytes - skew;
      const uint64_t end = min((tile + 1) * kTileBytes - skew, piece.size);
      copy_tile(piece.target + begin, piece.source + begin, end - begin, lane);
    }
    first += tiles;
  }
}
