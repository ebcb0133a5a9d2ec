// A `libcuda.so.1` for whole programs: the emulated driver of the transfer engine's tests, and what
// programs need beside. A thread runs the streams' operations one by one, in a random order.
#define FAKE_DRIVER
#include "../fake_cuda.cpp"

#include <stdio.h>
#include <stdlib.h>

#include <atomic>
#include <condition_variable>
#include <random>
#include <thread>
#include <tuple>
#include <utility>

namespace {

enum Kind { kHost = 1, kDevice = 2, kManaged = 3 };
struct Allocation {
  uint64_t start, size;
  Kind kind;
  int gpu;
  bool ipc_capable;       // memory of cuMemAlloc: peers have access
  void* only_in;          // null, or the only context in which host memory is mapped
  std::set<int> access;   // of mapped memory
  bool created = false;   // by cuMemCreate
};
std::map<uint64_t, Allocation> allocations;
std::set<std::pair<void*, void*>> peers;
std::map<uint64_t, std::pair<int, size_t>> created;  // by handle: the GPU, and bytes
std::map<void*, Stream*> default_streams;
std::vector<std::vector<std::function<bool()>>*> graphs;
thread_local std::map<void*, Stream*> own_streams;
int initialized = 0;

int gpus() { return getenv("FAKE_GPUS") ? atoi(getenv("FAKE_GPUS")) : 2; }
int gpu_of(void* context) { return int(reinterpret_cast<uintptr_t>(context) - 1) % 100; }

[[noreturn]] void broken(const char* what) {
  fprintf(stderr, "the emulated driver: %s\n", what);
  abort();
}

Stream* stream_of(void* handle) {
  const auto number = reinterpret_cast<uintptr_t>(handle);
  if (number > 2) return static_cast<Stream*>(handle);
  if (current.empty()) broken("a default stream without a context");
  auto& found = (number == 2 ? own_streams : default_streams)[current.back()];
  if (found == nullptr) found = new Stream{current.back(), {}};
  streams.insert(found);
  if (number == 2) found->waits_for_default = true;
  return found;
}

// Lets what comes next wait for the default stream, or the default stream for all others.
void order(Stream* stream) {
  const auto wait_for = [=](Stream* other) {
    const int64_t until = other->issued;
    if (other->completed() >= until) return;
    ++stream->issued;
    stream->operations.push_back([=] { return other->completed() >= until; });
  };
  Stream* const standard =
      default_streams.count(stream->context) ? default_streams[stream->context] : nullptr;
  if (stream->waits_for_default && standard != nullptr) wait_for(standard);
  if (stream != standard) return;
  for (Stream* other : streams)
    if (other->waits_for_default && other->context == stream->context) wait_for(other);
}

Allocation* allocation_of(uint64_t address) {
  auto after = allocations.upper_bound(address);
  if (after == allocations.begin()) return nullptr;
  Allocation& found = std::prev(after)->second;
  return address < found.start + found.size ? &found : nullptr;
}

bool can_access(const Allocation& one, void* context) {
  if (one.kind == kHost) return one.only_in == nullptr || one.only_in == context;
  if (one.kind == kManaged || one.gpu == gpu_of(context)) return true;
  if (!one.ipc_capable) return one.access.count(gpu_of(context)) > 0;
  return peers.count({context, reinterpret_cast<void*>(uintptr_t(one.gpu) + 1)}) > 0;
}

// Copies by memory of cuMemCreate, which only the library has: each hop has to be one that a copy
// engine makes over the right link. FAKE_FAILS is the number of the first hop that fails.
int refuse(const Piece& copy) {
  static int hops = 0;
  static const int first_that_fails = getenv("FAKE_FAILS") ? atoi(getenv("FAKE_FAILS")) : INT32_MAX;
  const Allocation *target = allocation_of(copy.target), *source = allocation_of(copy.source);
  const bool is_fill = target != nullptr && target->created;
  const Allocation *buffer = is_fill ? target : source, *other = is_fill ? source : target;
  if (buffer == nullptr || !buffer->created) return 0;
  void* const context = current.back();
  if (copy.size > buffer->size || (is_fill ? copy.target : copy.source) + copy.size >
                                      buffer->start + buffer->size)
    broken("a hop leaves its buffers");
  if (!buffer->access.count(gpu_of(context))) broken("a hop from a GPU that cannot reach a buffer");
  if (other == nullptr || other->kind == kManaged || !can_access(*other, context))
    broken("a hop touches memory that its GPU has no access to");
  if (other->kind == kHost && buffer->gpu != gpu_of(context)) broken("a hop takes the other link");
  if (other->kind == kDevice && (other->gpu != gpu_of(context) || buffer->gpu == other->gpu))
    broken("a hop between GPUs is not its GPU's");
  return ++hops >= first_that_fails ? kLaunchFailed : 0;
}

int add(uint64_t* address, size_t size, Allocation made) {
  const Lock lock(mutex);
  if (current.empty()) return kInvalidContext;
  void* const memory = aligned_alloc(4096, (size + 8191) / 4096 * 4096);
  made.start = *address = reinterpret_cast<uint64_t>(memory);
  made.size = size;
  memset(reinterpret_cast<void*>(*address), 0, size);
  allocations[made.start] = made;
  return 0;
}

// The streams' operations, one at a time.
void run_streams() {
  std::mt19937 random(getenv("FAKE_SEED") ? unsigned(atoi(getenv("FAKE_SEED"))) : 1u);
  while (true) {
    bool any = false;
    {
      const Lock lock(mutex);
      std::vector<Stream*> all(streams.begin(), streams.end());
      for (int i = 0; i < 16 && !all.empty(); ++i) {
        Stream* one = all[random() % all.size()];
        if (one->blocked || one->operations.empty() || !one->operations.front()()) continue;
        one->operations.pop_front();
        any = true;
      }
    }
    if (!any) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

void wait_until(const std::function<bool()>& holds) {
  while (true) {
    {
      const Lock lock(mutex);
      if (holds()) return;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

}  // namespace

extern "C" {

// ---- for tests ----------------------------------------------------------------------------------

// Memory that is mapped for one GPU only.
int fake_map(uint64_t* address, size_t size, int gpu) {
  return add(address, size, {0, 0, kDevice, gpu, false, nullptr, {gpu}, false});
}

// Memory that is pinned in the current context only.
int fake_register(uint64_t* address, size_t size) {
  void* const context = current.empty() ? nullptr : current.back();
  return add(address, size, {0, 0, kHost, 0, false, context, {}});
}

// The stream goes on when the number is not 0 any more.
int fake_hold(void* stream, const std::atomic<int>* released) {
  return enqueue(stream, [=] { return *released != 0; });
}

// How many contexts have access to all that others allocate.
int fake_peers() {
  const Lock lock(mutex);
  return int(peers.size());
}

// ---- devices and contexts -----------------------------------------------------------------------

int cuInit(unsigned) {
  const Lock lock(mutex);
  if (initialized++ == 0) {
    std::thread(run_streams).detach();
    atexit([] { mutex.lock(); });  // nothing runs while memory goes
    pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); },
                   [] { new (&mutex) std::recursive_mutex; });  // another thread's there
  }
  return 0;
}

int cuDeviceGetCount(int* count) {
  *count = gpus();
  return initialized ? 0 : 3;
}

int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal < gpus() ? 0 : 101;
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = reinterpret_cast<void*>(uintptr_t(device) + 1);
  return 0;
}

int cuDevicePrimaryCtxReset_v2(int) { return 0; }

int cuCtxCreate_fake(void** context, int device) {
  *context = reinterpret_cast<void*>(uintptr_t(device) + 101);
  current.push_back(*context);
  return 0;
}

int cuCtxGetCurrent(void** context) {
  *context = current.empty() ? nullptr : current.back();
  return 0;
}

int cuCtxSetCurrent(void* context) {
  if (current.empty()) current.push_back(context);
  current.back() = context;
  return 0;
}

int cuDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = device != peer;
  return 0;
}

int cuDeviceGetP2PAttribute(int* value, int attribute, int, int) {
  *value = getenv("FAKE_NO_NVLINK") == nullptr;
  return attribute == 3 ? 0 : kInvalidHandle;
}

int cuCtxEnablePeerAccess(void* peer, unsigned) {
  const Lock lock(mutex);
  if (current.empty()) return kInvalidContext;
  return peers.insert({current.back(), peer}).second ? 0 : 704;
}

int cuCtxDisablePeerAccess(void* peer) {
  const Lock lock(mutex);
  return peers.erase({current.back(), peer}) ? 0 : 705;
}

// ---- memory -------------------------------------------------------------------------------------

int cuMemAlloc_v2(uint64_t* address, size_t size) {
  if (current.empty()) return kInvalidContext;
  return add(address, size, {0, 0, kDevice, gpu_of(current.back()), true, nullptr, {}});
}

int cuMemFree_v2(uint64_t) { return kInvalidHandle; }  // these programs free nothing

int cuMemAllocHost_v2(uint64_t* address, size_t size) {
  return add(address, size, {0, 0, kHost, 0, false, nullptr, {}});
}

int cuMemAllocManaged(uint64_t* address, size_t size, unsigned) {
  return add(address, size, {0, 0, kManaged, 0, false, nullptr, {}});
}

int cuMemCreate(uint64_t* handle, size_t size, const int* properties, uint64_t flags) {
  const Lock lock(mutex);
  if (getenv("FAKE_NO_MAPPINGS") != nullptr) return 2;
  if (properties[0] != 1 || properties[1] != 0 || properties[2] != 1 || flags != 0) return 1;
  if (properties[3] >= gpus() || size == 0 || size % (2 << 20) != 0) return 1;
  *handle = created.size() + 1;
  created[*handle] = {properties[3], size};
  return 0;
}

int cuMemRelease(uint64_t handle) { return created.count(handle) ? 0 : 1; }

int cuMemAddressReserve(uint64_t* address, size_t size, size_t, uint64_t, uint64_t) {
  *address = reinterpret_cast<uint64_t>(aligned_alloc(4096, size));
  return 0;
}

int cuMemAddressFree(uint64_t address, size_t) {
  free(reinterpret_cast<void*>(address));
  return 0;
}

int cuMemMap(uint64_t address, size_t size, size_t offset, uint64_t handle, uint64_t) {
  const Lock lock(mutex);
  if (offset != 0 || !created.count(handle) || created[handle].second != size) return 1;
  allocations[address] = {address, size, kDevice, created[handle].first, false, nullptr, {}, true};
  return 0;
}

int cuMemUnmap(uint64_t address, size_t) {
  const Lock lock(mutex);
  return allocations.erase(address) ? 0 : 1;
}

struct Access {
  int location_kind, location_id, flags;
};

int cuMemSetAccess(uint64_t address, size_t size, const Access* access, size_t count) {
  const Lock lock(mutex);
  if (getenv("FAKE_NO_ACCESS") != nullptr) return 801;
  Allocation* one = allocation_of(address);
  if (one == nullptr || !one->created || one->start != address || one->size != size) return 1;
  for (size_t i = 0; i < count; ++i) {
    if (access[i].location_kind != 1 || access[i].flags != 3) return 1;
    one->access.insert(access[i].location_id);
  }
  return 0;
}

int cuPointerGetAttribute(void* value, int attribute, uint64_t address) {
  const Lock lock(mutex);
  Allocation* one = allocation_of(address);
  if (current.empty() || one == nullptr) return 1;
  switch (attribute) {
    case 2: *static_cast<int*>(value) = one->kind == kHost ? kHost : kDevice; break;
    case 3: {
      if (!can_access(*one, current.back())) return 1;
      *static_cast<uint64_t*>(value) = address;
      break;
    }
    case 8: *static_cast<int*>(value) = one->kind == kManaged; break;
    case 9: *static_cast<int*>(value) = one->gpu; break;
    case 10: *static_cast<int*>(value) = one->ipc_capable; break;
    case 11: case 19: *static_cast<uint64_t*>(value) = one->start; break;
    case 12: case 18: *static_cast<uint64_t*>(value) = one->size; break;
    case 16: *static_cast<int*>(value) = can_access(*one, current.back()) ? 3 : 0; break;
    default: return 1;
  }
  return 0;
}

// Says what it does not know by zeros.
int cuPointerGetAttributes(unsigned count, const int* attributes, void** values, uint64_t address) {
  if (count != 1) broken("several attributes");
  cuPointerGetAttribute(values[0], attributes[0], address);
  return current.empty() ? kInvalidContext : 0;
}

// ---- streams ------------------------------------------------------------------------------------

int cuStreamCreate(void** stream, unsigned flags) {
  return cuStreamCreateWithPriority(stream, flags, 0);
}

int cuStreamGetCtx(void* stream, void** context) {
  const Lock lock(mutex);
  *context = stream_of(stream)->context;
  return 0;
}

int cuStreamIsCapturing(void* stream, int* status) {
  const Lock lock(mutex);
  *status = stream_of(stream)->captured != nullptr;
  return 0;
}

int cuThreadExchangeStreamCaptureMode(int* mode) {
  thread_local int now = 0;
  std::swap(now, *mode);
  return 0;
}

int cuStreamSynchronize(void* stream) {
  Stream* one = nullptr;
  int64_t until = 0;
  {
    const Lock lock(mutex);
    one = stream_of(stream);
    order(one);
    until = one->issued;
  }
  wait_until([&] { return one->completed() >= until; });
  return 0;
}

int cuCtxSynchronize() {
  void* context = current.back();
  wait_until([&] {
    for (Stream* one : streams)
      if (one->context == context && !one->operations.empty()) return false;
    return true;
  });
  return 0;
}

int cuEventSynchronize(void* event) {
  wait_until([&] { return cuEventQuery(event) != kNotReady; });
  return 0;
}

int cuEventElapsedTime(float* ms, void* start, void* end) {
  const Lock lock(mutex);
  *ms = float(static_cast<Event*>(end)->last->at_ms - static_cast<Event*>(start)->last->at_ms);
  return 0;
}

int cuLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
  return enqueue(stream, [=] {
    function(data);
    return true;
  });
}

