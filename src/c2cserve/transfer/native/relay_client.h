// A link of another process, which relays for this one (relay_server.h).
#pragma once
#include <atomic>
#include <vector>

#include "links.h"
#include "relay_channel.h"

namespace c2c::transfer {

// One thread at a time calls it, but for `lose`.
class RelayClient {
 public:
  // Takes a channel that no task is in. Its memory stays until `lose`, and all tasks are over.
  void connect(Channel* channel);
  // The server is gone with its process: nothing of it writes any more.
  void lose() { lost_ = true; }

  // The server has memory of this process at other addresses. Regions do not overlap.
  void share(uint64_t near, uint64_t far, uint64_t size);
  void unshare(uint64_t near);
  bool reaches(const Piece& piece) const;
  bool takes() const;  // its link has nothing better to do

  void start(const Task& task);  // throws `Fault` for memory that is not shared
  bool is_over(const Task& task) const;  // throws `Fault` if the server failed, or is lost
  bool has_ended(const Task& task) const;  // however it ended
  void recall(const Task& task);
  bool is_harmless(const Task& task) const;

 private:
  struct Region {
    uint64_t near, far, size;
  };
  uint64_t far(uint64_t address, uint64_t size) const;  // 0: it is not shared
  ChannelSlot& slot_of(const Task& task) const;

  Channel* channel_ = nullptr;
  std::vector<uint32_t> numbers_ = std::vector<uint32_t>(kChannelSlots);  // of the last micro-tasks
  std::vector<Region> regions_;  // in order
  std::atomic<bool> lost_{true};
};

}  // namespace c2c::transfer
