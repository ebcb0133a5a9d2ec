// What relay.cu needs of CUDA, on one processor: threads run one after the other. Bulk copies happen
// at the latest or the earliest moment that the instructions allow, so that a stage that is used
// again too soon, or a wait that is missing, gives wrong bytes.
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <deque>
#include <map>

using std::min;

struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};
struct Index {
  uint32_t x;
};

#define __device__
#define __global__
#define __shared__ static
#define __forceinline__ inline
#define __noinline__
#define __align__(bytes)
#define __grid_constant__
#define __launch_bounds__(threads, blocks)

static Index threadIdx, blockIdx, gridDim;
static uint8_t stages[232448];
static bool stopped;            // of a CTA: what its first thread saw
static bool loads_late, stores_late;
static int64_t looks_left;      // a recall comes after so many looks; negative: never
static int64_t faults;

static bool __syncthreads_or(bool stop) { return stopped |= stop; }
static bool __any_sync(uint32_t, bool any) { return any; }
static uint32_t look(uint32_t number) {
  if (looks_left < 0) return 0;
  return looks_left == 0 ? number : (--looks_left, 0);
}

namespace ptx {

struct Copy {
  void* target;
  const void* source;
  uint32_t bytes;
};
struct Barrier {
  uint32_t phase = 0, expected = 0;
  Copy load{};
};

static std::map<uint64_t*, Barrier> barriers;
static std::deque<Copy> stores;

inline void run(const Copy& copy) { memcpy(copy.target, copy.source, copy.bytes); }
inline void expect(bool right) { faults += !right; }

inline void barrier_init(uint64_t* barrier, uint32_t) { barriers[barrier] = {}; }
inline void barrier_init_fence() {}
inline void arrive_expect(uint64_t* barrier, uint32_t bytes) {
  expect(barriers.at(barrier).expected == 0);
  barriers.at(barrier).expected = bytes;
}

inline void land(Barrier& one) {
  run(one.load);
  one.expected = 0;
  ++one.phase;
}

inline void load_bytes(void* target, const void* source, uint32_t bytes, uint64_t* barrier) {
  Barrier& one = barriers.at(barrier);
  expect(one.expected == bytes && bytes % 16 == 0 && bytes > 0);
  expect(reinterpret_cast<uintptr_t>(source) % 16 == 0);
  one.load = {target, source, bytes};
  if (!loads_late) land(one);
}

inline void wait(uint64_t* barrier, uint32_t parity) {
  Barrier& one = barriers.at(barrier);
  if (one.phase % 2 == parity && one.expected > 0) land(one);
  expect(one.phase % 2 != parity);  // else it would wait for ever
}

inline void store_bytes(void* target, const void* source, uint32_t bytes) {
  expect(reinterpret_cast<uintptr_t>(target) % 16 == 0);
  stores.push_back({target, source, bytes});
  if (!stores_late) run(stores.back());
}
inline void commit_stores() {}

template <int kPending>
void wait_stores_done() {
  while (stores.size() > kPending) {
    if (stores_late) run(stores.front());
    stores.pop_front();
  }
}
template <int kPending>
void wait_stores_read() {
  wait_stores_done<kPending>();
}

// At a CTA's end nothing may be in flight: its shared memory is another one's then.
inline void end_cta() {
  expect(stores.empty());
  for (const auto& [_, one] : barriers) expect(one.expected == 0);
  stores.clear();
  barriers.clear();
}

}  // namespace ptx
