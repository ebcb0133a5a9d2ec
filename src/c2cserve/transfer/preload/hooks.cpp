// The functions that stand in front of CUDA's driver. The runtime library finds the driver through
// `dlsym` and `cuGetProcAddress`, also where it is linked into the program, so it needs no hooks.
#include "hooks.h"

#include <string.h>

#include <cstdint>

#include "report.h"
#include "spread.h"

namespace c2c::multipath {
namespace {

uint64_t least_bytes = UINT64_MAX;  // nothing is large before the options are read

__attribute__((constructor)) void read_options() { least_bytes = options().least_bytes; }

CudaResult missing() { return kNoDevice; }

template <typename F>
F plain(F, const char* name) {
  const auto found = real_as<F>(name);
  return found != nullptr ? found : reinterpret_cast<F>(reinterpret_cast<void*>(&missing));
}

CudaPointer address(const void* pointer) { return reinterpret_cast<CudaPointer>(pointer); }

// The default stream of functions that are compiled for one default stream a thread.
void* own(void* stream) { return stream == nullptr ? kPerThreadStream : stream; }

}  // namespace
}  // namespace c2c::multipath

using namespace c2c::multipath;

// Small copies cost one comparison. NAME is looked for once.
#define PLAIN(NAME) \
  static const auto driver = plain(&NAME, #NAME); \
  return driver

// Return here if a large copy is spread: HOW is `spread` or `spread_and_wait`, the rest is the copy.
#define SPREAD(HOW, ...) \
  CudaResult result; \
  if (size >= least_bytes && HOW(__VA_ARGS__, &result)) return result

extern "C" {

CudaResult cuMemcpyHtoDAsync_v2(CudaPointer target, const void* source, size_t size, void* stream) {
  SPREAD(spread, {target, address(source), size, stream});
  PLAIN(cuMemcpyHtoDAsync_v2)(target, source, size, stream);
}

CudaResult cuMemcpyHtoDAsync_v2_ptsz(CudaPointer target, const void* source, size_t size,
                                     void* stream) {
  SPREAD(spread, {target, address(source), size, own(stream)});
  PLAIN(cuMemcpyHtoDAsync_v2_ptsz)(target, source, size, stream);
}

CudaResult cuMemcpyDtoHAsync_v2(void* target, CudaPointer source, size_t size, void* stream) {
  SPREAD(spread, {address(target), source, size, stream});
  PLAIN(cuMemcpyDtoHAsync_v2)(target, source, size, stream);
}

CudaResult cuMemcpyDtoHAsync_v2_ptsz(void* target, CudaPointer source, size_t size, void* stream) {
  SPREAD(spread, {address(target), source, size, own(stream)});
  PLAIN(cuMemcpyDtoHAsync_v2_ptsz)(target, source, size, stream);
}

CudaResult cuMemcpyAsync(CudaPointer target, CudaPointer source, size_t size, void* stream) {
  SPREAD(spread, {target, source, size, stream});
  PLAIN(cuMemcpyAsync)(target, source, size, stream);
}

CudaResult cuMemcpyAsync_ptsz(CudaPointer target, CudaPointer source, size_t size, void* stream) {
  SPREAD(spread, {target, source, size, own(stream)});
  PLAIN(cuMemcpyAsync_ptsz)(target, source, size, stream);
}

// ---- copies that return when they are over ------------------------------------------------------

CudaResult cuMemcpyHtoD_v2(CudaPointer target, const void* source, size_t size) {
  SPREAD(spread_and_wait, {target, address(source), size, kLegacyStream});
  PLAIN(cuMemcpyHtoD_v2)(target, source, size);
}

CudaResult cuMemcpyHtoD_v2_ptds(CudaPointer target, const void* source, size_t size) {
  SPREAD(spread_and_wait, {target, address(source), size, kPerThreadStream});
  PLAIN(cuMemcpyHtoD_v2_ptds)(target, source, size);
}

CudaResult cuMemcpyDtoH_v2(void* target, CudaPointer source, size_t size) {
  SPREAD(spread_and_wait, {address(target), source, size, kLegacyStream});
  PLAIN(cuMemcpyDtoH_v2)(target, source, size);
}

CudaResult cuMemcpyDtoH_v2_ptds(void* target, CudaPointer source, size_t size) {
  SPREAD(spread_and_wait, {address(target), source, size, kPerThreadStream});
  PLAIN(cuMemcpyDtoH_v2_ptds)(target, source, size);
}

CudaResult cuMemcpy(CudaPointer target, CudaPointer source, size_t size) {
  SPREAD(spread_and_wait, {target, source, size, kLegacyStream});
  PLAIN(cuMemcpy)(target, source, size);
}

CudaResult cuMemcpy_ptds(CudaPointer target, CudaPointer source, size_t size) {
  SPREAD(spread_and_wait, {target, source, size, kPerThreadStream});
  PLAIN(cuMemcpy_ptds)(target, source, size);
}

// ---- what has to be known -----------------------------------------------------------------------

CudaResult cuDevicePrimaryCtxReset(int device) {
  stop_spreading(kReset);
  PLAIN(cuDevicePrimaryCtxReset)(device);
}

CudaResult cuDevicePrimaryCtxReset_v2(int device) {
  stop_spreading(kReset);
  PLAIN(cuDevicePrimaryCtxReset_v2)(device);
}

// Programs that are linked with the driver come this way, and no other until they copy.
CudaResult cuInit(unsigned flags) {
  note_hook();
  PLAIN(cuInit)(flags);
}

// ---- how programs find all that -----------------------------------------------------------------

CudaResult cuGetProcAddress(const char* symbol, void** function, int version, uint64_t flags) {
  static const auto driver = plain(&cuGetProcAddress, "cuGetProcAddress");
  note_hook();
  const CudaResult result = driver(symbol, function, version, flags);
  if (result == kCudaOk) *function = hook_for(symbol, version, flags, *function);
  return result;
}

CudaResult cuGetProcAddress_v2(const char* symbol, void** function, int version, uint64_t flags,
                               int* status) {
  static const auto driver = plain(&cuGetProcAddress_v2, "cuGetProcAddress_v2");
  note_hook();
  const CudaResult result = driver(symbol, function, version, flags, status);
  if (result == kCudaOk) *function = hook_for(symbol, version, flags, *function);
  return result;
}

}  // extern "C"

namespace c2c::multipath {
namespace {

enum Streams { kAny, kLegacy, kPerThread };
constexpr uint64_t kAskedPerThread = 2;  // a flag of cuGetProcAddress

struct Hook {
  const char* name;    // in the library's symbol table
  const char* symbol;  // for cuGetProcAddress
  int since;           // the first version of CUDA that has it under that symbol
  Streams streams;
  void* function;
};

#define HOOK(NAME, SYMBOL, SINCE, STREAMS) \
  { #NAME, SYMBOL, SINCE, STREAMS, reinterpret_cast<void*>(&NAME) }

const Hook kHooks[] = {
    HOOK(cuMemcpyHtoDAsync_v2, "cuMemcpyHtoDAsync", 3020, kLegacy),
    HOOK(cuMemcpyHtoDAsync_v2_ptsz, "cuMemcpyHtoDAsync", 7000, kPerThread),
    HOOK(cuMemcpyDtoHAsync_v2, "cuMemcpyDtoHAsync", 3020, kLegacy),
    HOOK(cuMemcpyDtoHAsync_v2_ptsz, "cuMemcpyDtoHAsync", 7000, kPerThread),
    HOOK(cuMemcpyAsync, "cuMemcpyAsync", 4000, kLegacy),
    HOOK(cuMemcpyAsync_ptsz, "cuMemcpyAsync", 7000, kPerThread),
    HOOK(cuMemcpyHtoD_v2, "cuMemcpyHtoD", 3020, kLegacy),
    HOOK(cuMemcpyHtoD_v2_ptds, "cuMemcpyHtoD", 7000, kPerThread),
    HOOK(cuMemcpyDtoH_v2, "cuMemcpyDtoH", 3020, kLegacy),
    HOOK(cuMemcpyDtoH_v2_ptds, "cuMemcpyDtoH", 7000, kPerThread),
    HOOK(cuMemcpy, "cuMemcpy", 4000, kLegacy),
    HOOK(cuMemcpy_ptds, "cuMemcpy", 7000, kPerThread),
    HOOK(cuInit, "cuInit", 2000, kAny),
    HOOK(cuDevicePrimaryCtxReset, "cuDevicePrimaryCtxReset", 7000, kAny),
    HOOK(cuDevicePrimaryCtxReset_v2, "cuDevicePrimaryCtxReset", 11000, kAny),
    HOOK(cuGetProcAddress, "cuGetProcAddress", 11030, kAny),
    HOOK(cuGetProcAddress_v2, "cuGetProcAddress", 12000, kAny),
};

}  // namespace

void* hook_named(const char* name) {
  for (const Hook& hook : kHooks)
    if (strcmp(hook.name, name) == 0) return hook.function;
  return nullptr;
}

void* hook_for(const char* symbol, int version, uint64_t flags, void* found) {
  if (found == nullptr || symbol == nullptr) return found;
  const Streams streams = flags & kAskedPerThread ? kPerThread : kLegacy;
  for (const Hook& hook : kHooks) {  // later ones are newer
    if (hook.streams != kAny && hook.streams != streams) continue;
    if (strcmp(hook.symbol, symbol) != 0 || hook.since > version) continue;
    if (real(hook.name) != nullptr) found = hook.function;
  }
  return found;
}

}  // namespace c2c::multipath