// ---- graphs -------------------------------------------------------------------------------------

int cuStreamBeginCapture_v2(void* stream, int) {
  const Lock lock(mutex);
  graphs.push_back(new std::vector<std::function<bool()>>);
  stream_of(stream)->captured = graphs.back();
  return 0;
}

int cuStreamEndCapture(void* stream, void** graph) {
  const Lock lock(mutex);
  *graph = std::exchange(stream_of(stream)->captured, nullptr);
  return 0;
}

int cuGraphLaunch(void* graph, void* stream) {
  for (const auto& one : *static_cast<std::vector<std::function<bool()>>*>(graph))
    if (const int result = enqueue(stream, one)) return result;
  return 0;
}

// ---- copies -------------------------------------------------------------------------------------

int cuMemcpyAsync_ptsz(uint64_t target, uint64_t source, size_t size, void* stream) {
  return cuMemcpyAsync(target, source, size, stream ? stream : reinterpret_cast<void*>(2));
}
int cuMemcpy(uint64_t target, uint64_t source, size_t size) {
  void* standard = reinterpret_cast<void*>(1);
  const int result = cuMemcpyAsync(target, source, size, standard);
  return result ? result : cuStreamSynchronize(standard);
}
int cuMemcpy_ptds(uint64_t target, uint64_t source, size_t size) {
  void* own = reinterpret_cast<void*>(2);
  const int result = cuMemcpyAsync(target, source, size, own);
  return result ? result : cuStreamSynchronize(own);
}

