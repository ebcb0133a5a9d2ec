#include "paths.h"

#include <stdio.h>
#include <string.h>

#include <algorithm>

#include "../native/links.h"
#include "peers.h"

namespace c2c::multipath {
namespace {

using transfer::Current;
using transfer::Fault;
using transfer::kCudaNotReady;

constexpr uint64_t kAligned = 4 << 10;      // of the parts' offsets
constexpr uint64_t kSmallPart = 8;          // a part of the least copy that is not worth a launch
constexpr double kDirectNominal = 55e6, kRelayNominal = 49e6;  // bytes in a ms, before any copy
constexpr double kNew = 0.5;        // how much of an estimate the last part is
constexpr double kForgotten = 0.1;  // what is forgotten of an estimate while a link is not used
constexpr int kLanesMost = 8;       // streams wait in few queues of a GPU
constexpr size_t kBegunMost = 1024;
constexpr unsigned kTimedEvent = 0;
constexpr CudaPointer kWordsApart = 128;
// As `transfer.settings.RelayShape`, but nothing is recalled here. So it hardly looks for that.
constexpr transfer::RelayShape kShape{4, 512, 12, 16 << 10, 1 << 30};

std::vector<char> read_file(const char* path) {
  if (path == nullptr) throw Fault("C2CSERVE_MULTIPATH_RELAY does not name the relay kernel");
  std::vector<char> content;
  FILE* file = fopen(path, "rb");
  if (file == nullptr) throw Fault(std::string(path) + " cannot be read");
  char part[1 << 14];
  for (size_t got; (got = fread(part, 1, sizeof part, file)) > 0;)
    content.insert(content.end(), part, part + got);
  fclose(file);
  content.push_back(0);
  return content;
}

}  // namespace

Paths::Paths() : cubin_(read_file(options().relay_file)) {
  const CaptureRelaxed relaxed(driver_);
  int count = 0;
  driver_.cuda.check("cuDeviceGetCount", driver_.device_count(&count));
  gpus_ = std::vector<Gpu>(count);
  for (int i = 0; i < count; ++i)
    driver_.cuda.check("cuDeviceGet", driver_.device_get(&gpus_[i].device, i));
  void* words = nullptr;
  const unsigned flags = transfer::kPortableMappedMemory;
  driver_.cuda.check("cuMemHostAlloc", driver_.cuda.host_alloc(&words, 4096, flags));
  memset(words, 0, 4096);
  driver_.cuda.check("cuMemHostGetDevicePointer", driver_.cuda.host_address(&words_, words, 0));
  kernel_ = std::make_unique<transfer::RelayKernel>(
      driver_.cuda, transfer::RelayCode{cubin_.data(), kShape});
}

Reason Paths::begin(const Copy& copy, CudaResult* result) {
  void* context = nullptr;
  if (const Reason reason = check_stream(copy, &context)) return reason;
  Memory memory;
  const Current current(driver_.cuda, context);
  if (const Reason reason = look_at(driver_, copy, &memory)) return reason;
  const CaptureRelaxed relaxed(driver_);
  Reason reason = kSpread;
  std::unique_ptr<Spread> made;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (memory.gpu < 0 || memory.gpu >= int(gpus_.size())) return kNotLink;
    Gpu& gpu = gpus_[memory.gpu];
    set_up(gpu);
    if (gpu.broken || gpu.context != context) return kContext;
    seek_links(memory.gpu);
    collect();
    made = reserve(copy, memory, &reason);
    if (made == nullptr) return reason;
    if (driver_.cuda.event_record(made->start, copy.stream) != kCudaOk) {
      give_back(*made);
      return kFault;
    }
  }
  *result = run(copy, *made);  // without the lock: the driver waits if a stream's queue is full
  const std::lock_guard<std::mutex> lock(mutex_);
  begun_.push_back(std::move(made));
  return kSpread;
}

Reason Paths::check_stream(const Copy& copy, void** context) {
  int status = 0;
  if (driver_.is_capturing(copy.stream, &status) != kCudaOk || status != 0) return kCapture;
  if (driver_.stream_context(copy.stream, context) != kCudaOk || *context == nullptr)
    return kContext;
  return kSpread;
}

