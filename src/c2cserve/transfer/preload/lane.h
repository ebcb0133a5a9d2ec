// A part of a copy goes over a neighbour's link, chunk by chunk, through buffers in its memory.
//
//   in    host memory --PCIe of the neighbour--> buffer --NVLink: the GPU reads--> the GPU's memory
//   out   the GPU's memory --NVLink: the GPU writes--> buffer --PCIe of the neighbour--> host memory
//
//   fills    | chunk 0 in buffer 0 | 1 in 1 | 2 in 2 | wait: buffer 0 is empty | 3 in 0 | ...
//   drains     wait: 0 is full | buffer 0 | wait | buffer 1 | ...
//
// Both streams have copies only, which copy engines carry. Of all memory, the other GPU has access
// to the buffers alone: they are mapped for both GPUs. Peer access would do the same, but then the
// driver maps each later allocation of a GPU for its peers too, which makes it slower.
#pragma once
#include <mutex>
#include <thread>
#include <tuple>

#include "driver.h"

namespace c2c::multipath {

// A stream of the program's. The default streams have one handle for all GPUs, or for all threads.
using Owner = std::tuple<int, void*, std::thread::id>;

constexpr int kBuffers = 3;

struct Part {
  CudaPointer target, source;
  uint64_t size;
  bool inward;  // to the GPU
};

struct PartEvents {
  void* begin;          // of the program's stream, for which the part waits
  void *start, *end;    // of the neighbour, around its copies
  void* last;           // of the GPU, after its last copy. For parts to it
};

constexpr int kSmallChunks = 8;  // of a part, at most. All others are as large as a buffer

// In the order of one stream of the program's.
class Lane {
 public:
  struct Side {
    int device;
    void* context;
    void* stream = nullptr;
    void* copied[kBuffers] = {};  // events: the side's last copy into a buffer, or out of it
  };

  // Throws `Fault`.
  Lane(const Driver& driver, Side gpu, Side neighbour);
  Lane(const Lane&) = delete;

  // Throws `Fault` if not all of the part was begun. Then nothing of it is written later.
  void launch(const Part& part, const PartEvents& events);

  Owner owner;     // whose copies it has
  int copies = 0;  // that are not known to be over
  int chunks = 0;  // of these

 private:
  void make_side(Side& side);
  void issue(const Part& part, const PartEvents& events);
  void step(const Side& side, void* full_or_empty, const Part& chunk, int buffer, void* start);
  void record(const Side& side, void* event);
  void settle();

  const Driver& driver_;
  std::mutex launching_;
  Side gpu_, neighbour_;
  CudaPointer memory_ = 0;
  int next_ = 0;  // buffer
};

}  // namespace c2c::multipath
