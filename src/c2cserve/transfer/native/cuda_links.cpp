#include "cuda_links.h"

#include <algorithm>
#include <atomic>

namespace c2c::transfer {
namespace {

constexpr uint64_t kBatchBytes = 1 << 20;  // longer copies are worth a call each
constexpr size_t kFlagStride = 32;  // words: GPUs that write one flag transfer no other with it

// Makes a GPU's context the thread's current one meanwhile.
class Current {
 public:
  Current(const Cuda& cuda, void* context) : cuda_(cuda) {
    cuda.check("cuCtxPushCurrent", cuda.push(context));
  }
  ~Current() {
    void* popped;
    cuda_.pop(&popped);
  }
  Current(const Current&) = delete;

 private:
  const Cuda& cuda_;
};

struct Point {  // what a `Mark` is
  void* event;
  void* context;
};

}  // namespace

CudaLinks::CudaLinks(const std::string& library, const std::vector<LinkPlace>& places,
                     RelayCode relay, int depth)
    : cuda_(library), places_(places), relay_(relay), relays_launched_(places.size()) {
  const Current current(cuda_, places[0].context);
  const size_t bytes = 4 * kFlagStride * 2 * depth * places.size();
  void* flags = nullptr;
  cuda_.check("cuMemHostAlloc", cuda_.host_alloc(&flags, bytes, kPortableMappedMemory));
  flags_ = static_cast<uint32_t*>(flags);
  std::fill_n(flags_, bytes / 4, 0);
  cuda_.check("cuMemHostGetDevicePointer", cuda_.host_address(&flags_address_, flags, 0));
  if (relay.cubin != nullptr) {
    const auto loaded =
        cuda_.library_load(&library_, relay.cubin, nullptr, nullptr, 0, nullptr, nullptr, 0);
    cuda_.check("cuLibraryLoadData(relay)", loaded);
    cuda_.check("cuLibraryGetKernel(relay)", cuda_.library_kernel(&kernel_, library_, "relay"));
  }
  for (int link = 0; link < int(places.size()); ++link) make_link(link, depth);
}

void CudaLinks::make_link(int link, int depth) {
  const Current current(cuda_, places_[link].context);
  lanes_.push_back(new_stream());
  small_lanes_.push_back(new_stream());
  relay_lanes_.emplace_back();
  const bool relays = places_[link].relays && kernel_ != nullptr;
  if (relays) allow_shared();
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
    slots[i].params.stages = relay_.shape.stages;
    slots[i].params.stage_bytes = relay_.shape.stage_bytes;
    slots[i].params.recall_poll_bytes = relay_.shape.recall_poll_bytes;
  }
  for (int i = 0; relays && i < kRelayLanes; ++i) {
    void* stream = new_stream();
    relay_lanes_.back().push_back(stream);
    // CUDA may wait for all that a context has when it first loads a kernel: not in a transfer.
    launch_relay(slots[depth], {}, stream);
    cuda_.check("cuStreamSynchronize", cuda_.stream_synchronize(stream));
  }
  slots_.push_back(std::move(slots));
}

// More than 48 KiB of shared memory have to be allowed, once on each GPU.
void CudaLinks::allow_shared() {
  int device = 0;
  cuda_.check("cuCtxGetDevice", cuda_.device(&device));
  cuda_.check("cuKernelSetAttribute",
              cuda_.kernel_attribute(kMostDynamicShared, shared_bytes(), kernel_, device));
}

int CudaLinks::shared_bytes() const { return relay_.shape.stages * relay_.shape.stage_bytes; }

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
  for (const auto& lanes : relay_lanes_) streams.insert(streams.end(), lanes.begin(), lanes.end());
  for (void* stream : streams) cuda_.stream_synchronize(stream);
  for (void* stream : streams) cuda_.stream_destroy(stream);
  for (void* event : events_) cuda_.event_destroy(event);
  if (library_ != nullptr) cuda_.library_unload(library_);
  if (flags_ != nullptr) cuda_.host_free(flags_);
  cuda_.pop(&popped);
}

// ---- micro-tasks --------------------------------------------------------------------------------

void CudaLinks::start(const Task& task) {
  const Current current(cuda_, places_[task.link].context);
  Slot& slot = slot_of(task);
  if (!task.relayed) {
    copy_pieces(task.pieces, lanes_[task.link]);
    cuda_.check("cuEventRecord", cuda_.event_record(slot.event, lanes_[task.link]));
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
  params.pieces = uint32_t(pieces.size());
  std::copy(pieces.begin(), pieces.end(), params.piece);
  void* pointers[] = {&params};
  cuda_.check("cuLaunchKernel(relay)",
              cuda_.launch(kernel_, relay_.shape.ctas, 1, 1, relay_.shape.threads, 1, 1,
                           shared_bytes(), stream, pointers, nullptr));
}

void CudaLinks::copy_pieces(const std::vector<Piece>& pieces, void* stream) {
  if (pieces.empty()) return;
  uint64_t bytes = 0;
  for (const Piece& piece : pieces) bytes += piece.size;
  if (pieces.size() == 1 || bytes >= kBatchBytes * pieces.size()) {
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
  const Current current(cuda_, places_[task.link].context);
  const CudaResult result = cuda_.event_query(slot_of(task).event);
  if (result == kCudaNotReady) return false;
  if (result != kCudaOk && task.relayed) recall(task);  // it may still run, and is sent again
  cuda_.check("cuEventQuery", result);
  return true;
}

void CudaLinks::recall(const Task& task) {
  Slot& slot = slot_of(task);
  __atomic_store_n(slot.recalled, slot.params.number, __ATOMIC_SEQ_CST);
  // The kernel marks its start before it looks for a recall; here the order is the opposite one.
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

bool CudaLinks::is_harmless(const Task& task) {
  const Slot& slot = slot_of(task);
  return __atomic_load_n(slot.started, __ATOMIC_SEQ_CST) != slot.params.number;
}

// ---- streams ------------------------------------------------------------------------------------

void* CudaLinks::context_of(int gpu) const {
  for (const LinkPlace& place : places_)
    if (place.gpu == gpu) return place.context;
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
  copy_pieces(pieces, stream);
  return mark({stream, places_[port].gpu});
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
