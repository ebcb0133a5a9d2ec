// CUDA's driver as transfers use it, in this process's memory. Streams run when they are pumped.
// What the real driver would refuse is refused: streams and events of another context, for example.
// A relay kernel is emulated from the parameters of its launch.
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

namespace {

struct Stream {
  void* context;
  std::deque<std::function<bool()>> operations;  // each returns whether it is over
  bool blocked = false, failing = false;
  int64_t issued = 0;
  bool waits_for_default = false;  // and the context's default stream for it
  std::vector<std::function<bool()>>* captured = nullptr;

  int64_t completed() const { return issued - int64_t(operations.size()); }
};
struct Record {
  bool is_over = false;
  double at_ms = 0;
};
struct Event {
  void* context;
  std::shared_ptr<Record> last;  // null: none yet
};
struct Piece {
  uint64_t target, source, size;
};
struct Relay {
  uint32_t *recalled, *started;
  uint32_t number, pieces;
  uint32_t stages, stage_bytes, recall_poll_bytes;
  Piece piece[160];
};

std::recursive_mutex mutex;
std::set<Stream*> streams;
std::set<Event*> events;
std::map<int, unsigned> shared_most;  // of a CTA, on each device
std::map<char*, size_t> host;
std::set<void*> registered;
std::pair<uint64_t, uint64_t> unpinned;
uint64_t border_from, border_to, border_bytes;  // registrations meet there; 0: nowhere
int64_t counts[4];  // copies, batches, launches, contexts that are current
thread_local std::vector<void*> current;

using Lock = std::lock_guard<std::recursive_mutex>;
constexpr int kInvalidValue = 1, kInvalidContext = 201, kInvalidHandle = 400, kLaunchFailed = 719, kNotReady = 600;

double now_ms() {
  return std::chrono::duration<double, std::milli>(
             std::chrono::steady_clock::now().time_since_epoch()).count();
}

#ifdef FAKE_DRIVER  // of whole programs: fake_driver.cpp
Stream* stream_of(void* handle);
void order(Stream* stream);
int refuse(const Piece& copy);
#else
Stream* stream_of(void* handle) { return static_cast<Stream*>(handle); }
void order(Stream*) {}
int refuse(const Piece&) { return 0; }
#endif

int enqueue(void* stream, std::function<bool()> run) {
  const Lock lock(mutex);
  Stream* one = stream_of(stream);
  if (!streams.count(one)) return kInvalidHandle;
  if (current.empty() || current.back() != one->context) return kInvalidContext;
  if (one->failing) return kLaunchFailed;
  if (one->captured != nullptr) {
    one->captured->push_back(std::move(run));
    return 0;
  }
  order(one);
  ++one->issued;
  one->operations.push_back(std::move(run));
  return 0;
}

bool move(const Piece& piece) {
  memmove(reinterpret_cast<void*>(piece.target), reinterpret_cast<void*>(piece.source), piece.size);
  return true;
}

bool crosses(const Piece& piece) {
  for (const uint64_t at : {piece.target, piece.source}) {
    const uint64_t last = at + piece.size - 1;
    const bool inside = border_from <= at && at < border_to;
    if (border_bytes > 0 && inside && at / border_bytes != last / border_bytes) return true;
  }
  return false;
}

bool relay(const Relay& p) {
  if (p.started != nullptr) {
    *p.started = p.number;
    if (*p.recalled == p.number) return true;
  }
  for (uint32_t i = 0; i < p.pieces; ++i) move(p.piece[i]);
  return true;
}

}  // namespace

