#include "spread.h"

#include <pthread.h>

#include <atomic>
#include <exception>
#include <mutex>

#include "paths.h"

namespace c2c::multipath {
namespace {

std::atomic<Paths*> paths{nullptr};    // stays to the end of the process, and after CUDA's
std::atomic<int> stopped{kSpread};     // why nothing is spread any more
std::mutex making;

void stop_in_child() {
  if (paths.load() != nullptr) stop_spreading(kForked);
}

Paths* made_paths() {
  if (Paths* const found = paths.load(std::memory_order_acquire)) return found;
  const std::lock_guard<std::mutex> lock(making);
  if (paths.load() == nullptr) {
    pthread_atfork(nullptr, nullptr, stop_in_child);
    paths.store(new Paths, std::memory_order_release);
  }
  return paths.load();
}

bool has_context() {
  static const auto current = real_as<CudaResult (*)(void**)>("cuCtxGetCurrent");
  void* context = nullptr;
  return current != nullptr && current(&context) == kCudaOk && context != nullptr;
}

}  // namespace

bool spread(const Copy& copy, CudaResult* result) {
  const auto why = Reason(stopped.load(std::memory_order_relaxed));
  if (why != kSpread) {
    count(why, copy.size);
    return false;
  }
  if (!has_context()) return false;  // the driver says so
  try {
    const Reason reason = made_paths()->begin(copy, result);
    count(reason, copy.size);
    return reason == kSpread;
  } catch (const std::exception& fault) {
    count(kFault, copy.size, fault.what());
    if (paths.load() == nullptr) stop_spreading(kFault);
    return false;
  }
}

bool spread_and_wait(const Copy& copy, CudaResult* result) {
  static const auto wait = real_as<CudaResult (*)(void*)>("cuStreamSynchronize");
  if (!spread(copy, result)) return false;
  const CudaResult waited = wait(copy.stream);
  if (*result == kCudaOk) *result = waited;
  return true;
}

void stop_spreading(Reason reason) { stopped = reason; }

}  // namespace c2c::multipath
