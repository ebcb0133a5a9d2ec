// Spreads a copy over the links of several GPUs, in the order of its stream.
//
//     program's stream   ... | start |  direct part, by the copy engine  | wait | wait | ...
//                                └──────────────┐                           ▲      ▲
//     lane on neighbour 1                 wait | relay kernel | end ────────┘      │
//     lane on neighbour 2                 wait | relay kernel | end ───────────────┘
//
// All of it is launched when the program asks for the copy, and events between GPUs do the rest. No
// thread takes part while the copy waits or moves. So nothing depends on whether CUDA lets another
// thread in: it may hold its locks while it loads a kernel or frees memory, and waits for streams.
//
// How much each link carries is decided at the launch, by how fast its last parts were. A neighbour
// that has large copies of its own in the same direction is left out.
#pragma once
#include <atomic>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <tuple>
#include <vector>

#include "../native/relay_kernel.h"
#include "memory.h"

namespace c2c::multipath {

// A stream of the program's. The default streams have one handle for all GPUs, or for all threads.
using Owner = std::tuple<int, void*, std::thread::id>;

struct Lane {  // a stream of relays on a neighbour
  void* handle = nullptr;
  Owner owner;     // whose copies it has
  int copies = 0;  // that are not known to be over
};

struct Link {  // of a GPU, as a neighbour of another one
  int gpu;
  double bytes_per_ms;  // of its last relays for that GPU, in one direction
};

struct Gpu {
  int device = -1;
  void* context = nullptr;  // null: not set up
  std::atomic<bool> broken{false};  // no context, or an error in it
  std::vector<std::unique_ptr<Lane>> lanes;
  std::vector<void*> events;  // that nothing uses
  bool sought = false;        // whether the links below were looked for
  std::vector<Link> links[2];  // neighbours for copies out, and in
  double direct_bytes_per_ms[2];
};

struct Relay {
  Link* link = nullptr;
  Lane* lane = nullptr;
  void *start = nullptr, *end = nullptr;  // events
  uint64_t at = 0, size = 0;
  bool launched = false;
};

struct Spread {  // a copy that was begun
  int gpu = -1;
  bool inward = false;
  void* stream = nullptr;
  void *start = nullptr, *direct_end = nullptr;  // events
  uint64_t direct_size = 0;
  std::vector<Relay> relays;
};

class Paths {
 public:
  // Throws `Fault`.
  Paths();

  // Begins a copy. Returns `kSpread` with the driver's result, or why nothing was begun.
  Reason begin(const Copy& copy, CudaResult* result);

 private:
  Reason check_stream(const Copy& copy, void** context);
  void set_up(Gpu& gpu);
  void seek_links(int number);
  bool reaches(int from, int to);
  std::unique_ptr<Spread> reserve(const Copy& copy, const Memory& memory, Reason* reason);
  bool has_own(int gpu, bool inward) const;
  bool take(Relay& relay, const Owner& owner);
  Lane* lane_for(Gpu& gpu, const Owner& owner);
  std::unique_ptr<Lane> new_lane(bool first);
  void* event_of(Gpu& gpu);
  void divide(Spread& spread, uint64_t size);
  void launch(const Copy& copy, Relay& relay, void* start);
  CudaResult run(const Copy& copy, Spread& spread);
  void collect();
  bool is_over(const Spread& spread);
  void learn(const Spread& spread);
  void give_back(Spread& spread);
  void give_back(Relay& relay);
  double rate(void* start, void* end, uint64_t size, void* context);

  Driver driver_;
  std::vector<char> cubin_;
  std::unique_ptr<transfer::RelayKernel> kernel_;
  CudaPointer words_ = 0;  // that a relay looks at and writes
  std::vector<Gpu> gpus_;
  std::mutex mutex_;
  std::list<std::unique_ptr<Spread>> begun_;
};

}  // namespace c2c::multipath