extern "C" {

void fake_pump() {
  const Lock lock(mutex);
  for (Stream* stream : streams)
    while (!stream->blocked && !stream->operations.empty() && stream->operations.front()())
      stream->operations.pop_front();
}

void* fake_stream(void* context) {
  const Lock lock(mutex);
  return *streams.insert(new Stream{context, {}}).first;
}

void fake_block(void* stream, int blocked) {
  const Lock lock(mutex);
  static_cast<Stream*>(stream)->blocked = blocked;
}

void fake_fail(void* stream) {
  const Lock lock(mutex);
  static_cast<Stream*>(stream)->failing = true;
}

void fake_unpin(uint64_t start, uint64_t stop) {
  const Lock lock(mutex);
  unpinned = {start, stop};
}

void fake_borders(uint64_t start, uint64_t stop, uint64_t bytes) {
  const Lock lock(mutex);
  border_from = start, border_to = stop, border_bytes = bytes;
}

int64_t fake_count(int which) {  // 0 to 3: as `counts`; 4: what is still there
  const Lock lock(mutex);
  return which < 4 ? counts[which]
                   : streams.size() + events.size() + host.size() + registered.size();
}

int cuGetErrorName(int, const char** name) {
  *name = "CUDA_ERROR_OF_A_TEST";
  return 0;
}

// ---- contexts and memory ------------------------------------------------------------------------

int cuCtxPushCurrent_v2(void* context) {
  const Lock lock(mutex);
  ++counts[3];
  current.push_back(context);
  return 0;
}

int cuCtxPopCurrent_v2(void** context) {
  const Lock lock(mutex);
  if (current.empty()) return kInvalidContext;
  --counts[3];
  *context = current.back();
  current.pop_back();
  return 0;
}

#ifndef FAKE_DRIVER
int cuMemAlloc_v2(uint64_t* memory, size_t size) {
  const Lock lock(mutex);
  if (current.empty()) return kInvalidContext;
  char* made = new char[size];
  host[made] = size;
  *memory = reinterpret_cast<uint64_t>(made);
  return 0;
}

int cuMemFree_v2(uint64_t memory) {
  const Lock lock(mutex);
  char* made = reinterpret_cast<char*>(memory);
  if (current.empty() || !host.erase(made)) return kInvalidHandle;
  delete[] made;
  return 0;
}
#endif

int cuMemHostAlloc(void** memory, size_t size, unsigned) {
  const Lock lock(mutex);
  char* made = new char[size];
  host[made] = size;
  *memory = made;
  return current.empty() ? kInvalidContext : 0;
}

int cuMemHostGetDevicePointer_v2(uint64_t* address, void* memory, unsigned) {
  *address = reinterpret_cast<uint64_t>(memory);
  return 0;
}

int cuMemFreeHost(void* memory) {
  const Lock lock(mutex);
  delete[] static_cast<char*>(memory);
  return host.erase(static_cast<char*>(memory)) ? 0 : kInvalidHandle;
}

int cuMemHostRegister_v2(void* memory, size_t size, unsigned flags) {
  const Lock lock(mutex);
  if (current.empty() || flags != 3 || size == 0) return kInvalidContext;
  return registered.insert(memory).second ? 0 : kInvalidHandle;
}

int cuMemHostUnregister(void* memory) {
  const Lock lock(mutex);
  if (current.empty()) return kInvalidContext;
  return registered.erase(memory) ? 0 : kInvalidHandle;
}

#ifndef FAKE_DRIVER
int cuPointerGetAttribute(void* value, int attribute, uint64_t address) {
  const Lock lock(mutex);
  if (current.empty() || attribute != 2) return kInvalidContext;
  if (unpinned.first <= address && address < unpinned.second) return 1;
  *static_cast<int*>(value) = 1;
  return 0;
}
#endif

int cuCtxGetDevice(int* device) {
  if (current.empty()) return kInvalidContext;
  *device = int(reinterpret_cast<uintptr_t>(current.back())) - 1;
  return 0;
}

// ---- streams and events -------------------------------------------------------------------------

int cuCtxGetStreamPriorityRange(int* lowest, int* highest) {
  *lowest = 0, *highest = -5;
  return 0;
}

int cuStreamCreateWithPriority(void** stream, unsigned flags, int priority) {
#ifndef FAKE_DRIVER
  if (flags != 1) return kInvalidContext;
#endif
  if (current.empty() || (priority != -5 && priority != 0)) return kInvalidContext;
  *stream = fake_stream(current.back());
  static_cast<Stream*>(*stream)->waits_for_default = flags == 0;
  return 0;
}

#ifndef FAKE_DRIVER
int cuStreamSynchronize(void* stream) {
  fake_pump();
  const Lock lock(mutex);
  if (current.empty()) return kInvalidContext;
  return static_cast<Stream*>(stream)->operations.empty() ? 0 : kInvalidHandle;
}
#endif

int cuStreamDestroy_v2(void* stream) {
  const Lock lock(mutex);
  Stream* one = static_cast<Stream*>(stream);
  if (current.empty()) return kInvalidContext;
  if (!streams.count(one)) return kInvalidHandle;
#ifdef FAKE_DRIVER
  if (!one->operations.empty()) {  // it goes on without its handle
    one->waits_for_default = false;
    return 0;
  }
#else
  if (!one->operations.empty()) return kInvalidHandle;
#endif
  streams.erase(one);
  delete one;
  return 0;
}

int cuEventCreate(void** event, unsigned flags) {
  const Lock lock(mutex);
  if (current.empty() || (flags != 2 && flags != 0)) return kInvalidContext;
  *event = *events.insert(new Event{current.back(), nullptr}).first;
  return 0;
}

int cuEventDestroy_v2(void* event) {
  const Lock lock(mutex);
  if (current.empty()) return kInvalidContext;
  return events.erase(static_cast<Event*>(event)) ? 0 : kInvalidHandle;  // waits may still read it
}

int cuEventRecord(void* event, void* stream) {
  const Lock lock(mutex);
  Event* one = static_cast<Event*>(event);
  if (!events.count(one) || one->context != stream_of(stream)->context) return kInvalidHandle;
  const auto record = std::make_shared<Record>();
  one->last = record;
  return enqueue(stream, [record] {
    record->at_ms = now_ms();
    return record->is_over = true;
  });
}

int cuEventQuery(void* event) {
  const Lock lock(mutex);
  if (current.empty()) return kInvalidContext;
  if (!events.count(static_cast<Event*>(event))) return kInvalidHandle;
  const auto& record = static_cast<Event*>(event)->last;
  return record == nullptr || record->is_over ? 0 : kNotReady;
}

int cuStreamWriteValue32_v2(void* stream, uint64_t word, uint32_t value, unsigned flags) {
  const Lock lock(mutex);
  if (current.empty() || flags != 0) return kInvalidContext;
  return enqueue(stream, [=] {
    __atomic_store_n(reinterpret_cast<uint32_t*>(word), value, __ATOMIC_SEQ_CST);
    return true;
  });
}

int cuStreamWaitEvent(void* stream, void* event, unsigned) {
  const Lock lock(mutex);
  Event* one = static_cast<Event*>(event);
  if (!events.count(one)) return kInvalidHandle;
  const auto record = one->last;
  return enqueue(stream, [record] { return record == nullptr || record->is_over; });
}

// ---- copies -------------------------------------------------------------------------------------

int cuMemcpyAsync(uint64_t target, uint64_t source, size_t size, void* stream) {
  const Lock lock(mutex);
  if (crosses({target, source, size})) return kInvalidValue;
  if (const int refused = refuse({target, source, size})) return refused;
  ++counts[0];
  return enqueue(stream, [=] { return move({target, source, size}); });
}

int cuMemcpyBatchAsync_v2(uint64_t* targets, uint64_t* sources, size_t* sizes, size_t count,
                          const int* attributes, size_t* first, size_t attributes_count,
                          void* stream) {
  const Lock lock(mutex);
  if (attributes[0] != 1 || *first != 0 || attributes_count != 1) return kInvalidHandle;
  ++counts[1];
  std::vector<Piece> pieces;
  for (size_t i = 0; i < count; ++i) pieces.push_back({targets[i], sources[i], sizes[i]});
  if (std::any_of(pieces.begin(), pieces.end(), crosses)) return kInvalidValue;
  return enqueue(stream, [pieces] {
    for (const Piece& piece : pieces) move(piece);
    return true;
  });
}

int cuLibraryLoadData(void** library, const void* code, void*, void*, unsigned, void*, void*,
                      unsigned) {
  if (strcmp(static_cast<const char*>(code), "code") != 0) return kInvalidHandle;
  *library = const_cast<void*>(code);
  return 0;
}

int cuLibraryGetKernel(void** kernel, void* library, const char* name) {
  *kernel = library;
  return strcmp(name, "relay") ? kInvalidHandle : 0;
}

int cuKernelSetAttribute(int attribute, int value, void*, int device) {
  const Lock lock(mutex);
  if (attribute != 8 || value < 0 || value > 232448) return kInvalidHandle;
  shared_most[device] = std::max(shared_most[device], unsigned(value));
  return 0;
}

int cuLibraryUnload(void*) { return 0; }

int cuLaunchKernel(void* kernel, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned ty,
                   unsigned tz, unsigned shared, void* stream, void** parameters, void** extra) {
  const Lock lock(mutex);
  if (!kernel || !x || y != 1 || z != 1 || threads % 32 || ty != 1 || tz != 1 || extra)
    return kInvalidHandle;
  Relay copied = *static_cast<Relay*>(parameters[0]);
  int device = -1;
  if (cuCtxGetDevice(&device) || shared > shared_most[device]) return kInvalidHandle;
  if (shared != copied.stages * copied.stage_bytes) return kInvalidHandle;
  ++counts[2];
  return enqueue(stream, [copied] { return relay(copied); });
}

}  // extern "C"
