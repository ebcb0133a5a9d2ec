// What the library says: each reason why a large copy took one link, once, and the sums at the end.
#pragma once
#include <stdint.h>

#include <string>

namespace c2c::multipath {

enum Reason : int {
  kSpread,      // over several links: the copy took no plain path
  kPageable,    // host memory that is not pinned
  kManaged,     // memory that CUDA moves itself
  kNotLink,     // no copy between host memory and a GPU
  kPartOfRange, // a copy that leaves its allocation
  kHostAccess,  // pinned memory that no neighbour can read
  kCapture,     // into a graph
  kContext,     // not the primary context of the GPU whose memory it is
  kNoNeighbour, // no other GPU has a fast link to this one
  kBusy,        // neighbours have copies of their own, or too many streams wait
  kForked,      // a child of a process that had set up its links
  kReset,       // after a reset of a GPU
  kFault,       // a call of the driver's failed
  kReasons,
};

struct Counts {
  int64_t copies[kReasons], bytes[kReasons], relayed_bytes;
};

// Counts a large copy. Says why it was not spread, the first time for each reason but the first.
void count(Reason reason, uint64_t bytes, const char* detail = "");
void count_relayed(uint64_t bytes);
void say(const std::string& line);  // to standard error

}  // namespace c2c::multipath
