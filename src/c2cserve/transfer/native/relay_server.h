// The link of this process's GPU, lent to another process (relay_client.h).
//
//     host memory ──PCIe──▶ buffer on this GPU ──NVLink──▶ the other process's GPU
//
// Copy engines carry both halves, chunk by chunk, so steps of this process lose no SM. Lanes are
// streams with a buffer each: one chunk is on PCIe while the one before is on NVLink. Method: MMA,
// 3.4.
#pragma once
#include <atomic>
#include <deque>
#include <string>
#include <thread>
#include <vector>

#include "relay_channel.h"

namespace c2c::transfer {

// Its thread sleeps while there is nothing. While chunks are under way it looks at them every few
// microseconds, and begins the next one: what was begun cannot be recalled, so it is little.
class RelayServer {
 public:
  // Throws `Fault`. `channel` stays as long as this object does. No copy crosses a multiple of
  // `border_bytes`: registrations of host memory may meet there.
  RelayServer(const std::string& library, void* context, Channel* channel, uint64_t border_bytes);
  ~RelayServer();
  RelayServer(const RelayServer&) = delete;

  // Tells the client whether steps read over this GPU's link now.
  void set_streaming(bool streams) { write(channel_->streaming, streams); }
  uint32_t* moving() { return &channel_->moving; }
  int64_t relayed() const { return relayed_; }  // micro-tasks

 private:
  struct Job {  // a micro-task of the client's
    int slot;
    uint32_t number;
    size_t piece = 0;  // the first that is left
    uint64_t at = 0;   // bytes of it that are gone
  };
  struct Lane {
    void* stream = nullptr;
    CudaPointer buffer = 0;
    int slot = 0;        // of the chunk under way
    uint32_t moved = 0;  // what its word has after the chunk
    uint32_t ends = 0;   // the micro-task that ends with the chunk; 0: none
  };

  void free_all();
  void work();
  bool accept();
  bool begin();
  bool retire();
  void copy_chunk(Job& job);
  uint64_t part(const Piece& piece, uint64_t at, uint64_t most) const;
  void end(const Job& job);
  void fail(const Job& job);
  bool is_own() const { return read(channel_->moving) || read(channel_->streaming); }
  CudaPointer address_of(const uint32_t& word) const;

  Cuda cuda_;
  void* context_;
  Channel* channel_;
  uint64_t border_bytes_;
  CudaPointer channel_address_ = 0;
  bool registered_ = false;
  std::vector<Lane> lanes_ = std::vector<Lane>(kStageLanes);
  std::deque<Job> jobs_;
  std::vector<uint32_t> seen_ = std::vector<uint32_t>(kChannelSlots);
  int first_ = 0, flying_ = 0;  // lanes with chunks under way: the oldest one, and how many
  std::atomic<int64_t> relayed_{0};
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace c2c::transfer
