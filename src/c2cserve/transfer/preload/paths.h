// Spreads a copy over the links of several GPUs, in the order of its stream.
//
//     program's stream   ... | start |  direct part, by the copy engine  | wait | wait | ...
//                                └──────────────┐                           ▲      ▲
//     lane by neighbour 1                 wait | chunks in two hops ────────┘      │
//     lane by neighbour 2                 wait | chunks in two hops ───────────────┘
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
#include <vector>

#include "lane.h"
#include "memory.h"

namespace c2c::multipath {

struct Link {  // of a GPU, as a neighbour of another one
  int gpu;
  double bytes_per_ms[2];  // of its last parts for that GPU, out and in
  std::vector<std::unique_ptr<Lane>> lanes;
};

struct Gpu {
  int device = -1;
  void* context = nullptr;  // null: not set up
  std::atomic<bool> broken{false};  // no context, or an error in it
  std::vector<void*> events;  // that nothing uses
  bool sought = false;        // whether the links below were looked for
  std::vector<Link> links;    // neighbours
  double direct_bytes_per_ms[2];
};

struct Relay {
  Link* link = nullptr;
  Lane* lane = nullptr;
  PartEvents events{};
  uint64_t at = 0, size = 0;
  int chunks = 0;
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

// Returns the event for which the program's stream waits.
inline void* last_of(const Spread& spread, const Relay& relay) {
  return spread.inward ? relay.events.last : relay.events.end;
}

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
  bool reaches(int gpu, int neighbour);
  std::unique_ptr<Spread> reserve(const Copy& copy, const Memory& memory, const Owner& owner,
                                  Reason* reason);
  bool has_own(int gpu, bool inward) const;
  bool take(Relay& relay, const Spread& spread, const Owner& owner);
  Lane* lane_for(const Gpu& gpu, Link& link, const Owner& owner);
  void* event_of(Gpu& gpu);
  void divide(Spread& spread, uint64_t size);
  uint64_t room_of(const Lane& lane, uint64_t part) const;
  bool will_have_room(const Owner& owner, bool is_long);
  bool launch(const Copy& copy, const Spread& spread, Relay& relay);
  CudaResult run(const Copy& copy, Spread& spread);
  void collect();
  bool is_over(const Spread& spread);
  void learn(const Spread& spread);
  void give_back(Spread& spread);
  void give_back(const Spread& spread, Relay& relay);
  double rate(void* start, void* end, uint64_t size, void* context);

  Driver driver_;
  std::vector<Gpu> gpus_;
  std::mutex mutex_;
  std::list<std::unique_ptr<Spread>> begun_;
};

}  // namespace c2c::multipath