#define COPIES(NAME)                                                                         \
  int NAME##Async_v2(uint64_t target, uint64_t source, size_t size, void* stream) {          \
    return cuMemcpyAsync(target, source, size, stream);                                      \
  }                                                                                          \
  int NAME##Async_v2_ptsz(uint64_t target, uint64_t source, size_t size, void* stream) {     \
    return cuMemcpyAsync_ptsz(target, source, size, stream);                                 \
  }                                                                                          \
  int NAME##_v2(uint64_t target, uint64_t source, size_t size) {                             \
    return cuMemcpy(target, source, size);                                                   \
  }                                                                                          \
  int NAME##_v2_ptds(uint64_t target, uint64_t source, size_t size) {                        \
    return cuMemcpy_ptds(target, source, size);                                              \
  }
COPIES(cuMemcpyHtoD)
COPIES(cuMemcpyDtoH)

// ---- symbols ------------------------------------------------------------------------------------

int cuGetProcAddress_v2(const char* symbol, void** function, int version, uint64_t flags,
                        int* status);

int cuGetProcAddress(const char* symbol, void** function, int version, uint64_t flags) {
  return cuGetProcAddress_v2(symbol, function, version, flags, nullptr);
}

int cuGetProcAddress_v2(const char* symbol, void** function, int, uint64_t flags, int* status) {
  const std::string name = symbol;
  const bool own = flags & 2;
  const std::map<std::string, std::pair<void*, void*>> all{
#define BOTH(NAME, PLAIN, OWN) \
  {NAME, {reinterpret_cast<void*>(&PLAIN), reinterpret_cast<void*>(&OWN)}}
      BOTH("cuMemcpyHtoDAsync", cuMemcpyHtoDAsync_v2, cuMemcpyHtoDAsync_v2_ptsz),
      BOTH("cuMemcpyDtoHAsync", cuMemcpyDtoHAsync_v2, cuMemcpyDtoHAsync_v2_ptsz),
      BOTH("cuMemcpyAsync", cuMemcpyAsync, cuMemcpyAsync_ptsz),
      BOTH("cuMemcpyHtoD", cuMemcpyHtoD_v2, cuMemcpyHtoD_v2_ptds),
      BOTH("cuMemcpyDtoH", cuMemcpyDtoH_v2, cuMemcpyDtoH_v2_ptds),
      BOTH("cuMemcpy", cuMemcpy, cuMemcpy_ptds),
      BOTH("cuGetProcAddress", cuGetProcAddress_v2, cuGetProcAddress_v2),
      BOTH("cuInit", cuInit, cuInit),
      BOTH("cuDeviceGetCount", cuDeviceGetCount, cuDeviceGetCount),
      BOTH("cuDeviceGet", cuDeviceGet, cuDeviceGet),
  };
  const auto found = all.find(name);
  if (status != nullptr) *status = found == all.end();
  if (found == all.end()) return 500;
  *function = own ? found->second.second : found->second.first;
  return 0;
}

}  // extern "C"