// ---- GPUs ---------------------------------------------------------------------------------------

void Paths::set_up(Gpu& gpu) {
  if (gpu.context != nullptr || gpu.broken) return;
  gpu.broken = driver_.primary_retain(&gpu.context, gpu.device) != kCudaOk;
}

// Looks for neighbours in turn, so that not all GPUs have the same one.
void Paths::seek_links(int number) {
  Gpu& gpu = gpus_[number];
  if (gpu.sought) return;
  gpu.sought = true;
  for (double& rate : gpu.direct_bytes_per_ms) rate = kDirectNominal;
  for (int i = 1; i < int(gpus_.size()); ++i) {
    if (int(gpu.links[0].size()) >= options().neighbours) break;
    const int other = (number + i) % int(gpus_.size());
    if (!reaches(other, number)) continue;
    for (auto& links : gpu.links) links.push_back({other, kRelayNominal});
  }
}

// Whether one GPU may relay for another: over NVLink, not over the link that it helps out.
bool Paths::reaches(int from, int to) {
  Gpu& relaying = gpus_[from];
  int can = 0, fast = 0;
  if (driver_.can_access(&can, relaying.device, gpus_[to].device) != kCudaOk || !can) return false;
  const CudaResult known =
      driver_.pair_attribute(&fast, kNativeAtomics, relaying.device, gpus_[to].device);
  if (known != kCudaOk || !fast) return false;
  set_up(relaying);
  if (relaying.broken) return false;
  const Current current(driver_.cuda, relaying.context);
  const CudaResult enabled = driver_.enable_peer(gpus_[to].context, 0);
  if (enabled != kCudaOk && enabled != kPeerEnabledAlready) return false;
  note_peer(relaying.context, gpus_[to].context, enabled == kPeerEnabledAlready);
  return true;
}

// ---- what a copy takes --------------------------------------------------------------------------

std::unique_ptr<Spread> Paths::reserve(const Copy& copy, const Memory& memory, Reason* reason) {
  Gpu& gpu = gpus_[memory.gpu];
  *reason = gpu.links[0].empty() ? kNoNeighbour : kBusy;
  if (gpu.links[0].empty() || begun_.size() >= kBegunMost) return nullptr;
  const bool per_thread = copy.stream == kPerThreadStream;
  const Owner owner{memory.gpu, copy.stream,
                    per_thread ? std::this_thread::get_id() : std::thread::id()};
  auto spread = std::make_unique<Spread>();
  spread->gpu = memory.gpu, spread->inward = memory.inward, spread->stream = copy.stream;
  for (Link& link : gpu.links[memory.inward]) {
    if (gpus_[link.gpu].broken || has_own(link.gpu, memory.inward)) continue;
    const Current current(driver_.cuda, gpus_[link.gpu].context);
    const Reason seen = check_access(driver_, memory, gpus_[link.gpu].device);
    if (seen != kSpread) *reason = seen;
    Relay relay;
    relay.link = &link;
    if (seen == kSpread && take(relay, owner))
      spread->relays.push_back(relay);
  }
  divide(*spread, copy.size);
  spread->start = event_of(gpu);
  spread->direct_end = event_of(gpu);
  const bool complete = spread->start != nullptr && spread->direct_end != nullptr;
  if (complete && !spread->relays.empty()) return spread;
  give_back(*spread);
  return nullptr;
}

// Whether a GPU has large copies of its own in this direction.
bool Paths::has_own(int gpu, bool inward) const {
  return std::any_of(begun_.begin(), begun_.end(), [=](const auto& one) {
    return one->gpu == gpu && one->inward == inward;
  });
}

// Returns whether the neighbour can relay now. It is the current context's GPU.
bool Paths::take(Relay& relay, const Owner& owner) {
  Gpu& neighbour = gpus_[relay.link->gpu];
  try {
    relay.lane = lane_for(neighbour, owner);
    relay.start = event_of(neighbour);
    relay.end = event_of(neighbour);
  } catch (const Fault& fault) {
    say(std::string("a neighbour does not relay: ") + fault.what());
    neighbour.broken = true;
  }
  if (relay.lane != nullptr && relay.start != nullptr && relay.end != nullptr) return true;
  give_back(relay);
  return false;
}

