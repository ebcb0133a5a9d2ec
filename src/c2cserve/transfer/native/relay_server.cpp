#include "relay_server.h"

#include <limits.h>
#include <linux/futex.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "links.h"

namespace c2c::transfer {

RelayServer::RelayServer(const std::string& library, void* context, Channel* channel)
    : cuda_(library), context_(context), channel_(channel) {}

RelayServer::RelayServer(const std::string& library, void* context, RelayCode code,
                         Channel* channel)
    : RelayServer(library, context, channel) {  // from now on, what is made here is freed
  const Current current(cuda_, context);
  kernel_ = std::make_unique<RelayKernel>(cuda_, code);
  cuda_.check("cuMemHostRegister",
              cuda_.host_register(channel, sizeof(Channel), kPortableMappedMemory));
  registered_ = true;
  cuda_.check("cuMemHostGetDevicePointer", cuda_.host_address(&channel_address_, channel, 0));
  int lowest = 0, highest = 0;
  cuda_.check("cuCtxGetStreamPriorityRange", cuda_.priorities(&lowest, &highest));
  for (int i = 0; i < kRelayLanes; ++i) {
    void* stream = nullptr;
    cuda_.check("cuStreamCreateWithPriority",
                cuda_.stream_create(&stream, kNonBlockingStream, lowest));
    lanes_.push_back(stream);
  }
  RelayParams params{};
  params.recalled = address_of(channel->slot[0].recalled);
  params.started = address_of(channel->slot[0].started);
  kernel_->prepare(lanes_, params);
  thread_ = std::thread(&RelayServer::work, this);
}

// The client sees what was not launched as failed. What fails here is left to the end of the
// process.
RelayServer::~RelayServer() {
  stopping_ = true;
  syscall(SYS_futex, &channel_->posted, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  if (thread_.joinable()) thread_.join();
  void* popped;
  if (cuda_.push(context_) != kCudaOk) return;
  for (void* stream : lanes_) cuda_.stream_synchronize(stream);
  for (ChannelSlot& slot : channel_->slot) {
    const uint32_t number = read(slot.submitted);
    if (read(slot.done) != number) write(slot.failed, number);
  }
  for (void* stream : lanes_) cuda_.stream_destroy(stream);
  kernel_.reset();
  if (registered_) cuda_.host_unregister(channel_);
  cuda_.pop(&popped);
}

CudaPointer RelayServer::address_of(const uint32_t& word) const {
  return channel_address_ +
         (reinterpret_cast<const char*>(&word) - reinterpret_cast<const char*>(channel_));
}

void RelayServer::work() {
  prctl(PR_SET_NAME, "relays");
  while (!stopping_) {
    const uint32_t posted = read(channel_->posted);
    if (launch_all()) continue;
    const timespec most{0, 200'000'000};  // a wake-up before the wait is not lost, but `stopping_` is
    syscall(SYS_futex, &channel_->posted, FUTEX_WAIT, posted, &most, nullptr, 0);
  }
}

// Returns whether there was anything to launch.
bool RelayServer::launch_all() {
  bool found = false;
  for (int i = 0; i < kChannelSlots; ++i) {
    const uint32_t number = read(channel_->slot[i].submitted);
    if (number == seen_[i]) continue;
    found = true;
    seen_[i] = number;
    try {
      launch(i, number);
    } catch (const Fault&) {  // the process meets the error of its GPU, too
      write(channel_->slot[i].recalled, number);  // it may have been launched
      write(channel_->slot[i].failed, number);
    }
  }
  return found;
}

void RelayServer::launch(int at, uint32_t number) {
  ChannelSlot& slot = channel_->slot[at];
  if (read(slot.recalled) == number) {
    write(slot.done, number);
    return;
  }
  if (slot.pieces > kRelayPieces) throw Fault("a relay has too many pieces");
  const Current current(cuda_, context_);
  void* stream = lanes_[next_lane_++ % kRelayLanes];
  RelayParams params{};
  params.recalled = address_of(slot.recalled);
  params.started = address_of(slot.started);
  params.number = number;
  kernel_->launch(params, slot.piece, slot.pieces, stream);
  cuda_.check("cuStreamWriteValue32",
              cuda_.stream_write(stream, address_of(slot.done), number, 0));
  ++launches_;
}

}  // namespace c2c::transfer
