#include "lane.h"

#include <algorithm>
#include <vector>

#include "../native/links.h"

namespace c2c::multipath {
namespace {

using transfer::Current;

constexpr uint64_t kLeastShare = 8;        // of a buffer: the smallest chunk
constexpr uint64_t kChunkUnit = 512;
constexpr uint64_t kMappingUnit = 2 << 20;
constexpr int kDeviceLocation = 1;

// In: large ones first. The last one's second hop is all that does not overlap with the link. Out:
// the reverse, as the link has to wait for the first one's first hop.
std::vector<uint64_t> chunks_of(const Part& part) {
  const uint64_t most = options().buffer_bytes, least = most / kLeastShare;
  std::vector<uint64_t> sizes;
  for (uint64_t left = part.size; left > 0; left -= sizes.back()) {
    const uint64_t half = left / 2 / kChunkUnit * kChunkUnit;
    sizes.push_back(std::min(left, std::clamp(half, least, most)));
  }
  if (!part.inward) std::reverse(sizes.begin(), sizes.end());
  return sizes;
}

// Memory of one GPU's that two GPUs have access to. It stays for good.
CudaPointer map_for_both(const Driver& driver, int owner, int other, uint64_t size) {
  const auto& cuda = driver.cuda;
  CudaPointer at = 0;
  AllocationHandle memory = 0;
  const AllocationProp properties{1, 0, kDeviceLocation, owner, nullptr, {}};
  cuda.check("cuMemCreate", driver.create(&memory, size, &properties, 0));
  CudaResult result = driver.reserve(&at, size, 0, 0, 0);
  const char* call = "cuMemAddressReserve";
  bool mapped = false;
  if (result == kCudaOk) {
    call = "cuMemMap";
    result = driver.map(at, size, 0, memory, 0);
    mapped = result == kCudaOk;
  }
  if (mapped) {
    call = "cuMemSetAccess";
    const AccessDesc access[] = {{kDeviceLocation, owner, kReadWrite},
                                 {kDeviceLocation, other, kReadWrite}};
    result = driver.set_access(at, size, access, 2);
  }
  if (result != kCudaOk) {
    if (mapped) driver.unmap(at, size);
    if (at != 0) driver.unreserve(at, size);
  }
  driver.release(memory);  // a mapping holds it
  cuda.check(call, result);
  return at;
}

}  // namespace

Lane::Lane(const Driver& driver, Side gpu, Side neighbour)
    : driver_(driver), gpu_(gpu), neighbour_(neighbour) {
  const uint64_t bytes = kBuffers * options().buffer_bytes;
  const uint64_t units = (bytes + kMappingUnit - 1) / kMappingUnit;
  memory_ = map_for_both(driver, neighbour.device, gpu.device, units * kMappingUnit);
  make_side(gpu_);
  make_side(neighbour_);
}

void Lane::make_side(Side& side) {
  const auto& cuda = driver_.cuda;
  const Current current(cuda, side.context);
  int lowest = 0, highest = 0;
  cuda.check("cuCtxGetStreamPriorityRange", cuda.priorities(&lowest, &highest));
  cuda.check("cuStreamCreateWithPriority",
             cuda.stream_create(&side.stream, transfer::kNonBlockingStream, highest));
  for (void*& event : side.copied)
    cuda.check("cuEventCreate", cuda.event_create(&event, transfer::kTimelessEvent));
}

void Lane::launch(const Part& part, const PartEvents& events) {
  const std::lock_guard<std::mutex> lock(launching_);
  try {
    issue(part, events);
  } catch (const transfer::Fault&) {
    settle();
    throw;
  }
}

void Lane::issue(const Part& part, const PartEvents& events) {
  const auto& cuda = driver_.cuda;
  const Side& fills = part.inward ? neighbour_ : gpu_;
  const Side& drains = part.inward ? gpu_ : neighbour_;
  {
    const Current current(cuda, fills.context);
    cuda.check("cuStreamWaitEvent", cuda.stream_wait(fills.stream, events.begin, 0));
  }
  uint64_t at = 0;
  for (const uint64_t size : chunks_of(part)) {
    const int buffer = next_;
    next_ = (next_ + 1) % kBuffers;
    const CudaPointer place = memory_ + uint64_t(buffer) * options().buffer_bytes;
    void* const start = at == 0 ? events.start : nullptr;
    step(fills, drains.copied[buffer], {place, part.source + at, size, part.inward}, buffer,
         part.inward ? start : nullptr);
    step(drains, fills.copied[buffer], {part.target + at, place, size, part.inward}, buffer,
         part.inward ? nullptr : start);
    at += size;
  }
  record(neighbour_, events.end);
  if (part.inward) record(gpu_, events.last);
}

// One hop of a chunk: as soon as the other side has filled the buffer, or emptied it.
void Lane::step(const Side& side, void* full_or_empty, const Part& chunk, int buffer,
                void* start) {
  const auto& cuda = driver_.cuda;
  const Current current(cuda, side.context);
  cuda.check("cuStreamWaitEvent", cuda.stream_wait(side.stream, full_or_empty, 0));
  if (start != nullptr) cuda.check("cuEventRecord", cuda.event_record(start, side.stream));
  cuda.check("cuMemcpyAsync", cuda.copy(chunk.target, chunk.source, chunk.size, side.stream));
  cuda.check("cuEventRecord", cuda.event_record(side.copied[buffer], side.stream));
}

void Lane::record(const Side& side, void* event) {
  const Current current(driver_.cuda, side.context);
  driver_.cuda.check("cuEventRecord", driver_.cuda.event_record(event, side.stream));
}

void Lane::settle() {
  for (const Side* side : {&gpu_, &neighbour_}) {
    void* popped = nullptr;
    if (driver_.cuda.push(side->context) != kCudaOk) continue;
    driver_.cuda.stream_synchronize(side->stream);
    driver_.cuda.pop(&popped);
  }
}

}  // namespace c2c::multipath
