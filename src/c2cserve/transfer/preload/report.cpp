#include "report.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>

#include "real.h"

namespace c2c::multipath {
namespace {

const char* const kNames[kReasons] = {
    "over several links",
    "pageable memory",
    "managed memory",
    "not between host memory and a GPU",
    "more than one allocation",
    "pinned memory that a neighbour cannot access",
    "captured into a graph",
    "not in the GPU's primary context",
    "no neighbour with NVLink",
    "busy neighbours",
    "a forked child",
    "a GPU was reset",
    "an error",
};

std::atomic<int64_t> copies[kReasons], bytes_of[kReasons], relayed;

bool is_asked_for() { return getenv("C2CSERVE_MULTIPATH_REPORT") != nullptr; }

// What a program does a lot of without a loss is not worth a line each time.
bool is_quiet(Reason reason) {
  return reason == kSpread || reason == kNotLink || reason == kCapture || reason == kBusy;
}

// Runs at the end of the process. CUDA may be gone by then.
__attribute__((destructor)) void report_at_end() {
  if (!hooks_were_given() && cuda_was_used()) {
    say("CUDA was used, but its calls did not come through this library: nothing was spread. "
        "The program finds the driver in a way that is not known here");
    return;
  }
  if (!is_asked_for()) return;
  for (int i = 0; i < kReasons; ++i) {
    if (copies[i] == 0) continue;
    std::string line = std::to_string(copies[i]) + " copies, " +
                       std::to_string(bytes_of[i] / 1000000) + " MB: " + kNames[i];
    if (i == kSpread) line += " (" + std::to_string(relayed / 1000000) + " MB by neighbours)";
    say(line);
  }
}

}  // namespace

void say(const std::string& line) {
  const std::string whole = "c2cserve multipath: " + line + "\n";
  fputs(whole.c_str(), stderr);  // one call: lines of several processes stay whole
}

void count(Reason reason, uint64_t bytes, const char* detail) {
  bytes_of[reason] += int64_t(bytes);
  if (copies[reason]++ > 0) return;
  if (reason == kSpread && is_asked_for()) say("copies take several links");
  if (is_quiet(reason)) return;
  std::string line = std::string("a copy of ") + std::to_string(bytes / 1000000) +
                     " MB takes one link: " + kNames[reason];
  if (*detail != 0) line += std::string(" (") + detail + ")";
  say(line + ". Further ones are not reported");
}

void count_relayed(uint64_t bytes) { relayed += int64_t(bytes); }

}  // namespace c2c::multipath

// For tests, and for programs that want to know.
extern "C" void c2c_multipath_counts(c2c::multipath::Counts* counts) {
  using namespace c2c::multipath;
  for (int i = 0; i < kReasons; ++i) counts->copies[i] = copies[i], counts->bytes[i] = bytes_of[i];
  counts->relayed_bytes = relayed;
}
