#include "cuda_links.h"

#include <algorithm>
#include <atomic>

namespace c2c::transfer {
namespace {

constexpr size_t kFlagStride = 32;  // words: GPUs that write one flag transfer no other with it

struct Point {  // what a `Mark` is
  void* event;
  void* context;
};

bool are_shorter(const std::vector<Piece>& pieces, uint64_t than) {  // on average
  uint64_t bytes = 0;
  for (const Piece& piece : pieces) bytes += piece.size;
  return bytes < than * pieces.size();
}

}  // namespace

CudaLinks::CudaLinks(const std::string& library, const std::vector<LinkPlace>& places,
                     RelayCode relay, RelayCode own, int depth, uint64_t batch_bytes)
    : cuda_(library),
      places_(places),
      batch_bytes_(batch_bytes),
      remotes_(places.size()),
      relays_launched_(places.size()),
      kernels_launched_(places.size()) {
  const Current current(cuda_, places_[0].context);
  const size_t bytes = 4 * kFlagStride * 2 * depth * places.size();
  void* flags = nullptr;
  cuda_.check("cuMemHostAlloc", cuda_.host_alloc(&flags, bytes, kPortableMappedMemory));
  flags_ = static_cast<uint32_t*>(flags);
  std::fill_n(flags_, bytes / 4, 0);
  cuda_.check("cuMemHostGetDevicePointer", cuda_.host_address(&flags_address_, flags, 0));
  kernel_ = std::make_unique<RelayKernel>(cuda_, relay);
  own_kernel_ = std::make_unique<RelayKernel>(cuda_, own);
  for (int link = 0; link < int(places.size()); ++link) make_link(link, depth);
}

void CudaLinks::make_link(int link, int depth) {
  lanes_.push_back(nullptr);
  small_lanes_.push_back(nullptr);
  relay_lanes_.emplace_back();
  kernel_lanes_.emplace_back();
  slots_.emplace_back();
  if (is_remote(link)) {
    if (depth > kChannelSlots) throw Fault("links of other processes have a lower depth");
    remotes_[link] = std::make_unique<RelayClient>();
    return;
  }
  const Current current(cuda_, places_[link].context);
  lanes_.back() = new_stream();
  small_lanes_.back() = new_stream();
  if (places_[link].kernel_bytes > 0 && own_kernel_->exists()) {
    for (int i = 0; i < kRelayLanes; ++i) kernel_lanes_.back().push_back(new_stream());
    std::vector<void*> streams(kernel_lanes_.back());
    streams.push_back(small_lanes_.back());
    own_kernel_->prepare(streams, {});
  }
  const bool relays = places_[link].relays && kernel_->exists();
  make_slots(link, depth, relays);
  if (!relays) return;
  for (int i = 0; i < kRelayLanes; ++i) relay_lanes_.back().push_back(new_stream());
  kernel_->prepare(relay_lanes_.back(), slots_[link][depth].params);
}

void CudaLinks::make_slots(int link, int depth, bool relays) {
  std::vector<Slot> slots(relays ? 2 * depth : depth);
  for (int i = 0; i < int(slots.size()); ++i) {
    cuda_.check("cuEventCreate", cuda_.event_create(&slots[i].event, kTimelessEvent));
    events_.push_back(slots[i].event);
    if (i < depth) continue;
    for (uint32_t** flag : {&slots[i].recalled, &slots[i].started}) {
      *flag = flags_ + kFlagStride * flags_taken_++;
    }
    const auto address_of = [this](uint32_t* flag) { return flags_address_ + 4 * (flag - flags_); };
    slots[i].params.recalled = address_of(slots[i].recalled);
    slots[i].params.started = address_of(slots[i].started);
  }
  slots_[link] = std::move(slots);
}

void* CudaLinks::new_stream() {
  int lowest = 0, highest = 0;
  void* stream = nullptr;
  cuda_.check("cuCtxGetStreamPriorityRange", cuda_.priorities(&lowest, &highest));
  cuda_.check("cuStreamCreateWithPriority",
              cuda_.stream_create(&stream, kNonBlockingStream, highest));
  return stream;
}

// Nothing is under way. What fails is left to the end of the process.
CudaLinks::~CudaLinks() {
  void* popped;
  if (cuda_.push(places_[0].context) != kCudaOk) return;
  std::vector<void*> streams(lanes_);
  streams.insert(streams.end(), small_lanes_.begin(), small_lanes_.end());
  for (const auto& all : {relay_lanes_, kernel_lanes_})
    for (const auto& lanes : all) streams.insert(streams.end(), lanes.begin(), lanes.end());
  streams.erase(std::remove(streams.begin(), streams.end(), nullptr), streams.end());
  for (void* stream : streams) cuda_.stream_synchronize(stream);
  for (void* stream : streams) cuda_.stream_destroy(stream);
  for (void* event : events_) cuda_.event_destroy(event);
  kernel_.reset();
  own_kernel_.reset();
  if (flags_ != nullptr) cuda_.host_free(flags_);
  cuda_.pop(&popped);
}

// ---- micro-tasks --------------------------------------------------------------------------------

void CudaLinks::start(const Task& task) {
  if (is_remote(task.link)) return remotes_[task.link]->start(task);
  const Current current(cuda_, places_[task.link].context);
  Slot& slot = slot_of(task);
  if (!task.relayed) {
    void* stream = lanes_[task.link];
    if (is_kernels(task.link, task.pieces))
      stream = kernel_lanes_[task.link][kernels_launched_[task.link]++ % kRelayLanes];
    move_pieces(task.link, task.pieces, stream);
    cuda_.check("cuEventRecord", cuda_.event_record(slot.event, stream));
    return;
  }
  void* stream = relay_lanes_[task.link][relays_launched_[task.link]++ % kRelayLanes];
  try {
    launch_relay(slot, task.pieces, stream);
    cuda_.check("cuEventRecord", cuda_.event_record(slot.event, stream));
  } catch (const Fault&) {
    recall(task);  // it may have been launched
    throw;
  }
}

void CudaLinks::launch_relay(Slot& slot, const std::vector<Piece>& pieces, void* stream) {
  RelayParams& params = slot.params;  // a launch copies them
  // Numbers come round after weeks, and an old recall must not meet a new launch. The last launch of
  // the slot is over, and 0 is no launch.
  __atomic_store_n(slot.recalled, 0, __ATOMIC_SEQ_CST);
  if (++params.number == 0) ++params.number;
  kernel_->launch(params, pieces.data(), pieces.size(), stream);
}

bool CudaLinks::is_kernels(int link, const std::vector<Piece>& pieces) const {
  return !kernel_lanes_[link].empty() && are_shorter(pieces, places_[link].kernel_bytes);
}

// Carries bytes on the direct path of a link, in the order of a stream.
void CudaLinks::move_pieces(int link, const std::vector<Piece>& pieces, void* stream) {
  if (!is_kernels(link, pieces)) return copy_pieces(pieces, stream);
  RelayParams params{};  // without flags: it is not recalled
  for (size_t at = 0; at < pieces.size(); at += kRelayPieces) {
    const size_t count = std::min<size_t>(kRelayPieces, pieces.size() - at);
    own_kernel_->launch(params, pieces.data() + at, count, stream);
  }
}

void CudaLinks::copy_pieces(const std::vector<Piece>& pieces, void* stream) {
  if (pieces.empty()) return;
  if (pieces.size() == 1 || !are_shorter(pieces, batch_bytes_)) {
    for (const Piece& one : pieces)
      cuda_.check("cuMemcpyAsync", cuda_.copy(one.target, one.source, one.size, stream));
    return;
  }
  std::vector<CudaPointer> targets, sources;
  std::vector<size_t> sizes;
  for (const Piece& piece : pieces) {
    targets.push_back(piece.target);
    sources.push_back(piece.source);
    sizes.push_back(piece.size);
  }
  CudaCopyAttributes attributes{};
  attributes.source_order = 1;
  size_t first = 0;
  cuda_.check("cuMemcpyBatchAsync",
              cuda_.copy_batch(targets.data(), sources.data(), sizes.data(), pieces.size(),
                               &attributes, &first, 1, stream));
}

bool CudaLinks::is_over(const Task& task) {
  if (is_remote(task.link)) return remotes_[task.link]->is_over(task);
  const Current current(cuda_, places_[task.link].context);
  const CudaResult result = cuda_.event_query(slot_of(task).event);
  if (result == kCudaNotReady) return false;
  if (result != kCudaOk && task.relayed) recall(task);  // it may still run, and is sent again
  cuda_.check("cuEventQuery", result);
  return true;
}

void CudaLinks::recall(const Task& task) {
  if (is_remote(task.link)) return remotes_[task.link]->recall(task);
  Slot& slot = slot_of(task);
  __atomic_store_n(slot.recalled, slot.params.number, __ATOMIC_SEQ_CST);
  // The kernel marks its start before it looks for a recall; here the order is the opposite one.
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

bool CudaLinks::is_harmless(const Task& task) {
  if (is_remote(task.link)) return remotes_[task.link]->is_harmless(task);
  const Slot& slot = slot_of(task);
  return __atomic_load_n(slot.started, __ATOMIC_SEQ_CST) != slot.params.number;
}

// ---- streams ------------------------------------------------------------------------------------

void* CudaLinks::context_of(int gpu) const {
  for (const LinkPlace& place : places_)
    if (place.gpu == gpu && place.context != nullptr) return place.context;
  throw Fault("the engine has no link of GPU " + std::to_string(gpu));
}

Mark CudaLinks::mark(const Stream& stream) {
  auto point = std::make_unique<Point>(Point{nullptr, context_of(stream.gpu)});
  const Current current(cuda_, point->context);
  cuda_.check("cuEventCreate", cuda_.event_create(&point->event, kTimelessEvent));
  if (const CudaResult result = cuda_.event_record(point->event, stream.handle)) {
    cuda_.event_destroy(point->event);
    cuda_.check("cuEventRecord", result);
  }
  return point.release();
}

bool CudaLinks::is_passed(Mark mark) {
  const Point& point = *static_cast<Point*>(mark);
  const Current current(cuda_, point.context);
  const CudaResult result = cuda_.event_query(point.event);
  if (result == kCudaNotReady) return false;
  cuda_.check("cuEventQuery", result);
  return true;
}

void CudaLinks::drop(Mark mark) noexcept {
  const std::unique_ptr<Point> point(static_cast<Point*>(mark));
  void* popped;
  if (cuda_.push(point->context) != kCudaOk) return;  // the driver is gone, and the event with it
  cuda_.event_destroy(point->event);
  cuda_.pop(&popped);
}

void CudaLinks::follow(const Stream& stream, const Task& task) {
  if (is_remote(task.link)) {  // it was recalled, and its kernel has begun: its end is near
    while (!remotes_[task.link]->has_ended(task)) relax();
    return;
  }
  const Current current(cuda_, context_of(stream.gpu));
  cuda_.check("cuStreamWaitEvent", cuda_.stream_wait(stream.handle, slot_of(task).event, 0));
}

void CudaLinks::follow(const Stream& stream, Mark mark) {
  const Current current(cuda_, context_of(stream.gpu));
  cuda_.check("cuStreamWaitEvent",
              cuda_.stream_wait(stream.handle, static_cast<Point*>(mark)->event, 0));
}

Mark CudaLinks::copy(int port, const std::vector<Piece>& pieces, const Stream* after) {
  void* stream = small_lanes_[port];
  if (after != nullptr) {
    const Mark before = mark(*after);
    const Current current(cuda_, places_[port].context);
    const auto result = cuda_.stream_wait(stream, static_cast<Point*>(before)->event, 0);
    drop(before);  // an event that a stream waits for lives until then
    cuda_.check("cuStreamWaitEvent", result);
  }
  const Current current(cuda_, places_[port].context);
  move_pieces(port, pieces, stream);
  return mark({stream, places_[port].gpu});
}

bool CudaLinks::takes(int link) const { return !is_remote(link) || remotes_[link]->takes(); }

bool CudaLinks::reaches(int link, const Piece& piece) const {
  return !is_remote(link) || remotes_[link]->reaches(piece);
}

void* CudaLinks::relay_stream(int link, int lane) const {
  return lane < int(relay_lanes_[link].size()) ? relay_lanes_[link][lane] : nullptr;
}

void CudaLinks::check_host(uint64_t address) {
  const Current current(cuda_, places_[0].context);
  int kind = 0;
  const CudaResult result = cuda_.pointer_attribute(&kind, kMemoryType, address);
  if (result == kCudaOk && kind == kHostMemory) return;
  throw std::invalid_argument("host memory at " + std::to_string(address) + " is not pinned");
}

}  // namespace c2c::transfer
