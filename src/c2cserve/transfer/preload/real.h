// The functions that this library stands in front of.
#pragma once
#include <stdint.h>

#include "../native/cuda.h"

namespace c2c::multipath {

using transfer::CudaPointer;
using transfer::CudaResult;
using transfer::kCudaOk;

constexpr CudaResult kNotInitialized = 3, kNoDevice = 100, kInvalidDevice = 101;

// Returns a function of CUDA's driver itself, null if there is none of that name. Loads the driver.
void* real(const char* name);

template <typename F>
F real_as(const char* name) {
  return reinterpret_cast<F>(real(name));
}

bool cuda_was_used();     // by anything in this process, in whatever way
bool hooks_were_given();  // to the program, or called by it
void note_hook();

// While one lives, this thread's `dlsym` returns CUDA's own functions.
class PassThrough {
 public:
  PassThrough();
  ~PassThrough();
};

struct Options {  // of the environment
  uint64_t least_bytes = 6 << 20;  // smaller copies take one link
  int neighbours = 3;               // that a copy uses at most
  uint64_t buffer_bytes = 8 << 20;  // of each buffer in a neighbour's memory
};
const Options& options();

}  // namespace c2c::multipath
