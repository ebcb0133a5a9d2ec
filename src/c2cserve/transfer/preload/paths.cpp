#include "paths.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "../native/links.h"

namespace c2c::multipath {
namespace {

using transfer::Current;
using transfer::Fault;
using transfer::kCudaNotReady;

constexpr uint64_t kAligned = 4 << 10;      // of the parts' offsets
constexpr uint64_t kSmallPart = 8;          // a part of the least copy that is not worth a launch
constexpr double kDirectNominal = 55e6, kRelayNominal = 54e6;  // bytes in a ms, before any copy
constexpr double kLateMs = 0.015;   // by which a relay ends later than its link is at work
constexpr double kNew = 0.5;        // how much of an estimate the last part is
constexpr double kForgotten = 0.1;  // what is forgotten of an estimate while a link is not used
constexpr int kLanesMost = 8;       // streams wait in few queues of a GPU
constexpr int kChunksMost = 256;    // of a lane at a time: the driver waits where a queue is full
constexpr size_t kBegunMost = 1024;
constexpr unsigned kTimedEvent = 0;
constexpr auto kPause = std::chrono::microseconds(50), kPatience = 4 * kPause;

}  // namespace

Paths::Paths() {
  const CaptureRelaxed relaxed(driver_);
  int count = 0;
  driver_.cuda.check("cuDeviceGetCount", driver_.device_count(&count));
  gpus_ = std::vector<Gpu>(count);
  for (int i = 0; i < count; ++i)
    driver_.cuda.check("cuDeviceGet", driver_.device_get(&gpus_[i].device, i));
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
    std::unique_lock<std::mutex> lock(mutex_);
    if (memory.gpu < 0 || memory.gpu >= int(gpus_.size())) return kNotLink;
    Gpu& gpu = gpus_[memory.gpu];
    set_up(gpu);
    if (gpu.broken || gpu.context != context) return kContext;
    seek_links(memory.gpu);
    const bool per_thread = copy.stream == kPerThreadStream;
    const Owner owner{memory.gpu, copy.stream,
                      per_thread ? std::this_thread::get_id() : std::thread::id()};
    collect();
    for (auto paused = kPause * 0; (made = reserve(copy, memory, owner, &reason)) == nullptr;) {
      if (reason != kBusy || !will_have_room(owner, paused >= kPatience)) return reason;
      paused += kPause;
      lock.unlock();
      std::this_thread::sleep_for(kPause);
      lock.lock();
      collect();
    }
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
    if (int(gpu.links.size()) >= options().neighbours) break;
    const int other = (number + i) % int(gpus_.size());
    if (!reaches(number, other)) continue;
    gpu.links.push_back({other, {kRelayNominal, kRelayNominal}, {}});
  }
}

// Whether one GPU reaches a neighbour's memory: over NVLink, not over the link that needs help.
bool Paths::reaches(int gpu, int neighbour) {
  const int device = gpus_[gpu].device, other = gpus_[neighbour].device;
  int can = 0, fast = 0;
  if (driver_.can_access(&can, device, other) != kCudaOk || !can) return false;
  if (driver_.pair_attribute(&fast, kNativeAtomics, device, other) != kCudaOk || !fast)
    return false;
  set_up(gpus_[neighbour]);
  return !gpus_[neighbour].broken;
}

// ---- what a copy takes --------------------------------------------------------------------------

