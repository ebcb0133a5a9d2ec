// What a copy touches, and which GPUs may touch it.
#pragma once
#include <vector>

#include "driver.h"
#include "report.h"

namespace c2c::multipath {

inline void* const kLegacyStream = reinterpret_cast<void*>(1);
inline void* const kPerThreadStream = reinterpret_cast<void*>(2);

struct Copy {
  CudaPointer target, source;
  uint64_t size;
  void* stream;
};

struct Range {  // of one allocation or mapping
  CudaPointer start;
  uint64_t size;
};

struct Memory {  // both ends of a copy between pinned memory and a GPU
  int gpu;
  bool inward;  // to the GPU
  std::vector<Range> of_host;
};

// Returns `kSpread`, or why neighbours cannot take part. Of the thread's current context.
Reason look_at(const Driver& driver, const Copy& copy, Memory* memory);

// Whether the GPU of the current context reaches the pinned memory.
bool can_reach_host(const Driver& driver, const Memory& memory);

}  // namespace c2c::multipath
