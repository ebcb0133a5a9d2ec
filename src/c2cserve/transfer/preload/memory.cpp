#include "memory.h"

#include <algorithm>

namespace c2c::multipath {
namespace {

constexpr size_t kRangesMost = 4096;

struct End {
  int kind = 0;  // 0: CUDA does not know the memory
  int gpu = -1;
  bool managed = false;
};

End end_at(const Driver& driver, CudaPointer at) {
  End end;
  if (!driver.attribute(&end.kind, kPointerKind, at)) return End{};
  driver.attribute(&end.gpu, kOrdinal, at);
  uint32_t managed = 0;
  driver.attribute(&managed, kManagedMemory, at);
  end.managed = managed != 0;
  return end;
}

// Returns how many bytes from `at` on are of the same allocation, and of the same mapping; 0 if the
// driver does not say so.
uint64_t bytes_from(const Driver& driver, CudaPointer at) {
  uint64_t least = 0;
  const std::pair<int, int> extents[] = {{kRangeStart, kRangeSize}, {kMappingStart, kMappingSize}};
  for (auto [start_of, size_of] : extents) {
    CudaPointer start = 0;
    size_t size = 0;
    if (!driver.attribute(&start, start_of, at) || !driver.attribute(&size, size_of, at)) continue;
    if (at < start || at - start >= size) continue;
    const uint64_t left = start + size - at;
    least = least == 0 ? left : std::min(least, left);
  }
  return least;
}

// Returns whether all of it is memory of the same kind and GPU.
bool walk(const Driver& driver, CudaPointer at, uint64_t size, const End& first,
          std::vector<Range>* ranges) {
  while (size > 0) {
    const End end = end_at(driver, at);
    if (end.kind != first.kind || end.managed) return false;
    if (end.kind == kKindDevice && end.gpu != first.gpu) return false;
    if (ranges->size() == kRangesMost) return false;
    uint64_t found = std::min(bytes_from(driver, at), size);
    if (found == 0) {
      found = size;
      if (end_at(driver, at + size - 1).kind != first.kind) return false;
    }
    ranges->push_back({at, found});
    at += found, size -= found;
  }
  return true;
}

// The attribute is the address for kernels of the current context. There is none where memory was
// registered for another context only.
bool reads_host(const Driver& driver, const Range& range) {
  const CudaPointer last = range.start + range.size - 1;
  for (const CudaPointer at : {range.start, last}) {
    CudaPointer seen = 0;
    if (!driver.attribute(&seen, kDevicePointer, at) || seen != at) return false;
  }
  return true;
}

}  // namespace

Reason look_at(const Driver& driver, const Copy& copy, Memory* memory) {
  const End target = end_at(driver, copy.target), source = end_at(driver, copy.source);
  if (target.managed || source.managed) return kManaged;
  if (target.kind == source.kind) return kNotLink;
  if (target.kind == 0 || source.kind == 0) return kPageable;
  memory->inward = target.kind == kKindDevice;
  const End& gpu = memory->inward ? target : source;
  const End& host = memory->inward ? source : target;
  if (gpu.kind != kKindDevice || host.kind != kKindHost) return kNotLink;
  memory->gpu = gpu.gpu;
  const CudaPointer of_gpu = memory->inward ? copy.target : copy.source;
  const CudaPointer of_host = memory->inward ? copy.source : copy.target;
  std::vector<Range> ranges;
  const bool one_kind = walk(driver, of_gpu, copy.size, gpu, &ranges) &&
                        walk(driver, of_host, copy.size, host, &memory->of_host);
  return one_kind ? kSpread : kPartOfRange;
}

bool can_reach_host(const Driver& driver, const Memory& memory) {
  return std::all_of(memory.of_host.begin(), memory.of_host.end(),
                     [&](const Range& range) { return reads_host(driver, range); });
}

}  // namespace c2c::multipath