// Copies of one stream follow one another, and have one lane. Others do not wait for them.
Lane* Paths::lane_for(Gpu& gpu, const Owner& owner) {
  Lane* found = nullptr;
  for (const auto& lane : gpu.lanes) {
    if (lane->copies > 0 && lane->owner == owner) found = lane.get();
    if (lane->copies == 0 && found == nullptr) found = lane.get();
  }
  if (found == nullptr) {
    if (gpu.lanes.size() >= kLanesMost) return nullptr;
    gpu.lanes.push_back(new_lane(gpu.lanes.empty()));
    found = gpu.lanes.back().get();
  }
  found->owner = owner;
  ++found->copies;
  return found;
}

std::unique_ptr<Lane> Paths::new_lane(bool first) {
  const auto& cuda = driver_.cuda;
  auto made = std::make_unique<Lane>();
  int lowest = 0, highest = 0;
  cuda.check("cuCtxGetStreamPriorityRange", cuda.priorities(&lowest, &highest));
  cuda.check("cuStreamCreateWithPriority",
             cuda.stream_create(&made->handle, transfer::kNonBlockingStream, highest));
  transfer::RelayParams params{};
  params.recalled = words_, params.started = words_ + kWordsApart;
  // Waits for the lane, which may share a queue of the GPU with streams that wait. So only once.
  if (first) kernel_->prepare({made->handle}, params);
  return made;
}

void* Paths::event_of(Gpu& gpu) {
  void* event = nullptr;
  if (!gpu.events.empty()) {
    event = gpu.events.back();
    gpu.events.pop_back();
    return event;
  }
  return driver_.cuda.event_create(&event, kTimedEvent) == kCudaOk ? event : nullptr;
}

// Gives each link a share by its speed. The direct part comes first.
void Paths::divide(Spread& spread, uint64_t size) {
  double& direct = gpus_[spread.gpu].direct_bytes_per_ms[spread.inward];
  double sum = direct;
  for (const Relay& relay : spread.relays) sum += relay.link->bytes_per_ms;
  uint64_t end = size;
  for (Relay& relay : spread.relays) {
    const double share = relay.link->bytes_per_ms / sum;
    relay.size = std::min(end, uint64_t(share * double(size)));
    if (relay.size < options().least_bytes / kSmallPart) {
      relay.size = 0;
      relay.link->bytes_per_ms += kForgotten * (kRelayNominal - relay.link->bytes_per_ms);
      continue;
    }
    relay.at = (end - relay.size) / kAligned * kAligned;
    relay.size = end - relay.at;
    end = relay.at;
  }
  auto& relays = spread.relays;
  const auto is_empty = [](const Relay& relay) { return relay.size == 0; };
  for (Relay& relay : relays)
    if (is_empty(relay)) give_back(relay);
  relays.erase(std::remove_if(relays.begin(), relays.end(), is_empty), relays.end());
  spread.direct_size = end;
}

// ---- a copy -------------------------------------------------------------------------------------

// In the context of the copy's GPU. Its stream has recorded the start.
CudaResult Paths::run(const Copy& copy, Spread& spread) {
  const auto& cuda = driver_.cuda;
  uint64_t relayed = 0;
  for (Relay& relay : spread.relays) {
    try {
      launch(copy, relay, spread.start);
      relayed += relay.size;
    } catch (const Fault& fault) {
      say(std::string("a neighbour relays no more: ") + fault.what());
      gpus_[relay.link->gpu].broken = true;
    }
  }
  CudaResult result = kCudaOk;
  if (spread.direct_size > 0)
    result = cuda.copy(copy.target, copy.source, spread.direct_size, copy.stream);
  for (const Relay& relay : spread.relays)
    if (!relay.launched && result == kCudaOk)
      result = cuda.copy(copy.target + relay.at, copy.source + relay.at, relay.size, copy.stream);
  const CudaResult ended = cuda.event_record(spread.direct_end, copy.stream);
  for (const Relay& relay : spread.relays) {
    if (!relay.launched) continue;
    const CudaResult waits = cuda.stream_wait(copy.stream, relay.end, 0);
    if (result == kCudaOk) result = waits;
  }
  count_relayed(relayed);
  return result != kCudaOk ? result : ended;
}

