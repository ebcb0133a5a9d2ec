// The program sees of peer access what it would see without this library.
#include "peers.h"

#include <algorithm>
#include <mutex>
#include <vector>

namespace c2c::multipath {
namespace {

struct Pair {
  void *from, *to;
  bool by_program;
};

std::mutex mutex;
std::vector<Pair>& pairs() {
  static auto* const made = new std::vector<Pair>;
  return *made;
}

void* current_context() {
  static const auto current = real_as<CudaResult (*)(void**)>("cuCtxGetCurrent");
  void* context = nullptr;
  return current != nullptr && current(&context) == kCudaOk ? context : nullptr;
}

// Returns whether the pair is one of those that relays need. Then notes what the program has now,
// and returns what it had.
bool change(void* to, bool by_program, bool* before) {
  void* const from = current_context();
  const std::lock_guard<std::mutex> lock(mutex);
  for (Pair& pair : pairs()) {
    if (pair.from != from || pair.to != to) continue;
    *before = pair.by_program;
    pair.by_program = by_program;
    return true;
  }
  return false;
}

}  // namespace

void note_peer(void* from, void* to, bool by_program) {
  const std::lock_guard<std::mutex> lock(mutex);
  pairs().push_back({from, to, by_program});
}

}  // namespace c2c::multipath

using namespace c2c::multipath;

extern "C" CudaResult cuCtxEnablePeerAccess(void* peer, unsigned flags) {
  static const auto plain = real_as<CudaResult (*)(void*, unsigned)>("cuCtxEnablePeerAccess");
  bool before = false;
  if (flags == 0 && change(peer, true, &before))
    return before ? kPeerEnabledAlready : kCudaOk;
  return plain(peer, flags);
}

extern "C" CudaResult cuCtxDisablePeerAccess(void* peer) {
  static const auto plain = real_as<CudaResult (*)(void*)>("cuCtxDisablePeerAccess");
  bool before = false;
  if (change(peer, false, &before)) return before ? kCudaOk : kPeerNotEnabled;
  return plain(peer);
}
