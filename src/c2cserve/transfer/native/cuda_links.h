// The links of this process's GPUs.
//
//     in0 direct    copy engine of GPU 0        host --PCIe 0--> GPU 0
//     in0 by in1    relay kernel on GPU 1       host --PCIe 1--> SMs of GPU 1 --NVLink--> GPU 0
//     out0 by out1  relay kernel on GPU 1       GPU 0 --NVLink--> SMs of GPU 1 --PCIe 1--> host
//
// A relay has to be a kernel. A copy between host memory and GPU 0 takes the link of GPU 0, also
// when it is issued on another GPU's stream.
//
// All direct copies of a link are in one stream, so that a copy engine goes from one to the next.
// Relays have two streams: a kernel begins while the one before ends. Their priority is the
// highest, so that they come before kernels of the neighbour that wait.
//
// A copy engine takes some microsecond for each segment, and the host as long to describe it. So
// the same kernel carries direct micro-tasks of small segments, on the GPU itself:
//
//     in0 direct    kernel on GPU 0             host --PCIe 0--> SMs of GPU 0 --> its memory
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "links.h"
#include "relay_client.h"
#include "relay_kernel.h"

namespace c2c::transfer {

struct LinkPlace {
  int gpu;        // whose streams carry what takes the link
  void* context;  // of that GPU; null: another process has it, which may relay
  bool relays;
  // Direct micro-tasks whose segments are smaller on average are a kernel's; 0: none are.
  uint64_t kernel_bytes;
};

class CudaLinks : public Links {
 public:
  // `own` is the kernel of direct micro-tasks. Shorter segments than `batch_bytes` are described to
  // a copy engine in one call, others in a call each.
  CudaLinks(const std::string& library, const std::vector<LinkPlace>& places, RelayCode relay,
            RelayCode own, int depth, uint64_t batch_bytes);
  ~CudaLinks() override;

  void start(const Task& task) override;
  bool is_over(const Task& task) override;
  void recall(const Task& task) override;
  bool is_harmless(const Task& task) override;
  void check_host(uint64_t address) override;
  Mark mark(const Stream& stream) override;
  bool is_passed(Mark mark) override;
  void drop(Mark mark) noexcept override;
  void follow(const Stream& stream, const Task& task) override;
  void follow(const Stream& stream, Mark mark) override;
  Mark copy(int port, const std::vector<Piece>& pieces, const Stream* after) override;

  bool is_remote(int link) const override { return places_[link].context == nullptr; }
  bool takes(int link) const override;
  bool reaches(int link, const Piece& piece) const override;
  RelayClient& remote(int link) override { return *remotes_[link]; }

  void* relay_stream(int link, int lane) const;  // null: there is no such

 private:
  struct Slot {
    void* event = nullptr;
    uint32_t* recalled = nullptr;  // flags in host memory, of relays only
    uint32_t* started = nullptr;
    RelayParams params{};
  };

  void make_link(int link, int depth);
  void make_slots(int link, int depth, bool relays);
  void* new_stream();
  Slot& slot_of(const Task& task) { return slots_[task.link][task.slot]; }
  bool is_kernels(int link, const std::vector<Piece>& pieces) const;
  void move_pieces(int link, const std::vector<Piece>& pieces, void* stream);
  void copy_pieces(const std::vector<Piece>& pieces, void* stream);
  void launch_relay(Slot& slot, const std::vector<Piece>& pieces, void* stream);
  void* context_of(int gpu) const;

  Cuda cuda_;
  std::vector<LinkPlace> places_;
  uint64_t batch_bytes_;
  std::unique_ptr<RelayKernel> kernel_, own_kernel_;
  std::vector<std::unique_ptr<RelayClient>> remotes_;  // by link; null: a link of this process
  uint32_t* flags_ = nullptr;
  CudaPointer flags_address_ = 0;
  size_t flags_taken_ = 0;
  std::vector<void*> lanes_;        // of direct copies, one for each link
  std::vector<void*> small_lanes_;  // of small transfers
  std::vector<std::vector<void*>> relay_lanes_;
  std::vector<std::vector<void*>> kernel_lanes_;  // of direct micro-tasks of small segments
  std::vector<unsigned> relays_launched_, kernels_launched_;
  std::vector<std::vector<Slot>> slots_;
  std::vector<void*> events_;  // all that were made
};

}  // namespace c2c::transfer
