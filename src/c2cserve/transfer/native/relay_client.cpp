#include "relay_client.h"

#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

namespace c2c::transfer {

void RelayClient::connect(Channel* channel) {
  channel_ = channel;
  std::fill(numbers_.begin(), numbers_.end(), 0);
  regions_.clear();
  lost_ = false;
}

// ---- memory -------------------------------------------------------------------------------------

void RelayClient::share(uint64_t near, uint64_t far, uint64_t size) {
  const auto after = [](uint64_t address, const Region& one) { return address < one.near; };
  regions_.insert(std::upper_bound(regions_.begin(), regions_.end(), near, after),
                  {near, far, size});
}

void RelayClient::unshare(uint64_t near) {
  const auto is_it = [near](const Region& one) { return one.near == near; };
  regions_.erase(std::remove_if(regions_.begin(), regions_.end(), is_it), regions_.end());
}

uint64_t RelayClient::far(uint64_t address, uint64_t size) const {
  const auto after = [](uint64_t value, const Region& one) { return value < one.near; };
  auto found = std::upper_bound(regions_.begin(), regions_.end(), address, after);
  if (found == regions_.begin()) return 0;
  --found;
  const uint64_t at = address - found->near;
  return at <= found->size && size <= found->size - at ? found->far + at : 0;
}

bool RelayClient::reaches(const Piece& piece) const {
  return far(piece.target, piece.size) != 0 && far(piece.source, piece.size) != 0;
}

bool RelayClient::takes() const {
  return !lost_ && read(channel_->moving) == 0 && read(channel_->streaming) == 0;
}

// ---- micro-tasks --------------------------------------------------------------------------------

ChannelSlot& RelayClient::slot_of(const Task& task) const {
  return channel_->slot[task.slot % kChannelSlots];
}

void RelayClient::start(const Task& task) {
  if (lost_) throw Fault("the neighbour's process has ended");
  ChannelSlot& slot = slot_of(task);
  uint32_t& number = numbers_[task.slot % kChannelSlots];
  write(slot.recalled, 0);  // as numbers come round after weeks
  for (size_t i = 0; i < task.pieces.size(); ++i) {
    const Piece& piece = task.pieces[i];
    if (!reaches(piece)) throw Fault("memory that the neighbour does not share");
    slot.piece[i] = {far(piece.target, piece.size), far(piece.source, piece.size), piece.size};
  }
  slot.pieces = uint32_t(task.pieces.size());
  if (++number == 0) ++number;
  write(slot.submitted, number);
  __atomic_add_fetch(&channel_->posted, 1, __ATOMIC_SEQ_CST);
  syscall(SYS_futex, &channel_->posted, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

bool RelayClient::is_over(const Task& task) const {
  const ChannelSlot& slot = slot_of(task);
  const uint32_t number = numbers_[task.slot % kChannelSlots];
  if (read(slot.done) == number) return true;
  if (lost_) throw Fault("the neighbour's process has ended");
  if (read(slot.failed) == number) throw Fault("the neighbour could not launch it");
  return false;
}

bool RelayClient::has_ended(const Task& task) const {
  const ChannelSlot& slot = slot_of(task);
  const uint32_t number = numbers_[task.slot % kChannelSlots];
  return lost_ || read(slot.done) == number || read(slot.failed) == number;
}

void RelayClient::recall(const Task& task) {
  write(slot_of(task).recalled, numbers_[task.slot % kChannelSlots]);
  // The server counts what it begins before it looks for a recall; here the order is the opposite.
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

bool RelayClient::is_harmless(const Task& task) const {
  if (lost_) return true;
  const ChannelSlot& slot = slot_of(task);
  const uint32_t begun = read(slot.begun);  // before what has moved, which is no more
  uint32_t moved = 0;
  for (const uint32_t& lane : slot.moved) moved += read(lane);
  return begun == moved;
}

}  // namespace c2c::transfer