// Throws `Fault` if the relay does not run.
void Paths::launch(const Copy& copy, Relay& relay, void* start) {
  const auto& cuda = driver_.cuda;
  const Current current(cuda, gpus_[relay.link->gpu].context);
  void* lane = relay.lane->handle;
  cuda.check("cuStreamWaitEvent", cuda.stream_wait(lane, start, 0));
  cuda.check("cuEventRecord", cuda.event_record(relay.start, lane));
  transfer::RelayParams params{};
  params.recalled = words_, params.started = words_ + kWordsApart;
  params.number = 1;  // the word for recalls has 0
  const transfer::Piece piece{copy.target + relay.at, copy.source + relay.at, relay.size};
  kernel_->launch(params, &piece, 1, lane);
  if (const CudaResult result = cuda.event_record(relay.end, lane)) {
    cuda.stream_synchronize(lane);  // what was launched must not write later
    cuda.check("cuEventRecord", result);
  }
  relay.launched = true;
}

// ---- copies that are over -----------------------------------------------------------------------

// Copies of one stream end in order: after one that is not over, the stream's others are not asked.
void Paths::collect() {
  std::vector<void*> going;
  for (auto at = begun_.begin(); at != begun_.end();) {
    Spread& spread = **at;
    const bool skipped = std::find(going.begin(), going.end(), spread.stream) != going.end();
    if (skipped || !is_over(spread)) {
      if (!skipped) going.push_back(spread.stream);
      ++at;
      continue;
    }
    learn(spread);
    give_back(spread);
    at = begun_.erase(at);
  }
}

// An event after an error is over, too: its stream does nothing more.
bool Paths::is_over(const Spread& spread) {
  {
    const Current current(driver_.cuda, gpus_[spread.gpu].context);
    if (driver_.cuda.event_query(spread.direct_end) == kCudaNotReady) return false;
  }
  for (const Relay& relay : spread.relays) {
    if (!relay.launched) continue;
    const Current current(driver_.cuda, gpus_[relay.link->gpu].context);
    const CudaResult result = driver_.cuda.event_query(relay.end);
    if (result == kCudaNotReady) return false;
    if (result != kCudaOk) gpus_[relay.link->gpu].broken = true;
  }
  return true;
}

void Paths::learn(const Spread& spread) {
  const auto blend = [](double& estimate, double measured) {
    if (measured > 0) estimate += kNew * (measured - estimate);
  };
  Gpu& gpu = gpus_[spread.gpu];
  const bool all = std::all_of(spread.relays.begin(), spread.relays.end(),
                               [](const Relay& relay) { return relay.launched; });
  if (!all) return;
  blend(gpu.direct_bytes_per_ms[spread.inward],
        rate(spread.start, spread.direct_end, spread.direct_size, gpu.context));
  for (const Relay& relay : spread.relays)
    blend(relay.link->bytes_per_ms,
          rate(relay.start, relay.end, relay.size, gpus_[relay.link->gpu].context));
}

double Paths::rate(void* start, void* end, uint64_t size, void* context) {
  const Current current(driver_.cuda, context);
  float ms = 0;
  if (driver_.elapsed(&ms, start, end) != kCudaOk || ms <= 0) return 0;
  return double(size) / ms;
}

void Paths::give_back(Spread& spread) {
  for (void* event : {spread.start, spread.direct_end})
    if (event != nullptr) gpus_[spread.gpu].events.push_back(event);
  for (Relay& relay : spread.relays) give_back(relay);
}

void Paths::give_back(Relay& relay) {
  if (relay.lane != nullptr) --relay.lane->copies;
  for (void* event : {relay.start, relay.end})
    if (event != nullptr) gpus_[relay.link->gpu].events.push_back(event);
}

}  // namespace c2c::multipath
