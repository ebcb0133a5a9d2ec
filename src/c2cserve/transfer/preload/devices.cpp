#include "devices.h"

#include <limits.h>
#include <stdlib.h>

#include <algorithm>
#include <mutex>
#include <string>

#include "report.h"

namespace c2c::multipath {
namespace {

constexpr char kVariable[] = "CUDA_VISIBLE_DEVICES";
int own_devices = INT_MAX;

int entries(const std::string& list) { return 1 + int(std::count(list.begin(), list.end(), ',')); }

}  // namespace

CudaResult init_with_borrowed(CudaResult (*driver)(unsigned), unsigned flags) {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  const char* const borrowed = options().borrowed;
  const char* const listed = getenv(kVariable);
  if (borrowed == nullptr || own_devices != INT_MAX) return driver(flags);
  if (listed == nullptr || *listed == 0) {
    say("nothing is borrowed: " + std::string(kVariable) + " names no GPUs");
    return driver(flags);
  }
  const std::string before = listed;
  own_devices = entries(before);
  setenv(kVariable, (before + "," + borrowed).c_str(), 1);
  const CudaResult result = driver(flags);
  setenv(kVariable, before.c_str(), 1);
  return result;
}

int visible(int count) { return std::min(count, own_devices); }
bool is_borrowed(int ordinal) { return ordinal >= own_devices; }

}  // namespace c2c::multipath
