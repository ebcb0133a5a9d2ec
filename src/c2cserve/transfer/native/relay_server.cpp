#include "relay_server.h"

#include <limits.h>
#include <linux/futex.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

#include "links.h"

namespace c2c::transfer {
namespace {

// What was begun delays this GPU's own copies: the chunks of all lanes are 57 us of a link. A look,
// and to begin another chunk, takes half of that, so the link stays at work.
constexpr uint64_t kChunkBytes = 1 << 20;
constexpr size_t kChunkParts = 64;   // small pieces share a chunk
constexpr uint64_t kAligned = 256;   // parts, in a buffer
constexpr long kLookNs = 10'000, kSleepNs = 200'000'000;

void sleep_ns(long ns) {
  const timespec time{0, ns};
  nanosleep(&time, nullptr);
}

}  // namespace

RelayServer::RelayServer(const std::string& library, void* context, Channel* channel,
                         uint64_t border_bytes)
    : cuda_(library), context_(context), channel_(channel), border_bytes_(border_bytes) {
  const Current current(cuda_, context);
  try {
    cuda_.check("cuMemHostRegister",
                cuda_.host_register(channel, kChannelBytes, kPortableMappedMemory));
    registered_ = true;
    cuda_.check("cuMemHostGetDevicePointer", cuda_.host_address(&channel_address_, channel, 0));
    int lowest = 0, highest = 0;
    cuda_.check("cuCtxGetStreamPriorityRange", cuda_.priorities(&lowest, &highest));
    for (Lane& lane : lanes_) {
      cuda_.check("cuStreamCreateWithPriority",
                  cuda_.stream_create(&lane.stream, kNonBlockingStream, lowest));
      cuda_.check("cuMemAlloc", cuda_.alloc(&lane.buffer, kChunkBytes));
    }
  } catch (const Fault&) {
    free_all();
    throw;
  }
  thread_ = std::thread(&RelayServer::work, this);
}

// The client sees what was not relayed as failed.
RelayServer::~RelayServer() {
  stopping_ = true;
  syscall(SYS_futex, &channel_->posted, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  thread_.join();
  void* popped;
  if (cuda_.push(context_) != kCudaOk) return;
  for (Lane& lane : lanes_) cuda_.stream_synchronize(lane.stream);
  for (ChannelSlot& slot : channel_->slot) {
    const uint32_t number = read(slot.submitted);
    if (read(slot.done) != number) write(slot.failed, number);
  }
  free_all();
  cuda_.pop(&popped);
}

// In the GPU's context. What fails here is left to the end of the process.
void RelayServer::free_all() {
  for (Lane& lane : lanes_) {
    if (lane.stream != nullptr) cuda_.stream_destroy(lane.stream);
    if (lane.buffer != 0) cuda_.free(lane.buffer);
  }
  if (registered_) cuda_.host_unregister(channel_);
}

CudaPointer RelayServer::address_of(const uint32_t& word) const {
  return channel_address_ +
         (reinterpret_cast<const char*>(&word) - reinterpret_cast<const char*>(channel_));
}

void RelayServer::work() {
  prctl(PR_SET_NAME, "relays");
  prctl(PR_SET_TIMERSLACK, 1000);
  while (!stopping_) {
    const uint32_t posted = read(channel_->posted);
    if (accept() || retire() || begin()) continue;
    if (flying_ > 0 || !jobs_.empty()) {
      sleep_ns(kLookNs);
      continue;
    }
    // A task that was posted meanwhile is not missed, but a wake-up of the destructor may be.
    const timespec most{0, kSleepNs};
    syscall(SYS_futex, &channel_->posted, FUTEX_WAIT, posted, &most, nullptr, 0);
  }
}

// Each of the following returns whether it found anything to do.

bool RelayServer::accept() {
  bool found = false;
  for (int i = 0; i < kChannelSlots; ++i) {
    const uint32_t number = read(channel_->slot[i].submitted);
    if (number == seen_[i]) continue;
    found = true;
    seen_[i] = number;
    jobs_.push_back({i, number});
  }
  return found;
}

// Ends the oldest chunk under way, if it has moved.
bool RelayServer::retire() {
  Lane& lane = lanes_[first_];
  if (flying_ == 0) return false;
  ChannelSlot& slot = channel_->slot[lane.slot];
  if (read(slot.moved[first_]) != lane.moved) return false;
  first_ = (first_ + 1) % kStageLanes;
  --flying_;
  if (lane.ends != 0) {
    write(slot.done, lane.ends);
    ++relayed_;
  }
  return true;
}

// Begins the next chunk, or ends a micro-task that was recalled.
bool RelayServer::begin() {
  if (jobs_.empty() || flying_ == kStageLanes) return false;
  Job& job = jobs_.front();
  ChannelSlot& slot = channel_->slot[job.slot];
  const auto is_recalled = [&] { return read(slot.recalled) == job.number; };
  bool recalled = is_recalled();
  if (!recalled) {
    if (is_own()) return false;
    write(slot.begun, slot.begun + 1);
    recalled = is_recalled();
    if (recalled) write(slot.begun, slot.begun - 1);
  }
  try {
    if (recalled)
      end(job);
    else
      copy_chunk(job);
  } catch (const Fault&) {  // the process meets the error of its GPU, too
    fail(job);
    recalled = true;
  }
  if (recalled || job.piece == slot.pieces) jobs_.pop_front();
  return true;
}

void RelayServer::copy_chunk(Job& job) {
  ChannelSlot& slot = channel_->slot[job.slot];
  if (slot.pieces > kRelayPieces) throw Fault("a relay has too many pieces");
  const Current current(cuda_, context_);
  const int number = (first_ + flying_) % kStageLanes;
  Lane& lane = lanes_[number];
  const auto copy = [&](const Piece& piece) {
    cuda_.check("cuMemcpyAsync", cuda_.copy(piece.target, piece.source, piece.size, lane.stream));
  };
  std::vector<Piece> out;
  uint64_t filled = 0;
  while (job.piece < slot.pieces && filled < kChunkBytes && out.size() < kChunkParts) {
    const Piece& piece = slot.piece[job.piece];
    const uint64_t size = part(piece, job.at, kChunkBytes - filled);
    copy({lane.buffer + filled, piece.source + job.at, size});
    out.push_back({piece.target + job.at, lane.buffer + filled, size});
    filled += (size + kAligned - 1) / kAligned * kAligned;
    job.at += size;
    if (job.at < piece.size) continue;
    ++job.piece;
    job.at = 0;
  }
  for (const Piece& piece : out) copy(piece);
  lane.slot = job.slot;
  lane.moved = read(slot.moved[number]) + 1;
  lane.ends = job.piece == slot.pieces ? job.number : 0;
  cuda_.check("cuStreamWriteValue32",
              cuda_.stream_write(lane.stream, address_of(slot.moved[number]), lane.moved, 0));
  ++flying_;
}

// Returns how many bytes of a piece one copy carries.
uint64_t RelayServer::part(const Piece& piece, uint64_t at, uint64_t most) const {
  uint64_t size = std::min(piece.size - at, most);
  for (const uint64_t start : {piece.source + at, piece.target + at})
    size = std::min(size, border_bytes_ - start % border_bytes_);
  return size;
}

// A recalled micro-task is over with the last of its chunks that are under way.
void RelayServer::end(const Job& job) {
  for (int i = flying_ - 1; i >= 0; --i) {
    Lane& lane = lanes_[(first_ + i) % kStageLanes];
    if (lane.slot != job.slot) continue;
    lane.ends = job.number;
    return;
  }
  write(channel_->slot[job.slot].done, job.number);
}

// Nothing of it is written later.
void RelayServer::fail(const Job& job) {
  void* popped;
  if (cuda_.push(context_) == kCudaOk) {
    for (Lane& lane : lanes_) cuda_.stream_synchronize(lane.stream);
    cuda_.pop(&popped);
  }
  ChannelSlot& slot = channel_->slot[job.slot];
  uint32_t moved = 0;
  for (const uint32_t& lane : slot.moved) moved += read(lane);
  write(slot.begun, moved);
  write(slot.failed, job.number);
}

}  // namespace c2c::transfer