std::unique_ptr<Spread> Paths::reserve(const Copy& copy, const Memory& memory, const Owner& owner,
                                       Reason* reason) {
  Gpu& gpu = gpus_[memory.gpu];
  *reason = gpu.links.empty() ? kNoNeighbour : kBusy;
  if (gpu.links.empty() || begun_.size() >= kBegunMost) return nullptr;
  auto spread = std::make_unique<Spread>();
  spread->gpu = memory.gpu, spread->inward = memory.inward, spread->stream = copy.stream;
  for (Link& link : gpu.links) {
    if (gpus_[link.gpu].broken || has_own(link.gpu, memory.inward)) continue;
    const Current current(driver_.cuda, gpus_[link.gpu].context);
    Relay relay;
    relay.link = &link;
    if (!can_reach_host(driver_, memory))
      *reason = kHostAccess;
    else if (take(relay, *spread, owner))
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

// Returns whether the neighbour can relay now.
bool Paths::take(Relay& relay, const Spread& spread, const Owner& owner) {
  Gpu &gpu = gpus_[spread.gpu], &neighbour = gpus_[relay.link->gpu];
  try {
    relay.lane = lane_for(gpu, *relay.link, owner);
    relay.events.start = event_of(neighbour);
    relay.events.end = event_of(neighbour);
    relay.events.last = event_of(gpu);
  } catch (const Fault& fault) {
    say(std::string("a neighbour does not relay: ") + fault.what());
    neighbour.broken = true;
  }
  const PartEvents& events = relay.events;
  if (relay.lane && events.start && events.end && events.last) return true;
  give_back(spread, relay);
  return false;
}

// Copies of one stream follow one another, and have one lane. Others do not wait for them.
Lane* Paths::lane_for(const Gpu& gpu, Link& link, const Owner& owner) {
  Lane* found = nullptr;
  for (const auto& lane : link.lanes) {
    if (lane->copies > 0 && lane->owner == owner) found = lane.get();
    if (lane->copies == 0 && found == nullptr) found = lane.get();
  }
  if (found == nullptr) {
    if (link.lanes.size() >= kLanesMost) return nullptr;
    const Gpu& neighbour = gpus_[link.gpu];
    link.lanes.push_back(std::make_unique<Lane>(driver_, Lane::Side{gpu.device, gpu.context},
                                                Lane::Side{neighbour.device, neighbour.context}));
    found = link.lanes.back().get();
  }
  found->owner = owner;
  ++found->copies;
  return found;
}

// An event of the GPU, whatever context is current.
void* Paths::event_of(Gpu& gpu) {
  void* event = nullptr;
  if (!gpu.events.empty()) {
    event = gpu.events.back();
    gpu.events.pop_back();
    return event;
  }
  const Current current(driver_.cuda, gpu.context);
  return driver_.cuda.event_create(&event, kTimedEvent) == kCudaOk ? event : nullptr;
}

// Gives each link a share by its speed, so that all end at a time. The direct part comes first.
void Paths::divide(Spread& spread, uint64_t size) {
  double rates = gpus_[spread.gpu].direct_bytes_per_ms[spread.inward], work = double(size);
  for (const Relay& relay : spread.relays) {
    const double rate = relay.link->bytes_per_ms[spread.inward];
    rates += rate, work += rate * kLateMs;
  }
  uint64_t end = size;
  for (Relay& relay : spread.relays) {
    double& rate = relay.link->bytes_per_ms[spread.inward];
    const double share = rate * (work / rates - kLateMs);
    if (share < double(options().least_bytes / kSmallPart)) {
      rate += kForgotten * (kRelayNominal - rate);
      continue;
    }
    relay.size = std::min({end, uint64_t(share), room_of(*relay.lane, uint64_t(share))});
    if (relay.size == 0) continue;
    relay.at = (end - relay.size) / kAligned * kAligned;
    relay.size = end - relay.at;
    relay.chunks = int(relay.size / options().buffer_bytes) + kSmallChunks;
    relay.lane->chunks += relay.chunks;
    end = relay.at;
  }
  auto& relays = spread.relays;
  const auto is_empty = [](const Relay& relay) { return relay.size == 0; };
  for (Relay& relay : relays)
    if (is_empty(relay)) give_back(spread, relay);
  relays.erase(std::remove_if(relays.begin(), relays.end(), is_empty), relays.end());
  spread.direct_size = end;
}

// Returns how much of a part the lane takes now: all of it, or nothing. An empty lane takes what it
// can.
uint64_t Paths::room_of(const Lane& lane, uint64_t part) const {
  const int chunks = int(part / options().buffer_bytes) + 1 + kSmallChunks;
  if (lane.chunks + chunks <= kChunksMost) return part;
  return lane.chunks == 0 ? (kChunksMost - kSmallChunks - 1) * options().buffer_bytes : 0;
}

// Whether the lane's queue is full, and what is first in it moves. What stands still for long may
// wait for this thread.
bool Paths::will_have_room(const Owner& owner, bool is_long) {
  for (const auto& spread : begun_) {
    const Lane& lane = *spread->relays.front().lane;
    if (lane.owner != owner || lane.chunks < kChunksMost / 2) continue;
    const Current current(driver_.cuda, gpus_[spread->gpu].context);
    return !is_long || driver_.cuda.event_query(spread->start) == kCudaOk;
  }
  return false;
}

// ---- a copy -------------------------------------------------------------------------------------

// In the context of the copy's GPU. Its stream has recorded the start. The direct part is launched
// first: chunks are many calls.
CudaResult Paths::run(const Copy& copy, Spread& spread) {
  const auto& cuda = driver_.cuda;
  CudaResult result = kCudaOk;
  const auto copy_here = [&](uint64_t at, uint64_t size) {
    if (size > 0 && result == kCudaOk)
      result = cuda.copy(copy.target + at, copy.source + at, size, copy.stream);
  };
  copy_here(0, spread.direct_size);
  const CudaResult direct_ended = cuda.event_record(spread.direct_end, copy.stream);
  if (result == kCudaOk) result = direct_ended;
  uint64_t relayed = 0;
  for (Relay& relay : spread.relays) {
    if (result == kCudaOk && launch(copy, spread, relay))
      relayed += relay.size;
    else
      copy_here(relay.at, relay.size);
  }
  for (const Relay& relay : spread.relays) {
    if (!relay.launched) continue;
    const CudaResult waits = cuda.stream_wait(copy.stream, last_of(spread, relay), 0);
    if (result == kCudaOk) result = waits;
  }
  count_relayed(relayed);
  return result;
}

// Returns whether the neighbour takes the part.
bool Paths::launch(const Copy& copy, const Spread& spread, Relay& relay) {
  relay.events.begin = spread.start;
  const Part part{copy.target + relay.at, copy.source + relay.at, relay.size, spread.inward};
  try {
    relay.lane->launch(part, relay.events);
    relay.launched = true;
  } catch (const Fault& fault) {
    say(std::string("a neighbour relays no more: ") + fault.what());
    gpus_[relay.link->gpu].broken = true;
  }
  return relay.launched;
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
  const auto result_of = [&](const Gpu& gpu, void* event) {
    const Current current(driver_.cuda, gpu.context);
    return driver_.cuda.event_query(event);
  };
  Gpu& gpu = gpus_[spread.gpu];
  if (result_of(gpu, spread.direct_end) == kCudaNotReady) return false;
  for (const Relay& relay : spread.relays) {
    if (!relay.launched) continue;
    Gpu& neighbour = gpus_[relay.link->gpu];
    const CudaResult result = result_of(neighbour, relay.events.end);
    if (result == kCudaNotReady) return false;
    if (result != kCudaOk) neighbour.broken = true;
    if (spread.inward && result_of(gpu, relay.events.last) == kCudaNotReady) return false;
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
    blend(relay.link->bytes_per_ms[spread.inward],
          rate(relay.events.start, relay.events.end, relay.size, gpus_[relay.link->gpu].context));
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
  for (Relay& relay : spread.relays) give_back(spread, relay);
}

void Paths::give_back(const Spread& spread, Relay& relay) {
  if (relay.lane != nullptr) --relay.lane->copies, relay.lane->chunks -= relay.chunks;
  const auto give = [&](int gpu, void* event) {
    if (event != nullptr) gpus_[gpu].events.push_back(event);
  };
  give(relay.link->gpu, relay.events.start);
  give(relay.link->gpu, relay.events.end);
  give(spread.gpu, relay.events.last);
}

}  // namespace c2c::multipath
