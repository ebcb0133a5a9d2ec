// What carries micro-tasks: GPUs (cuda_links.h), or functions of a test (called_links.h).
#pragma once
#include <stdexcept>
#include <vector>

#include "schedule.h"

namespace c2c::transfer {

struct Fault : std::runtime_error {  // of a link; the message has the driver's error
  using std::runtime_error::runtime_error;
};

using Mark = void*;  // a point in a stream

struct Stream {  // of a caller
  void* handle;
  int gpu;
};

class RelayClient;

// All functions throw `Fault`. The engine calls one of them at a time, from any thread.
class Links : public Remotes {
 public:
  virtual ~Links() = default;

  // A link that `is_remote`. Throws `std::invalid_argument` for others.
  virtual RelayClient& remote(int) { throw std::invalid_argument("the link is this process's"); }

  // Begins to copy the pieces of a micro-task over its link.
  virtual void start(const Task& task) = 0;
  // Returns whether it ended: with all bytes in place, unless it was recalled.
  virtual bool is_over(const Task& task) = 0;
  // Asks a relay to write nothing more. It will be over soon, if it is not stuck.
  virtual void recall(const Task& task) = 0;
  // Returns whether a recalled relay has written nothing and never will.
  virtual bool is_harmless(const Task& task) = 0;

  // Throws `std::invalid_argument` for host memory that is not pinned, as far as that is cheap to
  // see. A relay that reads such memory would break its whole GPU for this process.
  virtual void check_host(uint64_t address) = 0;

  // Returns a point after all that a stream has.
  virtual Mark mark(const Stream& stream) = 0;
  virtual bool is_passed(Mark mark) = 0;
  virtual void drop(Mark mark) noexcept = 0;
  // Lets what a stream is given later come after a micro-task that has been started. If another
  // process relays it, the caller waits: it was recalled.
  virtual void follow(const Stream& stream, const Task& task) = 0;
  // The same after a mark.
  virtual void follow(const Stream& stream, Mark mark) = 0;
  // Copies on the direct path, as one, after a mark (null: at once). Returns the point at its end.
  virtual Mark copy(int port, const std::vector<Piece>& pieces, const Stream* after) = 0;
};

}  // namespace c2c::transfer
