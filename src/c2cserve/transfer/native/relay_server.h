// The link of this process's GPU, lent to another process (relay_client.h).
#pragma once
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "relay_channel.h"

namespace c2c::transfer {

// Launches what a client submits, on streams of the lowest priority: steps of this process come
// first. Its thread sleeps while there is nothing.
class RelayServer {
 public:
  // Throws `Fault`. `channel` stays as long as this object does.
  RelayServer(const std::string& library, void* context, RelayCode code, Channel* channel);
  ~RelayServer();
  RelayServer(const RelayServer&) = delete;

  // Tells the client whether steps read over this GPU's link now.
  void set_streaming(bool streams) { write(channel_->streaming, streams); }
  uint32_t* moving() { return &channel_->moving; }
  int64_t launches() const { return launches_; }

 private:
  RelayServer(const std::string& library, void* context, Channel* channel);
  void work();
  bool launch_all();
  void launch(int slot, uint32_t number);
  CudaPointer address_of(const uint32_t& word) const;

  Cuda cuda_;
  void* context_;
  std::unique_ptr<RelayKernel> kernel_;
  Channel* channel_;
  CudaPointer channel_address_ = 0;
  bool registered_ = false;
  std::vector<void*> lanes_;
  std::vector<uint32_t> seen_ = std::vector<uint32_t>(kChannelSlots);
  unsigned next_lane_ = 0;
  std::atomic<int64_t> launches_{0};
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace c2c::transfer
